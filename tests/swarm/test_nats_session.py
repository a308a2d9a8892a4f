"""A session over NATS that is closed leaves nothing running, whether or not its worker takes what was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollover.swarm.coordinator.transports.nats.session import NatsSession
from tests.swarm.transport_contract import RecordedSessions
from tests.virtual_time import run


class Unread:
    """A connection that takes messages, or none at all."""

    part_bytes = 4096

    def __init__(self, *, takes: bool) -> None:
        self._takes = takes

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if not self._takes:
            await asyncio.Event().wait()


@pytest.mark.parametrize("takes", [True, False])
def test_a_session_that_is_closed_leaves_nothing_running(takes: bool) -> None:
    async def law() -> None:
        connection: Any = Unread(takes=takes)
        session = NatsSession(
            connection,
            RecordedSessions(),
            name="laptop",
            token_hash="0" * 64,
            subject="rollover.session.x",
            inbox="rollover.worker.laptop.y",
            ended=lambda session: None,
        )
        session.send(b"frame")
        session.close()
        await session.until_over()
        await asyncio.sleep(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert asyncio.get_running_loop().time() == (1 if takes else 6)

    run(law())
