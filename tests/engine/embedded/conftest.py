"""A model, and what is set back behind a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.embedded import harness
from tests.engine.models import saved, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(sharpness=3.0), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute."""
    monkeypatch.setattr(harness, "CONFIG", replace(harness.CONFIG, cpu_kernels=request.param))
    return str(request.param)


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
