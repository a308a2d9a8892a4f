"""A hundred members that join within a second, a fifth of which die: nothing stands still."""

from __future__ import annotations

from random import Random
from typing import Any

from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.wire.messages import Welcome
from rollover.types import FinishReason
from tests.swarm.held_worker import HeldWorker
from tests.swarm.kit import LENGTH, VOCAB, head, request, response

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
                case Deliver(call_id, chunk):
                    sample = open_calls[call_id]
                    done[sample] += chunk.token_ids
                    if chunk.finish_reason is not None:
                        assert chunk.finish_reason is FinishReason.LENGTH
                        del open_calls[call_id]
                        finished_s[sample] = now_s
                        perform(hub.journaled(f"{sample}.", len(done[sample])))
                case Fail(call_id, reason):
                    failed += 1
                    assert "has not been heard from" in reason
                    del open_calls[call_id]

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
    assert failed > 0 and hub.counters["expired_leases"] == NUM_DEAD
    # 40 ticks of decoding; those of the dead wait for the end of a lease, then take as long again at most.
    undisturbed_s = LENGTH * 0.25
    assert max(finished_s.values()) <= 3.0 + TTL_S + 2 * undisturbed_s
