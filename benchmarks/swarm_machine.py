"""What a response costs the state machine of a swarm's coordinator, without network, journal or engine.

    OMP_NUM_THREADS=1 python benchmarks/swarm_machine.py      # half a minute

Every member has all the calls that it has room for. One of them ends, with a message of 16 tokens; it is written down,
and the scheduler asks for a place for the next one, which is opened. Prints microseconds of processor time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from rollover.engine.base import GenerateRequest
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect, Send
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Assign,
    Decoded,
    Head,
    Heartbeat,
    Hello,
    Ready,
    Serving,
    pack_ids,
    pack_logprobs,
)
from rollover.types import SamplingParams

TOKENS, NUM_RESPONSES = 16, 8000
PARAMS = SamplingParams(max_new_tokens=TOKENS)
HEAD = Head(version=0, manifest=sha256(b"0").hexdigest())


class Load:
    """A coordinator whose members are full."""

    def __init__(self, members: int, room: int) -> None:
        identity = RunIdentity(run_id="load", run_epoch=1, vocab_size=32000, max_context_tokens=64)
        self.hub = Coordinator(identity, HEAD, ttl_s=15.0, exact=False, checks=False)
        self.running: list[tuple[int, str]] = []
        """Lease and id of each call."""
        self.spent_s, self.number = 0.0, 0
        for i in range(members):
            self.hub.connected(f"m{i:04d}", Hello(protocols=(PROTOCOL,), software="load"), 0.0)
            idle = Heartbeat(number=1, num_running=0, tokens_per_s=10.0 + i % 7, mean_running=1.0, num_held=0)
            ready = Ready(max_running=room, max_context_tokens=64, seeded=True, number_format="float32")
            for message in (ready, Serving(version=0, manifest=HEAD.manifest), idle):
                self.hub.received(self.hub.last_lease, message, 0.0)
        for _ in range(members * room):
            self.open_one()

    def timed(self, work: Callable[[], Any]) -> Any:
        began_s = time.process_time()
        found = work()
        self.spent_s += time.process_time() - began_s
        return found

    def open_one(self) -> None:
        self.number += 1
        key = f"g{self.number}."
        call = GenerateRequest(
            request_id=f"g{self.number}#0.",
            sample_key=key,
            prompt_key="p.",
            prompt_ids=(1, 2),
            params=PARAMS,
            seed=0,
            is_journaled=True,
            due_version=3,
        )

        def work() -> list[Effect]:
            if self.hub.takes_one(0, TOKENS, num_waiting=5, max_staleness=3):
                self.hub.reserve(key, 0, TOKENS, num_waiting=5, max_staleness=3, until_s=1e9)
            return self.hub.opened(call)

        self.take(self.timed(work))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Assign):
                self.running.append((effect.lease, effect.message.call_id))

    def end_one(self, rng: random.Random, now_s: float) -> None:
        at = rng.randrange(len(self.running))
        self.running[at], self.running[-1] = self.running[-1], self.running[at]
        lease, call_id = self.running.pop()
        piece = Decoded(
            call_id=call_id,
            offset=0,
            token_ids=pack_ids(range(TOKENS)),
            logprobs=pack_logprobs([-0.5] * TOKENS),
            version=0,
            kv_version=0,
            finish_reason="length",
        )
        key = f"{call_id.partition('#')[0]}."
        self.take(self.timed(lambda: [*self.hub.received(lease, piece, now_s), *self.hub.journaled(key, TOKENS)]))


def main() -> None:
    for members, room in ((2, 16), (16, 64), (200, 8), (1000, 4)):
        load, rng = Load(members, room), random.Random(0)
        load.spent_s = 0.0
        for number in range(NUM_RESPONSES):
            load.end_one(rng, 1.0 + number / 1000)
            load.open_one()
        cost_us = 1e6 * load.spent_s / NUM_RESPONSES
        print(f"{members:5d} members with room for {room:2d}: {cost_us:6.1f} us a response", flush=True)


if __name__ == "__main__":
    main()
