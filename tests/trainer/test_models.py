from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.errors import ConfigError, ModelError
from rollover.hf.companions import read_companions
from rollover.trainer.models import named_weights, open_model, pick_device, save_model
from tests.trainer.builders import make_folder


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "cannot be loaded: property 'layer_types'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(make_folder(tmp_path), **changes)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)


def test_a_device_without_float64_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def of_mps(*sizes: int, dtype: torch.dtype | None = None, **given: Any) -> torch.Tensor:
        if dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return empty(*sizes, dtype=dtype, **given)

    monkeypatch.setattr(torch, "empty", of_mps)
    with pytest.raises(ConfigError, match=r"^sft\.device 'cpu' cannot be used \(Cannot convert a MPS"):
        pick_device("cpu", "sft")


def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path) -> None:
    tensors = load_file(make_folder(tmp_path) / "model.safetensors")
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"weights do not fit config\.json.*{name}"):
        open_model(tmp_path)
    save_file({**tensors, name: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights do not fit config\.json.*mismatched keys.*up_proj"):
        open_model(tmp_path)
    path.write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="cannot be loaded"):
        open_model(tmp_path)


def test_loading_says_nothing_on_the_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_model(make_folder(tmp_path))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_model_with_two_matrices_is_written_as_one_that_is_not_tied(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.flip(0)}, folder / "model.safetensors", metadata={"format": "pt"})
    model = open_model(folder)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= named_weights(model).keys()
    (tmp_path / "written").mkdir()
    save_model(model, tmp_path / "written", companions=read_companions(folder))
    assert json.loads((tmp_path / "written" / "config.json").read_text())["tie_word_embeddings"] is False
