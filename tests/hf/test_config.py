"""Configs are read in one place, and what cannot be trained is refused with the reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollover.errors import ModelError
from rollover.hf.config import read_model_config
from tests.speed import within
from tests.trainer.builders import make_folder


def test_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match=r"has no \*\.safetensors weights"):
        read_model_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapters beside a model: merge them .* or move adapter_config\.json and"):
        read_model_config(tmp_path)


def test_configs_and_folder_checks_need_no_torch(tmp_path: Path) -> None:
    make_folder(tmp_path)
    code = (
        "import sys, pathlib, rollover.trainer.config\n"
        "from rollover.hf.config import read_model_config\n"
        f"read_model_config(pathlib.Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=within(60))
