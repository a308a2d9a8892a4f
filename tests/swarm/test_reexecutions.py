"""When stretches are decoded again, by whom, and what follows, in virtual time with members that are functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.logprob_check import FLOAT32_TOLERANCE, HALF_TOLERANCE
from rollover.engine.noise import uniforms
from rollover.engine.reexecution import Verdict
from rollover.errors import EngineError
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Deliver, Effect, Send, SentAway
from rollover.swarm.coordinator.machine.streams import Piece
from rollover.swarm.coordinator.status.snapshot import swarm_status
from rollover.swarm.coordinator.trust.reexecutions import MISSED_S, PATIENCE_S, Reexecutions
from rollover.swarm.wire.messages import Assign, Leaving
from rollover.types import FinishReason
from tests.swarm.kit import LENGTH, VOCAB, ModelWorker, head, request
from tests.swarm.liars import CoarseInWords, ForgetsSeeds, Unseeded
from tests.swarm.test_coordinator import coordinator, join
from tests.virtual_time import VirtualClock, run

Sampler = Callable[[int, int], int]
"""The token that a member draws by a seed at a position."""


def honest(seed: int, position: int) -> int:
    return int(uniforms([seed], [position])[0] * VOCAB)


def by_other_noise(seed: int, position: int) -> int:
    return honest(seed + 1, position)


def altered_once(seed: int, position: int) -> int:
    return (honest(seed, position) + VOCAB // 2 * (position == 7)) % VOCAB


def deaf(seed: int, position: int) -> int:
    raise EngineError("it was lost")


@dataclass
class Swarm:
    """Members that draw from ``VOCAB`` equally probable tokens."""

    samplers: dict[str, Sampler]
    hub: Coordinator = field(default_factory=lambda: coordinator(ttl_s=1e9))
    effects: list[Effect] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    decode_s: float = 1.0
    tolerance: float = FLOAT32_TOLERANCE

    def __post_init__(self) -> None:
        for name in self.samplers:
            join(self.hub, ModelWorker(name))
        swarm: Any = self
        self.reexecutions = Reexecutions(
            swarm, self.hub, self.perform, VirtualClock(), share=1.0, tolerance=self.tolerance
        )

    def perform(self, effects: Iterable[Effect]) -> None:
        self.effects += effects

    async def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]:
        assert only is not None
        self.asked.append(only)
        await asyncio.sleep(self.decode_s)
        start, end = len(request.response_ids), request.params.max_new_tokens
        ids = tuple(self.samplers[only](request.seed, i) for i in range(start, end))
        version = self.hub.members[only].version or 0
        yield Chunk(
            token_ids=ids,
            logprobs=(-6.9,) * len(ids),
            policy_version=version,
            kv_version=version,
            finish_reason=FinishReason.LENGTH,
        )

    def sampled(self, name: str, by: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """A member has decoded a sample. ``meanwhile``: what it does before the call has ended."""
        asked = request(name)
        self.reexecutions.opened(asked)
        ids = tuple(self.samplers[by](asked.seed, i) for i in range(LENGTH))
        piece = Piece(
            offset=0,
            token_ids=ids,
            logprobs=(-6.9,) * LENGTH,
            version=0,
            kv_version=0,
        )
        self.reexecutions.delivered(Deliver(asked.request_id, piece, by))
        meanwhile()
        self.reexecutions.ended(asked.request_id)

    @property
    def sent_away(self) -> list[str]:
        return [effect.member for effect in self.effects if isinstance(effect, SentAway)]


def test_what_is_the_same_costs_its_tokens_and_nothing_else() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": honest})
        swarm.sampled("g0.0", "a")
        await asyncio.sleep(5)
        counters = swarm.reexecutions.counters
        assert swarm.asked == ["b"] and (counters.num_drawn, counters.num_same) == (1, 1)
        assert counters.num_tokens == LENGTH == swarm.hub.members["a"].num_verified and not swarm.sent_away

    run(law())


def test_a_third_member_decides_who_has_lied_the_one_that_sampled_or_the_one_that_looked() -> None:
    async def law() -> None:
        for liar, sampled_by in (("a", "a"), ("b", "a")):
            swarm = Swarm({name: by_other_noise if name == liar else honest for name in "abc"})
            swarm.hub.members["c"].ready = None  # it comes later
            swarm.sampled("g0.0", sampled_by)
            await asyncio.sleep(10)
            assert swarm.reexecutions.counters.num_disputed == 1 and not swarm.sent_away
            join(swarm.hub, ModelWorker("c"))
            swarm.reexecutions.proceed()
            await asyncio.sleep(10)
            if liar == "b":  # it draws its bounds by other noise too, so nobody holds its tokens for right
                assert set(swarm.sent_away) <= {"b"}
            else:
                assert swarm.sent_away == ["a"]

    run(law())


def test_without_a_third_the_trainer_is_asked_once_and_else_nobody_is_sent_away() -> None:
    async def law() -> None:
        for verdict, gone in ((Verdict.FIRST, ["a"]), (None, [])):
            swarm = Swarm({"a": by_other_noise, "b": honest})
            swarm.sampled("g0.0", "a")
            await asyncio.sleep(10)
            (dispute,) = swarm.reexecutions.disputes(0)
            assert (dispute.stretch.engine, dispute.second) == ("a", "b")
            assert swarm.reexecutions.disputes(0) == []
            if verdict is not None:
                swarm.reexecutions.decide(dispute, verdict)
            await asyncio.sleep(MISSED_S)
            swarm.reexecutions.proceed()
            assert swarm.sent_away == gone and swarm.reexecutions.num_open == 0
            assert swarm.reexecutions.counters.num_undecided == (verdict is None)

    run(law())


def test_calls_that_wait_go_first_but_not_for_ever() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": honest})
        for i in range(9):  # eight places
            swarm.effects += swarm.hub.opened(request(f"g1.{i}"))
        assert sum(isinstance(e, Send) and isinstance(e.message, Assign) for e in swarm.effects) == 8
        swarm.sampled("g0.0", "a")
        await asyncio.sleep(PATIENCE_S - 1)
        swarm.reexecutions.proceed()
        await asyncio.sleep(0)
        assert swarm.asked == []
        await asyncio.sleep(2)
        swarm.reexecutions.proceed()
        await asyncio.sleep(5)
        assert swarm.asked == ["b"] and swarm.reexecutions.counters.num_same == 1

    run(law())


def test_a_member_decodes_one_stretch_again_at_a_time() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": honest}, decode_s=3.0)
        for i in range(3):
            swarm.sampled(f"g0.{i}", "a")
        await asyncio.sleep(2)
        assert swarm.asked == ["b"]
        await asyncio.sleep(10)
        assert swarm.asked == ["b"] * 3 and swarm.reexecutions.counters.num_same == 3

    run(law())


def test_what_nobody_can_decode_again_is_missed() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": honest, "c": deaf})
        worker = ModelWorker("b")
        join(swarm.hub, worker)
        swarm.hub.published(head(1), 0.0)
        swarm.hub.received(worker.lease, worker.change(head(1)), 0.0)
        swarm.sampled("g0.0", "a")
        await asyncio.sleep(5)
        assert swarm.asked == ["c"], "b serves other weights"
        swarm.reexecutions.proceed()
        assert swarm.reexecutions.counters.num_missed == 1 and swarm.reexecutions.num_open == 0
        alone = Swarm({"a": honest})
        alone.sampled("g0.0", "a")
        await asyncio.sleep(MISSED_S + 1)
        alone.reexecutions.proceed()
        assert alone.reexecutions.counters.num_missed == 1 and not alone.asked

    run(law())


def test_what_a_member_says_of_other_weights_is_no_answer() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": by_other_noise})
        swarm.sampled("g0.0", "a")
        await asyncio.sleep(0.5)
        swarm.hub.members["b"].version = 1  # it has changed weights before it has decoded anything
        await asyncio.sleep(5)
        assert swarm.asked == ["b"] and swarm.reexecutions.counters.num_disputed == 0 and not swarm.sent_away

    run(law())


def test_what_is_closed_leaves_nothing_running() -> None:
    async def law() -> None:
        swarm = Swarm({"a": honest, "b": honest}, decode_s=100.0)
        swarm.sampled("g0.0", "a")
        swarm.reexecutions.proceed()
        await swarm.reexecutions.close()
        swarm.sampled("g0.1", "a")
        await asyncio.sleep(300)
        assert swarm.asked in ([], ["b"])

    run(law())


@pytest.mark.parametrize(("tolerance", "gone"), [(FLOAT32_TOLERANCE, ["a"]), (HALF_TOLERANCE, [])])
def test_a_member_that_says_it_computes_in_a_coarser_format_is_allowed_no_more_than_others(
    tolerance: float, gone: list[str]
) -> None:
    """One altered token of forty: the run's format decides whether rounding explains it."""

    async def law() -> None:
        swarm = Swarm({"a": altered_once, "b": honest, "c": honest}, tolerance=tolerance)
        join(swarm.hub, CoarseInWords("a"))
        swarm.sampled("g0.0", "a")
        await asyncio.sleep(10)
        swarm.reexecutions.proceed()
        await asyncio.sleep(10)
        assert swarm.sent_away == gone

    run(law())


