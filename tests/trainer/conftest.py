"""Lends ranks to the tests of the sharded trainer: they start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.rank_pool import RankPool


@pytest.fixture(scope="session")
def two() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def three() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
