"""The best source comes first; a failure lowers an estimate at once, and only time raises it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.publication.sources import BlobSources

A, B = "http://a", "http://b"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def download(sources: BlobSources, url: str, bytes_per_s: float, *, well: bool = True) -> None:
    sources.started(url)
    sources.ended(url, int(bytes_per_s), 1.0, well=well)


def test_the_first_listed_is_asked_first_then_the_unknown_then_the_fastest() -> None:
    sources = BlobSources([A, B], clock=Clock())
    assert sources.best() == A
    download(sources, A, 1000)
    assert sources.best() == B
    download(sources, B, 10)
    assert sources.best() == A and sources.best(avoid=[A]) == B and sources.best(avoid=[A, B]) is None


def test_downloads_under_way_share_a_bandwidth() -> None:
    sources = BlobSources([A, B], clock=Clock())
    download(sources, A, 300)
    download(sources, B, 200)
    sources.started(A)
    assert sources.best() == B  # half of 300 against 200
    sources.started(B)
    assert sources.best() == A


def test_a_failure_halves_the_success_and_five_minutes_bring_back_63_percent() -> None:
    clock = Clock()
    sources = BlobSources([A], clock=clock)
    download(sources, A, 100)
    download(sources, A, 0, well=False)
    assert (sources.estimate(A).success, sources.estimate(A).bytes_per_s) == (0.5, 100.0)
    clock.now_s = 300.0
    assert sources.estimate(A).success == pytest.approx(0.816, abs=0.001)


def test_a_source_that_fails_is_tried_again_when_it_has_healed() -> None:
    clock = Clock()
    sources = BlobSources([A, B], clock=clock)
    download(sources, A, 1000)
    download(sources, B, 400)
    for _ in range(2):
        download(sources, A, 0, well=False)
    assert sources.best() == B
    clock.now_s = 300.0
    assert sources.best() == A


def test_the_newest_bandwidth_counts_for_three_tenths() -> None:
    sources = BlobSources([A], clock=Clock())
    download(sources, A, 1000)
    download(sources, A, 2000)
    assert sources.estimate(A).bytes_per_s == pytest.approx(1300.0)


def test_what_is_known_of_a_source_outlives_its_absence_from_the_list() -> None:
    sources = BlobSources([f"{A}/"], clock=Clock())
    download(sources, A, 100)
    sources.use([B])
    assert sources.urls == (B,) and sources.best(avoid=[B]) is None
    sources.use([B, A, A])
    assert sources.urls == (B, A) and sources.estimate(A).bytes_per_s == 100.0


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.floats(0, 1e9), st.booleans(), st.floats(0, 1000)), max_size=30))
def test_estimates_stay_in_range_and_somebody_is_always_asked(
    history: list[tuple[str, float, bool, float]],
) -> None:
    clock = Clock()
    sources = BlobSources([A, B], clock=clock)
    for url, bytes_per_s, well, pause_s in history:
        before = sources.estimate(url).success
        download(sources, url, bytes_per_s, well=well)
        assert sources.estimate(url).success == pytest.approx(before if well else before / 2)
        clock.now_s += pause_s
        assert 0 <= sources.estimate(url).success <= 1 and sources.estimate(url).num_active == 0
        assert sources.best() in (A, B)
