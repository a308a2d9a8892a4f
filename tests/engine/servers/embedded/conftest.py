"""Models, and a server of one of them, for the tests of servers of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.servers.embedded.kit import model, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that a run begins with."""
    return model(tmp_path_factory.mktemp("model") / "initial")


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Later weights of the same model."""
    return model(tmp_path_factory.mktemp("model") / "later", seed=1)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving(folder) as url:
        yield url
