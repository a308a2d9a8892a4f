"""What passed between workers and coordinator, as somebody between them saw it."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field

from rollover.swarm.wire.messages import (
    Ack,
    Adopt,
    Assign,
    Decoded,
    FromCoordinator,
    FromWorker,
    Goodbye,
    Hello,
    Serving,
    Welcome,
    unpack_ids,
)
from tests.swarm.kit import plain

SAMPLE = re.compile(r"g\d+\.\d+\.")
"""Keys of samples that are trained; checks and evaluations have others, and are in no journal."""


@dataclass
class SeenCall:
    """A call with all tokens of it that went over the wire, by position."""

    sample_key: str
    tokens: dict[int, int]
    num_acked: int = 0
    """Its worker was told that so many tokens are durable."""

    def put(self, offset: int, ids: tuple[int, ...]) -> None:
        """Record tokens. A position never changes."""
        for position, token in enumerate(ids, start=offset):
            assert self.tokens.setdefault(position, token) == token, (self.sample_key, position)


@dataclass
class WireRecord:
    """All that is of interest afterwards; times are ``time.monotonic()``."""

    calls: dict[str, SeenCall] = field(default_factory=dict)
    frames: Counter[str] = field(default_factory=Counter)
    """By message."""
    faults: Counter[str] = field(default_factory=Counter)
    welcomes: list[tuple[float, str]] = field(default_factory=list)
    servings: list[tuple[float, str, int]] = field(default_factory=list)
    goodbyes: list[tuple[str, Goodbye]] = field(default_factory=list)

    def up(self, member: str, message: FromWorker) -> None:
        """A worker has sent a message."""
        self.frames[type(message).__name__] += 1
        match message:
            case Hello(held=held):
                for offer in held:
                    self.calls.setdefault(offer.call_id, SeenCall(plain(offer.sample_key), {}))
            case Serving(version=version):
                self.servings.append((time.monotonic(), member, version))
            case Decoded():
                self.calls[message.call_id].put(message.offset, unpack_ids(message.token_ids))

    def down(self, member: str, message: FromCoordinator) -> None:
        """A message goes out to a worker."""
        self.frames[type(message).__name__] += 1
        match message:
            case Welcome():
                self.welcomes.append((time.monotonic(), member))
            case Assign():
                # Assigned a second time, since its member does not know it, it goes on with tokens drawn anew.
                call = self.calls.setdefault(message.call_id, SeenCall(plain(message.sample_key), {}))
                call.tokens = dict(enumerate(unpack_ids(message.response_ids)))
            case Adopt() if (held := self.calls.get(message.held)) is not None:
                # What the worker has sent of it is a response of its own, should the call have failed since.
                before = {i: token for i, token in held.tokens.items() if i < message.offset}
                self.calls.setdefault(message.call_id, SeenCall(held.sample_key, before))
            case Ack() if (call := self.calls.get(message.call_id)) is not None:  # else its assignment was lost
                call.num_acked = max(call.num_acked, message.offset)
            case Goodbye():
                self.goodbyes.append((member, message))
