"""What a worker makes of answers over NATS, which anybody may have sent who can publish to its inbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollover.errors import EngineError
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.client import NatsFailure, NatsMessage
from rollover.swarm.nats.opening import SessionRefused, encode_answer
from rollover.swarm.worker import nats_link
from rollover.swarm.worker.connection import Disconnected, Refused
from tests.swarm.worker_kit import TOKEN
from tests.virtual_time import run

ADDRESS = NatsAddress.parse("nats://127.0.0.1:4222/rollover")


class Answering:
    """A connection on which each request for a session is answered alike."""

    part_bytes = 4096

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._took: Callable[[NatsMessage], None] | None = None

    async def subscribe(self, subject: str, took: Callable[[NatsMessage], None]) -> None:
        self._took = took

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        assert self._took is not None
        self._took(NatsMessage(subject=reply, reply="", payload=self._answer))

    async def until_ended(self) -> NatsFailure:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None: ...


@pytest.mark.parametrize("cause", ["token", "protocol"])
@pytest.mark.parametrize(("has_been_member", "kind"), [(False, Refused), (True, Disconnected)])
def test_a_refusal_that_nothing_vouches_for_ends_no_worker_that_was_a_member(
    monkeypatch: pytest.MonkeyPatch, cause: Any, has_been_member: bool, kind: type[EngineError]
) -> None:
    async def connect(*_: Any, **__: Any) -> Answering:
        return Answering(encode_answer(SessionRefused(cause=cause, reason="go away")))

    async def law() -> None:
        monkeypatch.setattr(nats_link, "connect", connect)
        with pytest.raises(kind, match="go away"):
            async with nats_link.open_nats(ADDRESS, TOKEN, None, timeout_s=5.0, has_been_member=has_been_member):
                pass

    run(law())
