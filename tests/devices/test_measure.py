"""A machine is measured from end to end, small; how well it predicts is a matter for an idle machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rollover.devices.fit import fit
from rollover.devices.measure import GPU, MeasuredSizes, _decodes, measure
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