@pytest.mark.parametrize("way_out", ["it leaves", "it joins again with another engine", "its lease ends"])
def test_a_liar_that_is_gone_before_its_call_has_ended_is_found(way_out: str) -> None:
    async def law() -> None:
        swarm = Swarm({"a": by_other_noise, "b": honest, "c": honest})
        lease = swarm.hub.members["a"].lease

        def escape() -> None:
            if way_out == "it leaves":
                swarm.perform(swarm.hub.received(lease, Leaving(reason="I have to go"), 0.0))
            elif way_out == "its lease ends":
                swarm.perform(swarm.hub.expire(2e9))
                for name in "bc":
                    join(swarm.hub, ModelWorker(name))
            else:
                join(swarm.hub, Unseeded("a"))

        swarm.sampled("g0.0", "a", escape)
        await asyncio.sleep(10)
        assert swarm.reexecutions.counters.num_disputed == 1
        await asyncio.sleep(10)
        assert swarm.sent_away == ["a"] and swarm.hub.members["a"].distrust

    run(law())


def test_who_draws_by_no_seed_is_not_decoded_again_and_people_are_told() -> None:
    async def law() -> None:
        swarm = Swarm({"a": by_other_noise, "b": honest, "c": honest})
        join(swarm.hub, Unseeded("a"))
        swarm.sampled("g0.0", "a")
        swarm.sampled("g0.1", "b")
        await asyncio.sleep(10)
        assert swarm.reexecutions.counters.num_drawn == 1 and not swarm.sent_away
        notes = {w.name: w.note for w in swarm_status(swarm.hub, "ws://x").workers}
        assert "does not draw tokens by seed" in notes.pop("a") and not any(notes.values())

    run(law())


def test_who_first_draws_by_seed_and_then_says_otherwise_is_sent_away() -> None:
    hub, liar = coordinator(), ForgetsSeeds("a")
    join(hub, liar)
    assert hub.members["a"].declared == liar.ready()
    (gone,) = [e for e in hub.received(liar.lease, liar.other(), 1.0) if isinstance(e, SentAway)]
    assert "seeded = False, but said True before" in gone.reason


def test_who_stays_behind_all_others_cannot_be_verified_and_people_are_told() -> None:
    async def law() -> None:
        swarm = Swarm({"a": by_other_noise, "b": honest})
        ahead = ModelWorker("b")
        join(swarm.hub, ahead)
        swarm.hub.published(head(1), 0.0)
        swarm.hub.received(ahead.lease, ahead.change(head(1)), 0.0)
        for i in range(4):
            assert not swarm_status(swarm.hub, "ws://x").workers[0].note
            swarm.sampled(f"g0.{i}", "a")
            await asyncio.sleep(5)
        notes = {w.name: w.note for w in swarm_status(swarm.hub, "ws://x").workers}
        assert notes["a"] == "none of 4 responses could be verified: no other worker served their versions"
        assert not notes["b"] and not swarm.sent_away

    run(law())
