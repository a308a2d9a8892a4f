"""Kinds of servers and model folders for the tests of engines behind HTTP."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.engine.servers.vllm.kit import model_folder


@pytest.fixture(params=[vllm_kit, sglang_kit], ids=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> ModuleType:
    """The kit of a kind of server: a test that asks for it holds for each."""
    kit: ModuleType = request.param
    return kit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model that a run begins with."""
    return model_folder(tmp_path / "v0")


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Later weights of the same model."""
    return model_folder(tmp_path / "v1")
