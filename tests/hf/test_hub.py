"""A model is found by its folder or by its id on the hub."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover.errors import ModelError
from rollover.hf.hub import public_name, resolve_model


def test_a_folder_resolves_to_itself_and_a_missing_one_is_named(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelError, match=r"nowhere' does not exist; give a folder with config\.json or a hub id"):
        resolve_model(tmp_path / "nowhere")


def test_a_hub_id_that_cannot_be_fetched_is_told_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=ConnectionError("no route")))
    with pytest.raises(ModelError, match="'some/model' is not a folder here and could not be fetched from the hub"):
        resolve_model("some/model")


def test_a_model_is_named_by_its_hub_id_or_its_folder_never_by_a_path(tmp_path: Path) -> None:
    cached = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de"
    assert public_name(cached) == "Qwen/Qwen3-0.6B"
    assert public_name(tmp_path / "mine") == "mine"
