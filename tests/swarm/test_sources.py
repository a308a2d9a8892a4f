"""The best source comes first; a failure lowers an estimate at once, and only time raises it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.publication.sources import BlobSources

A, B, HOME = "http://a", "http://b", "http://home"
MB = 10**6


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def download(sources: BlobSources, url: str, bytes_per_s: float, *, elapsed_s: float = 1.0, well: bool = True) -> None:
    sources.started(url)
    sources.ended(url, int(bytes_per_s * elapsed_s), elapsed_s, well=well)


def test_the_first_listed_is_asked_first_then_the_unknown_then_the_fastest() -> None:
    sources = BlobSources([A, B, HOME], clock=Clock())
    assert sources.best() == A
    download(sources, A, 10 * MB)
    download(sources, B, 20 * MB)
    assert sources.best() == B and sources.best(avoid=[B]) == A and sources.best(avoid=[A, B]) == HOME
    assert sources.best(avoid=[A, B, HOME]) is None


def test_the_last_source_is_everybodys_and_is_spared_unless_it_is_worth_four_times_as_much() -> None:
    sources = BlobSources([A, HOME], clock=Clock())
    download(sources, A, 10 * MB)
    download(sources, HOME, 39 * MB)
    assert sources.best() == A
    download(sources, A, 0, well=False)
    assert sources.best() == HOME
    assert BlobSources([HOME], clock=Clock()).best() == HOME


def test_downloads_under_way_share_a_bandwidth() -> None:
    sources = BlobSources([A, B, HOME], clock=Clock())
    download(sources, A, 30 * MB)
    download(sources, B, 20 * MB)
    sources.started(A)
    assert sources.best() == B  # half of 30 against 20
    sources.started(B)
    assert sources.best() == A


def test_a_bandwidth_is_that_of_all_downloads_together() -> None:
    sources = BlobSources([A, HOME], clock=Clock())
    for _ in range(4):
        sources.started(A)
    sources.ended(A, MB, 1.0, well=True)
    assert sources.estimate(A).bytes_per_s == 4 * MB


def test_a_small_and_quick_download_says_nothing_of_the_bandwidth() -> None:
    """It takes as long as the way there and back: the manifest would make each relay look slow."""
    sources = BlobSources([A, HOME], clock=Clock())
    download(sources, A, 20_000, elapsed_s=0.1)
    assert sources.estimate(A).bytes_per_s is None and sources.best() == A
    download(sources, A, 2000, elapsed_s=10.0)
    assert sources.estimate(A).bytes_per_s == 2000 and sources.best() == HOME


def test_a_source_that_nobody_knows_is_tried_once_and_again_after_ten_minutes() -> None:
    clock = Clock()
    sources = BlobSources([A, HOME], clock=clock)
    assert sources.untried() == HOME
    sources.started(HOME)
    assert sources.untried() is None  # somebody is trying it
    sources.ended(HOME, MB, 1.0, well=True)
    assert sources.untried() is None
    download(sources, A, 10 * MB)
    clock.now_s = 601.0
    assert sources.untried() == HOME and sources.untried(avoid=[HOME]) is None
    download(sources, HOME, 0, well=False)
    assert sources.untried() is None


def test_a_failure_halves_the_success_and_five_minutes_bring_back_63_percent() -> None:
    clock = Clock()
    sources = BlobSources([A], clock=clock)
    download(sources, A, MB)
    download(sources, A, 0, well=False)
    assert (sources.estimate(A).success, sources.estimate(A).bytes_per_s) == (0.5, MB)
    clock.now_s = 300.0
    assert sources.estimate(A).success == pytest.approx(0.816, abs=0.001)


def test_a_source_that_fails_is_tried_again_when_it_has_healed() -> None:
    clock = Clock()
    sources = BlobSources([A, B, HOME], clock=clock)
    download(sources, A, 10 * MB)
    download(sources, B, 4 * MB)
    for _ in range(2):
        download(sources, A, 0, well=False)
    assert sources.best() == B
    clock.now_s = 300.0
    assert sources.best() == A


def test_a_source_that_says_nothing_rests_for_five_minutes_but_the_last_one_never() -> None:
    clock = Clock()
    sources = BlobSources([A, B, HOME], clock=clock)
    download(sources, A, 100 * MB)
    download(sources, B, 20 * MB)
    for url in (A, HOME):
        sources.started(url)
        sources.ended(url, 0, 15.0, well=False, is_silent=True)
    assert sources.best() == B and sources.bandwidth_elsewhere(B) < 1
    assert sources.best(avoid=[B]) == HOME and sources.best(avoid=[B, HOME]) == A, "what no other has it is asked for"
    clock.now_s = 299.0
    assert sources.best() != A
    clock.now_s = 301.0
    assert sources.best() == A


def test_a_slow_source_is_worth_leaving_for_one_that_is_not_known_and_has_not_failed_lately() -> None:
    clock = Clock()
    sources = BlobSources([A, HOME], clock=clock)
    assert sources.bandwidth_elsewhere(A) == MB / 4 and sources.bandwidth_elsewhere(A, avoid=[HOME]) == 0
    download(sources, A, 40 * MB)
    assert sources.bandwidth_elsewhere(A) == 10 * MB
    download(sources, HOME, 0, well=False)
    assert sources.bandwidth_elsewhere(A) == 0, "it may not be reachable from here"
    clock.now_s = 601.0
    assert sources.bandwidth_elsewhere(A) > 9 * MB


def test_the_newest_bandwidth_counts_for_three_tenths() -> None:
    sources = BlobSources([A], clock=Clock())
    download(sources, A, 10 * MB)
    download(sources, A, 20 * MB)
    assert sources.estimate(A).bytes_per_s == pytest.approx(13 * MB)


def test_what_is_known_of_a_source_outlives_its_absence_from_the_list() -> None:
    sources = BlobSources([f"{A}/"], clock=Clock())
    download(sources, A, MB)
    sources.use([B])
    assert sources.urls == (B,) and sources.best(avoid=[B]) is None
    sources.use([B, A, A])
    assert sources.urls == (B, A) and sources.estimate(A).bytes_per_s == MB


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
