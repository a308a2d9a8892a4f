"""Timelines show whole rounds, the same steps of every setting."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollover.frontier.pictures import LEAST_STEPS, WARMUP_STEPS, Picture, pictures, whole_rounds
from rollover.frontier.settings import setting
from rollover.report import measures
from tests.frontier.kit import small

SETUP = small()


def collection_starts(shown: Picture) -> set[int]:
    """Steps of the picture's run between whose batch and the one before samples were decoding."""
    steps = shown.timeline.steps
    ends_s = [shown.timeline.start_s, *(step.consumed_s for step in steps)]
    return {
        step.step
        for step, before_s in zip(steps, ends_s, strict=False)
        if step.consumed_s > before_s
        and any(n for _, n in measures.clip_curve(shown.timeline.active, before_s, step.consumed_s))
    }


SYNC, APRIL = setting("sync", SETUP, None), setting("april", SETUP, 2.0)


@pytest.mark.parametrize("target", [0.5, 1.0, 2.0, 3.0])
def test_a_picture_begins_with_a_collection_and_ends_before_the_next(target: float) -> None:
    rounds = setting("rollover", SETUP, target)
    shown = pictures(SETUP, (SYNC, APRIL, rounds))
    assert {(p.window.first_step, p.window.last_step) for p in shown} == {
        (shown[0].window.first_step, shown[0].window.last_step)
    }
    assert shown[0].window.first_step >= WARMUP_STEPS
    assert shown[0].window.last_step - shown[0].window.first_step + 1 >= LEAST_STEPS
    for picture in shown:
        starts = collection_starts(picture)
        assert {picture.window.first_step, picture.window.last_step + 1} <= starts
        assert picture.window.end_s > picture.window.start_s
        assert measures.visible(picture.timeline.samples, picture.window), "something is seen"


def test_a_round_is_several_batches_decoded_together() -> None:
    (shown,) = pictures(SETUP, (setting("rollover", SETUP, 3.0),))
    starts = sorted(collection_starts(shown))
    gaps = [b - a for a, b in pairwise(starts)]
    assert max(gaps) > 1, "several batches are trained from one round here"
    (sync,) = pictures(SETUP, (SYNC,))
    assert collection_starts(sync) == {s.step for s in sync.timeline.steps}


def test_a_stretch_of_whole_rounds_is_the_first_after_the_warm_up() -> None:
    assert whole_rounds({0, 4, 8, 12, 16}) == (8, 11)
    assert whole_rounds({0, 5, 10, 15}) == (10, 14)
    assert whole_rounds(set(range(20))) == (8, 10)
    assert whole_rounds({0, 4, 9, 11}) is None
