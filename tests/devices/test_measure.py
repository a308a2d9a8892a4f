"""A machine is measured from end to end, small; how well it predicts is a matter for an idle machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.devices.fit import fit
from rollover.devices.measure import GPU, MeasuredSizes, _decodes, _link, measure
from rollover.errors import ModelError
from rollover.trainer.config import ScratchConfig
from tests.engine.models import saved, tiny_model


def test_every_quantity_is_measured_and_makes_a_device() -> None:
    sizes = MeasuredSizes(
        scratch=ScratchConfig(max_position=256),
        batches=(1, 2, 4),
        context_tokens=16,
        prompts=(16, 32),
        sequences=(2, 4),
        response_tokens=8,
        matrix=128,
        copy_bytes=2**20,
        repeats=3,
    )
    found = measure(device="cpu", sizes=sizes)
    works = [("decode", n, 18.5) for n in (1, 2, 4)] + [("prefill", 1, n) for n in (16, 32)]
    assert [(p.work, p.count, p.tokens) for p in found.points] == [*works, ("train", 2, 8), ("train", 4, 8)]
    assert all(point.seconds > 0 for point in found.points)
    assert min(found.flops, found.copy_bytes_per_s, found.link_bytes_per_s, found.memory_bytes) > 0
    assert fit(found, "here").device.hbm_bytes == found.memory_bytes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("olmo2", r"config\.json: model_type 'olmo2' is not supported"),
        ("llama", r"config\.json: max_position_embeddings = 512, and contexts of 1,032 tokens are measured"),
    ],
)
def test_a_model_that_cannot_be_measured_or_fitted_is_refused_at_once(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollover.devices.measure._link", None)
    with pytest.raises(ModelError, match=message):
        measure(saved(tiny_model(kind), tmp_path), device="cpu")


def test_the_link_of_the_last_gpu_leads_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[torch.device] = []
    cpu = {name: getattr(torch, name) for name in ("zeros", "empty")}
    for name in cpu:

        def made(*sizes: int, device: torch.device, name: str = name, **_: Any) -> torch.Tensor:
            places.append(device)
            return cpu[name](*sizes, dtype=torch.uint8)  # type: ignore[no-any-return]

        monkeypatch.setattr(torch, name, made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    _link(torch.device("cuda", 1), replace(GPU, copy_bytes=8, repeats=1))
    assert [place.index for place in places] == [0, 1, 0, 1]


def test_a_batch_is_decoded_together_however_many_iterations_its_prompts_take(tmp_path: Path) -> None:
    folder = saved(
        tiny_model("llama", num_hidden_layers=1, num_key_value_heads=4, max_position_embeddings=2048), tmp_path
    )
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]  # as in older configs, whose heads each have keys of their own
    (folder / "config.json").write_text(json.dumps(config))
    [point] = _decodes(folder, "cpu", config, replace(GPU, batches=(72,), context_tokens=690, repeats=1))
    sampled = sum(range(1, 37)) / 36  # two prompts an iteration: the first have 36 tokens once the last have one
    assert (point.count, point.tokens) == (72, 690 + sampled + 0.5)
