"""The publications that a worker names to a coordinator."""

from __future__ import annotations

from rollover.engine.base import Chunk
from rollover.swarm.worker.held import HeldCalls
from rollover.swarm.worker.served import ServedHeads
from tests.swarm.worker_kit import assign, head


def test_tokens_that_come_out_of_the_engine_after_an_update_have_their_version_named() -> None:
    held = HeldCalls(1000)
    served = ServedHeads(held)
    for version in (7, 8):
        served.add(head(version))
    assert served.needed() == (head(8),)
    stream = held.open(assign("a"))
    assert stream is not None
    held.decoded(stream, Chunk(token_ids=(5,), logprobs=(-1.0,), policy_version=7, kv_version=7))
    assert served.needed() == (head(7), head(8))


def test_a_later_epoch_that_goes_back_names_no_version_that_it_has_not_made() -> None:
    served = ServedHeads(HeldCalls(1000))
    for each in (head(7), head(8), head(6, epoch=2), head(7, epoch=2)):
        served.add(each)
    assert served.needed() == (head(7, epoch=2),)
    assert head(8) not in served.needed()


def test_no_more_are_kept_than_a_coordinator_remembers() -> None:
    held = HeldCalls(1000)
    served = ServedHeads(held)
    stream = held.open(assign("a"))
    assert stream is not None
    held.decoded(stream, Chunk(token_ids=(5,), logprobs=(-1.0,), policy_version=0, kv_version=0))
    for version in range(100):
        served.add(head(version))
    assert len(served.needed()) == 64
