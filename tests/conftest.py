"""Skips what needs a GPU where there is none; lends tiny experiments to the end-to-end tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import runs

if not torch.cuda.is_available():
    # Triton reads this when it is first imported (transformers does, where it is installed): its own functions are
    # then interpreted too, as ours are in the tests.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: a test fails for everyone or for nobody.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 model folder with a tokenizer of one token per character."""
    return runs.save_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def experiment(tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    """The working directory, with ``run.toml`` and all it names in it."""
    with runs.working_in(tmp_path, tiny_model):
        yield tmp_path
