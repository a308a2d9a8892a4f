"""Lends ranks, which start once, and the models that they train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollover.trainer import ranks
from tests.trainer import forked_ranks
from tests.trainer.builders import make_folder
from tests.trainer.rank_pool import RankPool


def pool_of(size: int) -> Any:
    @pytest.fixture(scope="session")
    def pool() -> Iterator[RankPool]:
        made = RankPool(size)
        yield made
        made.close()

    return pool


two, three, four = pool_of(2), pool_of(3), pool_of(4)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of fleets start in a fraction of a second."""
    monkeypatch.setattr(ranks, "_start", forked_ranks.start)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("model") / "policy")
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Model folders, with one matrix for input and output and with two."""
    root = tmp_path_factory.mktemp("models")
    return {tied: make_folder(root / f"tied-{tied}", tie_word_embeddings=tied) for tied in (True, False)}
