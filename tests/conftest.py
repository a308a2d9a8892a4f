"""Skips what needs a GPU where there is none; lends tiny experiments to the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import runs

# The same examples in every run: a test fails for everyone or for nobody.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
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
