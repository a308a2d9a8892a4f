"""Calls are cut into stretches that one member sampled under one version."""

from __future__ import annotations

from rollover.engine.reexecution import Lot
from rollover.swarm.coordinator.machine.effects import Deliver
from rollover.swarm.coordinator.machine.streams import Piece
from rollover.swarm.coordinator.trust.recorder import Recorder
from tests.swarm.kit import request, response


def piece(start: int, end: int, version: int, kv_version: int | None = None) -> Piece:
    return Piece(
        offset=start,
        token_ids=response("g0.0.", start, end),
        logprobs=(-0.5,) * (end - start),
        version=version,
        kv_version=version if kv_version is None else kv_version,
    )


def test_a_call_makes_a_stretch_for_each_version_whose_cache_others_can_have() -> None:
    recorder = Recorder(Lot(1.0))
    recorder.opened(request("g0.0", num_done=2))
    for each in (piece(2, 5, 3), piece(5, 9, 3), piece(9, 12, 4, 3), piece(12, 14, 4), piece(14, 15, 4)):
        recorder.delivered(Deliver("g0.0#0.", each, "a"), is_seeded=True)
    one, two = recorder.ended("g0.0#0.")
    assert (one.start, one.end, one.version, one.engine) == (2, 9, 3, "a")
    assert (two.start, two.end, two.version) == (12, 15, 4)
    assert one.token_ids == response("g0.0.", 2, 9) and two.request.response_ids == response("g0.0.", 0, 12)
    assert recorder.ended("g0.0#0.") == []


def test_what_was_not_drawn_is_not_recorded() -> None:
    recorder = Recorder(Lot(0.0))
    recorder.opened(request("g0.0"))
    recorder.delivered(Deliver("g0.0#0.", piece(0, 5, 1), "a"), is_seeded=True)
    assert recorder.ended("g0.0#0.") == []


def test_what_was_not_drawn_by_seed_is_in_no_stretch_and_parts_those_around_it() -> None:
    recorder = Recorder(Lot(1.0))
    recorder.opened(request("g0.0"))
    for start, is_seeded in ((0, True), (5, True), (10, False), (15, True)):
        recorder.delivered(Deliver("g0.0#0.", piece(start, start + 5, 1), "a"), is_seeded=is_seeded)
    assert [(s.start, s.end) for s in recorder.ended("g0.0#0.")] == [(0, 10), (15, 20)]
