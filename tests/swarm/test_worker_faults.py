"""A worker among weights that do not come, coordinators that do not answer or say nonsense, and engines that break."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from rollover.engine.base import Capabilities, Chunk, GenerateRequest
from rollover.errors import CallDisplaced, EngineError
from rollover.swarm.publication.manifest import PublicationRefused
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Abort,
    Assign,
    Decoded,
    FromWorker,
    Goodbye,
    Head,
    Heartbeat,
    Leaving,
    NotServing,
    Ready,
    Release,
    Serving,
    Welcome,
    encode,
)
from rollover.swarm.worker.connection import CoordinatorConnection, Disconnected, Refused, RunEnded
from rollover.swarm.worker.host import EngineBroken
from rollover.swarm.worker.updates import MAX_REFUSED
from rollover.types import FinishReason
from rollover.weights.base import WeightSource
from tests.engine.fake import FakeEngine
from tests.swarm.test_worker_engine import Hanging
from tests.swarm.worker_kit import Bench, acked, assign, head, length_of, tokens, with_worker

# -- weights --------------------------------------------------------------------------------------------------------


@with_worker()
async def test_of_a_storm_of_heads_the_one_in_hand_and_the_newest_are_taken(bench: Bench) -> None:
    link = await bench.member(head(0))
    bench.fetcher.gate.clear()
    for version in range(1, 40):
        await link.send(head(version))
    await link.send(head(3))  # late
    await link.send(assign("a", limit=1))
    await bench.until(lambda: bench.engine.requests)  # it serves while it fetches
    await bench.engine.tick()
    assert await link.ended("a") == "length"
    bench.fetcher.gate.set()
    await link.serving(39)
    fetched = [asked[0].version for asked in bench.fetcher.asked]
    assert fetched[0] == 0 and fetched[-1] == 39 and len(fetched) <= 3
    loads = [event for event in bench.engine.events if event[0] == "load"]
    assert loads == [("load", version) for version in fetched[1:]]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (EngineError("blob 9c1e is damaged"), "blob 9c1e is damaged"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/blobs/9c1e"),
            "/cache/blobs/9c1e: no space left on device; make room, or choose a place on another disk",
        ),
    ],
)
@with_worker()
async def test_a_failed_fetch_changes_nothing_and_is_tried_again(bench: Bench, failure: Exception, reason: str) -> None:
    link = await bench.member(head(0))
    bench.fetcher.failures = [failure] * 2
    await link.send(head(1))
    assert await link.first(NotServing) == NotServing(version=1, reason=reason)
    assert f"version 1 is not served: {reason}" in bench.lines
    assert bench.engine.version == 0
    await bench.serving_after(link, 1)
    assert len(link.all(NotServing)) == 2


@with_worker()
async def test_one_version_of_two_manifests_is_reported_and_not_taken(bench: Bench) -> None:
    link = await bench.member(head(3))
    for _ in range(3):
        await link.send(Head(version=3, manifest="f" * 64))
    await link.send(head(4))
    await link.serving(4)
    (failed,) = link.all(NotServing)
    assert failed.reason == f"version 3 is said to be {'f' * 64}, but was {head(3).manifest} before"


class Recomputing(FakeEngine):
    """Its running calls do not survive new weights."""

    def __init__(self) -> None:
        super().__init__(length_of)
        self.capabilities = Capabilities(max_running=64, max_context_tokens=4096, in_flight_update=False, seeded=True)

    async def load(self, version: int, source: WeightSource) -> None:
        assert not self.stats().num_running, "calls are stopped before"
        await super().load(version, source)


@with_worker(make_engine=Recomputing)
async def test_an_engine_that_loses_its_calls_at_an_update_still_makes_one_call(bench: Bench) -> None:
    link = await bench.decoding(4, assign("a", done=tokens(7, 0, 2), limit=12))
    await link.send(head(1))
    await link.serving(1)
    await bench.until(lambda: len(bench.engine.requests) == 2)
    assert bench.engine.requests[1].response_ids == tokens(7, 0, 6)
    await bench.engine.tick(6)
    assert await link.ended("a") == "length"
    assert sorted(bench.coordinator.tokens["a"]) == [*range(2, 12)], "it goes on behind the response that it is given"
    assert bench.coordinator.response("a") == tokens(7, 2, 6) + tokens(7, 6, 12, 1)
    assert [m.num_prefilled_tokens for m in link.all(Decoded) if m.num_prefilled_tokens] == [2]
    assert [m.finish_reason for m in link.all(Decoded)].count(None) == len(link.all(Decoded)) - 1


@with_worker(make_engine=lambda: FakeEngine(length_of, auto=True, max_context_tokens=10**6))
async def test_a_version_is_announced_before_a_token_of_it_is_sent(bench: Bench) -> None:
    link = await bench.member(head(0))
    for name in "abcdef":
        await link.send(assign(name, limit=10**5))
    for version in range(1, 6):
        await link.send(head(version))
        await link.serving(version)
        await link.until(lambda: any(isinstance(m, Decoded) for m in link.seen[-3:]))
    confirmed = -1
    for message in link.seen:
        if isinstance(message, Serving):
            confirmed = message.version
        elif isinstance(message, Decoded):
            assert message.version <= confirmed
    assert confirmed == 5


# -- room -----------------------------------------------------------------------------------------------------------


@with_worker(max_held_tokens=16)
async def test_a_worker_that_holds_too_much_stands_still_and_drops_nothing(bench: Bench) -> None:
    link = await bench.decoding(30, assign("a"), assign("b"))
    await bench.until(lambda: not bench.engine.stats().num_running)
    decoded = [len(bench.coordinator.response(name)) for name in "ab"]
    assert sum(decoded) == 16
    await link.send(assign("c"))
    await link.send(acked("a", decoded[0]))  # which is half: there is room again
    await bench.until(lambda: len(bench.engine.requests) == 5)
    for _ in range(200):
        await bench.engine.tick(1)
        for name in "abc":
            await link.send(acked(name, len(bench.coordinator.response(name))))
        if len(bench.coordinator.endings) == 3:
            break
    assert {name: await link.ended(name) for name in "abc"} == dict.fromkeys("abc", "length")
    assert all(bench.coordinator.response(name) == tokens(7, 0, 40) for name in "abc")


# -- leases ---------------------------------------------------------------------------------------------------------


@with_worker()
async def test_heartbeats_come_every_third_of_a_lease_and_say_how_it_went(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=30.0)
    await bench.clock.move(1.0)
    for name, limit in (("a", 4), ("b", 9)):
        await link.send(assign(name, limit=limit))
    await bench.until(lambda: len(bench.engine.requests) == 2)
    await bench.clock.move(3.0)
    await bench.engine.tick(4)
    assert await link.ended("a") == "length"
    await bench.clock.move(2.0)
    await bench.engine.tick(5)
    assert await link.ended("b") == "length"
    for number in (1, 2):
        await bench.clock.move(10.0)
        await link.until(lambda number=number: len(link.all(Heartbeat)) == number)  # type: ignore[misc]
    busy, idle = link.all(Heartbeat)
    assert (busy.number, idle.number, busy.num_held, idle.num_held) == (1, 2, 13, 13)
    assert (busy.num_running, busy.mean_running) == (0, pytest.approx((3.0 + 3.0 + 2.0) / 10.0))
    assert busy.tokens_per_s == pytest.approx(13 / 10.0)
    assert (idle.mean_running, idle.tokens_per_s) == (0.0, 0.0)


@with_worker()
async def test_a_coordinator_that_does_not_answer_for_a_lease_is_left(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=30.0)
    link.beats = False
    await bench.clock.move(29.0)
    await link.first(Heartbeat)
    assert not link.is_closed
    await bench.clock.move(2.0)
    await link.until(lambda: link.is_closed)
    assert any("has not answered for the length of a lease" in line for line in bench.lines)
    await bench.member_again(head(0))


@with_worker()
async def test_a_worker_back_after_its_lease_hands_over_what_is_still_wanted(bench: Bench) -> None:
    link = await bench.decoding(3, assign("a"), assign("b"), ttl_s=30.0)
    await link.until(lambda: len(bench.coordinator.tokens.get("b", {})) == 3)
    link.beats = False  # its coordinator has given the lease up meanwhile
    bench.clock.jump(300.0)
    await bench.clock.move(0.0)
    await link.until(lambda: link.is_closed)
    await bench.engine.tick(5)
    back = await bench.member_again(head(0))
    assert {(call.call_id, call.end) for call in back.hello.held} == {("a", 8), ("b", 8)}
    await back.send(Release(call_ids=("a",)))  # done elsewhere
    await back.adopt(back.hello.held[1], offset=3)
    await bench.until(lambda: bench.engine.stats().num_running == 1)
    await bench.engine.tick(40)
    assert await back.ended("b") == "length"
    assert {message.call_id for message in back.all(Decoded)} == {"b"}
    assert len(bench.coordinator.response("a")) == 3 and bench.coordinator.num_repeated == 0


class SlowToStop(Hanging):
    """Its loop lives, but the calls that it should stop can be held up."""

    async def abort(self, request_ids: Any) -> None:
        if any(request_id in self._calls for request_id in request_ids):
            await super().abort(request_ids)


@with_worker(make_engine=SlowToStop)
async def test_a_call_that_is_wanted_again_before_it_has_stopped_goes_on(bench: Bench) -> None:
    link = await bench.decoding(5)
    await link.until(lambda: len(bench.coordinator.tokens.get("a", {})) == 5)
    bench.engine.goes_on.clear()  # type: ignore[attr-defined]
    await link.send(Abort(call_ids=("a",)))
    await link.send(assign("c", limit=1))
    await bench.until(lambda: len(bench.engine.requests) == 2)  # the abort is with the engine
    await link.cut()
    link = await bench.again()
    await link.welcome(head(0))
    (held,) = [call for call in link.hello.held if call.call_id == "a"]
    await link.adopt(held, as_id="b", offset=5)
    await link.send(assign("d", limit=1))
    await bench.until(lambda: len(bench.engine.requests) == 3)
    bench.engine.goes_on.set()  # type: ignore[attr-defined]
    await bench.until(lambda: len(bench.engine.requests) == 4)
    assert bench.engine.requests[-1].response_ids == tokens(7, 0, 5)
    await bench.engine.tick(35)
    assert await link.ended("b") == "length"
    assert bench.coordinator.response("b") == tokens(7, 0, 40)
    assert "a" not in bench.coordinator.endings


# -- what a coordinator may say ---------------------------------------------------------------------------------------


@with_worker()
async def test_a_goodbye_is_followed_by_another_hello_unless_it_is_final(bench: Bench) -> None:
    link = await bench.member(head(0))
    await link.send(Goodbye(reason="fenced: not heard from for 15 s", is_final=False))
    back = await bench.member_again(head(0))
    assert back.lease == link.lease + 1
    assert any("fenced: not heard from for 15 s; trying again" in line for line in bench.lines)
    await back.send(Goodbye(reason="'laptop' is no longer trusted", is_final=True))
    error = await bench.failure(Refused)
    assert str(error).endswith("refuses this worker: 'laptop' is no longer trusted")


@with_worker(away_timeout_s=60.0)
async def test_a_worker_that_is_away_for_too_long_gives_up(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=30.0)
    await bench.clock.move(100.0)  # heartbeats are answered: it is not away
    assert not link.is_closed
    bench.coordinator.refuse(503, "down for repair")
    await link.cut()
    error = await bench.failure(Refused)
    assert "HTTP 503" in str(error)
    assert 160.0 <= bench.clock.now_s() <= 165.0
    assert str(error).endswith("if the run goes on, start this worker again with the same command")


@with_worker()
async def test_why_it_ended_is_read_if_sending_saw_it_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, send = CoordinatorConnection.receive, CoordinatorConnection.send
    came: list[RunEnded] = []
    failed: list[FromWorker] = []

    async def received_late(self: CoordinatorConnection) -> Any:
        try:
            return await receive(self)
        except RunEnded as e:
            came.append(e)
            while not failed:
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
            raise

    async def sent(self: CoordinatorConnection, message: FromWorker) -> None:
        if came:
            failed.append(message)
            raise Disconnected("broken pipe")
        await send(self, message)

    monkeypatch.setattr(CoordinatorConnection, "receive", received_late)
    monkeypatch.setattr(CoordinatorConnection, "send", sent)
    link = await bench.member(head(0))
    await link.send(Goodbye(reason="the run has ended", is_final=True, has_ended=True))
    await bench.until(lambda: came)
    await bench.clock.move(5.0)
    assert isinstance(failed[0], Heartbeat)
    assert bench.running is not None
    await bench.running
    assert bench.lines[-1] == "left the swarm: the run has ended"


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (401, "the token was revoked", "refuses the token of 'laptop' (HTTP 401): the token was revoked"),
        (403, "", "refuses the token of 'laptop' (HTTP 403)"),
        (426, "this run speaks v2", "does not speak this worker's protocol: this run speaks v2"),
        (404, "", "accepts no workers at the path /v1/session (HTTP 404); are the address and its path right?"),
    ],
)
@with_worker()
async def test_a_refusal_for_good_ends_the_worker(bench: Bench, status: int, text: str, message: str) -> None:
    bench.coordinator.refuse(status, text)
    error = await bench.failure(Refused)
    assert message in str(error)
    assert "rw1." not in str(error)


@with_worker()
async def test_weights_that_are_not_for_this_worker_end_it_after_a_few_tries(bench: Bench) -> None:
    link = await bench.decoding(5)
    bench.fetcher.failures = [PublicationRefused("the manifest is not signed by the publisher")] * MAX_REFUSED
    await link.send(head(1))
    error = await bench.failure(PublicationRefused)
    assert [asked.version for asked, _, _ in bench.fetcher.asked] == [0] + [1] * MAX_REFUSED
    await link.until(lambda: link.is_closed)
    assert link.all(Leaving) == [Leaving(reason=str(error))]
    assert bench.coordinator.endings == {}
    assert bench.coordinator.response("a") == tokens(7, 0, 5), "what it has decoded is handed over"


@with_worker()
async def test_a_relay_that_is_damaged_for_a_moment_ends_no_worker(bench: Bench) -> None:
    link = await bench.member(head(0))
    damaged = [PublicationRefused("the manifest cannot be read")] * (MAX_REFUSED - 1)
    bench.fetcher.failures = [*damaged, EngineError("the relay is away"), *damaged]
    await link.send(head(1))
    await bench.serving_after(link, 1)
    assert len(link.all(NotServing)) == 2 * len(damaged) + 1 and not bench.fetcher.failures


@with_worker()
async def test_an_older_epoch_of_the_run_is_not_served_and_left_if_it_stays(bench: Bench) -> None:
    await (await bench.member(head(5), epoch=3)).cut()
    back = await bench.again()
    await back.welcome(head(9), epoch=2)
    await back.until(lambda: back.is_closed)
    await bench.until(lambda: any("an old coordinator must still be running" in line for line in bench.lines))
    assert bench.engine.version == 5
    await (await bench.member_again(head(6), epoch=3)).cut()
    num_welcomed = 0

    async def old(socket: ServerConnection) -> None:
        nonlocal num_welcomed
        num_welcomed += 1
        await socket.recv()
        welcome: dict[str, Any] = {"protocol": PROTOCOL, "member": "laptop", "lease": 1, "ttl_s": 15.0}
        await socket.send(encode(1, Welcome(**welcome, run_id="sums", run_epoch=2, head=head(9))))
        await socket.wait_closed()

    bench.coordinator.raw = old
    error = await bench.failure(Refused)
    assert num_welcomed == 10
    assert "an old coordinator must still be running; if the run was set back" in str(error)


@with_worker()
async def test_a_worker_leaves_when_its_coordinator_serves_another_run(bench: Bench) -> None:
    await (await bench.member(head(5))).cut()
    await (await bench.again()).welcome(head(2, 7), run_id="chess")
    error = await bench.failure(Refused)
    assert "runs chess now, but this worker works for sums: start" in str(error)


@with_worker()
async def test_a_coordinator_that_chooses_no_protocol_is_none(bench: Bench) -> None:
    bench.coordinator.subprotocol = None
    error = await bench.failure(Refused)
    assert "speaks another protocol, but this worker speaks rollover.swarm.v2" in str(error)


@pytest.mark.parametrize("status", [500, 502, 503, 429, 404])
@with_worker()
async def test_a_member_comes_back_through_what_may_heal(bench: Bench, status: int) -> None:
    link = await bench.member(head(0))
    bench.coordinator.refuse(status)
    await link.cut()
    while len(bench.coordinator.authorizations) < 4:
        await bench.clock.move(1.0)
    bench.coordinator.refuse_with = None
    await bench.member_again(head(0))
    assert sum(f"HTTP {status}" in line for line in bench.lines) == 1


async def test_a_coordinator_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.coordinator.listening():
        pass
    worker = bench.worker()
    running = asyncio.create_task(worker.run())
    await bench.until(lambda: any("cannot be reached" in line for line in bench.lines))
    async with bench.coordinator.listening():
        await bench.member_again(head(0))
        worker.stop("done")
        await running


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ("text", "a text frame of 4 characters"),
        (b"\x00\x81", "a frame of 2 bytes cannot be read"),
        (b"\x00" + bytes(17 * 2**20), "the connection to"),
        (encode(99, head(1)), "a message of lease 99 came under lease 1"),
        (encode(1, acked("a", 5)), "5 tokens of a are acknowledged, but 0 are decoded"),
        (
            encode(1, Welcome(protocol=PROTOCOL, member="x", lease=1, ttl_s=1, run_id="", run_epoch=0, head=head(0))),
            "a Welcome",
        ),
    ],
    ids=["text", "cut", "large", "lease", "ack", "welcome"],
)
@with_worker()
async def test_a_violation_of_the_protocol_ends_the_connection(bench: Bench, frame: str | bytes, message: str) -> None:
    link = await bench.decoding()
    await link.socket.send(frame)
    await link.until(lambda: link.is_closed)
    await bench.until(lambda: any(message in line for line in bench.lines))
    back = await bench.again()
    assert [call.call_id for call in back.hello.held] == ["a"]


@pytest.mark.parametrize("first", ["silence", "head", "protocol", "ttl"])
@with_worker(connect_timeout_s=0.2)
async def test_whoever_does_not_answer_a_hello_with_a_welcome_is_told_apart(bench: Bench, first: str) -> None:
    async def talk(socket: ServerConnection) -> None:
        await socket.recv()
        welcome = {"member": "x", "lease": 1, "run_id": "", "run_epoch": 0, "head": head(0)}
        if first == "head":
            await socket.send(encode(0, head(0)))
        elif first == "protocol":
            await socket.send(encode(1, Welcome(**{**welcome, "protocol": PROTOCOL + 1, "ttl_s": 1.0})))
        elif first == "ttl":
            await socket.send(encode(1, Welcome(**{**welcome, "protocol": PROTOCOL, "ttl_s": float("nan")})))
        await socket.wait_closed()

    bench.coordinator.raw = talk
    said = {
        "silence": "did not answer a Hello within 0.2 s",
        "head": "answered a Hello with a Head, not with a Welcome",
        "ttl": "gave a lease of nan s, which is not a valid time",
    }
    if first == "protocol":
        error = await bench.failure(Refused)
        assert "chose version 3 of the protocol, but this worker speaks 2" in str(error)
    else:
        await bench.until(lambda: any(said[first] in line for line in bench.lines))


# -- the worker's own end ---------------------------------------------------------------------------------------------


@with_worker()
async def test_a_worker_that_is_stopped_hands_its_calls_over(bench: Bench) -> None:
    link = await bench.decoding(5, assign("a"), assign("b", least_version=5))
    await bench.stopped()
    await link.until(lambda: link.is_closed)
    assert link.seen[-1] == Leaving(reason="stopped by its user")
    assert bench.coordinator.endings == {}, "they end by the goodbye, not by failing"
    assert bench.coordinator.response("a") == tokens(7, 0, 5)
    assert bench.lines[-1] == "left the swarm"
    with pytest.raises(EngineError, match="closed"):
        await anext(bench.engine.generate(bench.engine.requests[0]))
    assert bench.fetcher.is_closed


@pytest.mark.parametrize("comes_back", [False, True])
@with_worker()
async def test_a_worker_that_is_stopped_says_what_it_could_not_hand_over(bench: Bench, comes_back: bool) -> None:
    calls = (assign("a"), assign("b")) if comes_back else (assign("b"),)
    await (await bench.decoding(0, *calls)).cut()
    await bench.engine.tick(5)
    if comes_back:
        back = await bench.member_again(head(0))
        await back.adopt(back.hello.held[0])
        await back.first(Decoded)
    await bench.stopped()
    assert bench.lines[-1] == "left the swarm; 5 tokens could not be handed over"


def refuse() -> FakeEngine:
    raise EngineError("vLLM did not start: see its log")


@with_worker(make_engine=refuse)
async def test_an_engine_that_cannot_be_opened_ends_the_worker(bench: Bench) -> None:
    link = await bench.coordinator.next_link()
    await link.welcome(head(0))
    error = await bench.failure(EngineBroken)
    assert str(error) == "the engine cannot be opened: vLLM did not start: see its log"
    await link.until(lambda: link.is_closed)
    assert link.all(Leaving) == [Leaving(reason=str(error))]


@with_worker()
async def test_a_call_that_is_stopped_for_others_goes_on(bench: Bench) -> None:
    link = await bench.decoding(3)
    bench.engine.fail(CallDisplaced("the server had to stop all its calls"))
    await bench.until(lambda: len(bench.engine.requests) == 2)
    assert bench.engine.requests[1].response_ids == tokens(7, 0, 3)
    await bench.engine.tick()
    await link.send(Abort(call_ids=("a",)))
    assert await link.ended("a") == "abort"
    assert bench.coordinator.response("a")[:4] == tokens(7, 0, 4)


class Hasty(FakeEngine):
    """Says after three tokens that it has come to its stop, at a token that is none."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        yield Chunk(
            token_ids=(5, 6, 7),
            logprobs=(-1.0,) * 3,
            policy_version=self.version,
            kv_version=self.version,
            finish_reason=FinishReason.STOP,
        )


