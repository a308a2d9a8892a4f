"""A hundred members that join within a second, a fifth of which die: nothing stands still."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from websockets.exceptions import ConnectionClosed

from rollover.clock import SystemClock
from rollover.errors import EngineError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Close, Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.coordinator.transports.gateway import Gateway
from rollover.swarm.wire.messages import Adopt, Assign, Welcome, decode_down, encode
from rollover.types import FinishReason
from tests.swarm.held_worker import HeldWorker
from tests.swarm.kit import LENGTH, VOCAB, ModelWorker, head, request, response
from tests.swarm.test_gateway import dial, run

NUM_MEMBERS, NUM_DEAD, NUM_SAMPLES = 100, 20, 600
TTL_S = 15.0


def test_in_virtual_time_calls_of_dead_members_go_on_within_a_lease() -> None:
    """All join in the first second. In the third, a fifth falls silent for ever, with the calls that they have."""
    rng = Random(0)
    identity = RunIdentity(run_id="run", run_epoch=1, vocab_size=VOCAB, max_context_tokens=64)
    hub = Coordinator(identity, head(0), ttl_s=TTL_S, exact=False, checks=False)
    workers = {f"m{i:03d}": HeldWorker(f"m{i:03d}", room=8) for i in range(NUM_MEMBERS)}
    joins_s = {name: rng.random() for name in workers}
    dead = set(rng.sample(sorted(workers), NUM_DEAD))
    by_lease: dict[int, HeldWorker] = {}
    done: dict[str, list[int]] = {f"g{i}.0": [] for i in range(NUM_SAMPLES)}
    open_calls: dict[str, str] = {}
    finished_s: dict[str, float] = {}
    num_calls, failed, now_s = 0, 0, 0.0

    def perform(effects: list[Effect]) -> None:
        nonlocal failed
        for effect in effects:
            match effect:
                case Send(lease, Welcome()):
                    pass
                case Send(lease, message):
                    worker = by_lease[lease]
                    if worker.name not in dead or now_s < 3.0:
                        for answer in worker.got(message):
                            perform(hub.received(lease, answer, now_s))
                case Deliver(call_id, piece, _):
                    sample = open_calls[call_id]
                    done[sample] += piece.token_ids
                    if piece.finish_reason is not None:
                        assert piece.finish_reason is FinishReason.LENGTH
                        del open_calls[call_id]
                        finished_s[sample] = now_s
                        perform(hub.journaled(f"{sample}.", len(done[sample])))
                case Fail(call_id, reason):
                    failed += 1
                    assert "has not been heard from" in reason
                    del open_calls[call_id]
                case Close():
                    pass

    while len(finished_s) < NUM_SAMPLES:
        now_s += 0.25
        assert now_s < 60.0, f"{NUM_SAMPLES - len(finished_s)} samples stand still"
        for name, worker in workers.items():
            if not worker.lease and joins_s[name] <= now_s:
                effects = hub.connected(name, worker.hello(), now_s)
                (welcome,) = [e.message for e in effects if isinstance(e, Send)]
                by_lease[welcome.lease] = worker
                for message in worker.welcomed(welcome):
                    perform(hub.received(welcome.lease, message, now_s))
            if worker.lease and (name not in dead or now_s < 3.0):
                worker.decode(1)
                messages: list[Any] = worker.outgoing()
                if now_s % 5.0 == 0.0:
                    messages.append(worker.heartbeat())
                for message in messages:
                    perform(hub.received(worker.lease, message, now_s))
        perform(hub.expire(now_s))
        for sample in done:
            if sample not in finished_s and sample not in open_calls.values():
                if hub.reserve(f"{sample}.", 0, LENGTH, until_s=now_s + 60.0) is None:
                    break
                num_calls += 1
                call = request(sample, num_calls, num_done=len(done[sample]))
                open_calls[call.request_id] = sample
                perform(hub.opened(call))
    assert all(tuple(tokens) == response(f"{sample}.") for sample, tokens in done.items())
    assert failed > 0 and hub.counters.expired_leases == NUM_DEAD
    # 40 ticks of decoding; those of the dead wait for the end of a lease, then take as long again at most.
    undisturbed_s = LENGTH * 0.25
    assert max(finished_s.values()) <= 3.0 + TTL_S + 2 * undisturbed_s


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[SwarmEngine]:
    # These workers know responses by heart, and cannot draw a single token of one again.
    config = SwarmConfig(listen="127.0.0.1:0", lease_s=2.0, max_running=8 * NUM_MEMBERS)
    identity = RunIdentity(run_id="run", run_epoch=1, vocab_size=VOCAB, max_context_tokens=64)
    hub = Coordinator(identity, head(0), ttl_s=config.lease_s, exact=False, checks=False)
    engine = SwarmEngine(config, hub, lambda version, source: head(version), SystemClock(), number_format="float32")
    engine.gateway = Gateway(config, engine.shell, member_of=lambda header: (header or "")[7:], blobs=folder)
    engine.gateway.bind()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


class Light:
    """One of many workers on a real socket, which decodes what it is given at once."""

    def __init__(self, engine: Any, name: str) -> None:
        self.engine, self.worker = engine, ModelWorker(name, room=8)

    async def live(self, dies_after: int | None) -> None:
        """Serve until cancelled, or until so many calls were taken: then fall silent in the middle of one.

        It sends no heartbeats, so where the machine is slow its lease ends; it then dials in again.
        """
        num_left = math.inf if dies_after is None else dies_after
        while num_left > 0:
            with suppress(ConnectionClosed):
                async with dial(self.engine, self.worker.name) as socket:
                    await socket.send(encode(0, self.worker.hello()))
                    async for frame in socket:
                        message = decode_down(frame).message
                        for answer in self.worker.got(message):
                            await socket.send(encode(self.worker.lease, answer))
                        if isinstance(message, Assign | Adopt) and message.call_id in self.worker.calls:
                            num_left -= 1
                            self.worker.decode(message.call_id, LENGTH if num_left else LENGTH // 2)
                            for piece in self.worker.send(message.call_id):
                                await socket.send(encode(self.worker.lease, piece))
                            if not num_left:
                                socket.transport.abort()
                                return


def test_on_real_sockets_a_hundred_members_join_and_a_fifth_die(tmp_path: Path) -> None:
    async def law() -> None:
        names = [f"m{i:03d}" for i in range(NUM_MEMBERS)]
        dead = set(Random(1).sample(names, NUM_DEAD))
        async with swarm(tmp_path) as engine:
            lights = [asyncio.create_task(Light(engine, n).live(3 if n in dead else None)) for n in names]
            try:
                responses = await asyncio.gather(*(sample(engine, f"g{i}.0") for i in range(NUM_SAMPLES)))
            finally:
                for light in lights:
                    light.cancel()
                await asyncio.gather(*lights, return_exceptions=True)
            assert responses == [response(f"g{i}.0.") for i in range(NUM_SAMPLES)]
            assert not engine.coordinator.counters.refused
            assert len(engine.coordinator.members) == NUM_MEMBERS

    async def sample(engine: Any, name: str) -> tuple[int, ...]:
        """Ask until the response is whole, each time behind what has come."""
        tokens: list[int] = []
        for number in range(20):
            call = request(name, number, num_done=len(tokens), journaled=False)
            try:
                async for chunk in engine.generate(call):
                    tokens += chunk.token_ids
                return tuple(tokens)
            except EngineError:
                continue
        raise AssertionError(f"{name} was tried 20 times")

    run(law)