@with_worker(make_engine=lambda: Hasty(length_of))
async def test_a_stop_at_a_token_that_is_no_stop_token_is_a_failure(bench: Bench) -> None:
    link = await bench.member(head(0))
    await link.send(assign("a", stop_token_ids=(2,)))
    said = await link.ended("a")
    assert said.startswith("failed: ") and "stopped at token 7, but its stop tokens are [2]" in said
    assert bench.coordinator.response("a") == (5, 6, 7), "what it has decoded is handed over"
    await link.send(assign("b", stop_token_ids=(2, 7)))
    assert await link.ended("b") == "stop"
    await link.send(assign("c", stop_token_ids=(2,), stop_strings=("end",)))
    assert await link.ended("c") == "stop"


class Broken(FakeEngine):
    """All its calls fail."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        raise EngineError("CUDA error: an illegal memory access")
        yield


@with_worker(make_engine=lambda: Broken(length_of))
async def test_an_engine_whose_calls_all_fail_for_long_ends_the_worker(bench: Bench) -> None:
    link = await bench.member(head(0), ttl_s=600.0)
    for number in range(8):
        call: Assign = assign(f"c{number}")
        await link.send(call)
        assert "illegal memory access" in await link.ended(f"c{number}")
        await bench.clock.move(20.0)
    error = await bench.failure(EngineBroken)
    assert "has failed 8 calls in 140 s and given no token" in str(error)
    await link.until(lambda: link.is_closed)
    assert link.all(Leaving) == [Leaving(reason=str(error))]
    assert link.all(Ready)
