"""One session over NATS, as a link to the coordinator.

A connection to the NATS cluster lasts as long as the session does: when the one breaks, the other has ended, and the
worker asks for a new session on a new connection, perhaps to another server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollover.errors import EngineError
from rollover.privacy import redacted_text
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.client import NatsConnection, NatsFailure, NatsMessage, connect
from rollover.swarm.nats.opening import (
    Opening,
    SessionEnded,
    SessionOpened,
    SessionRefused,
    decode_answer,
    encode_opening,
)
from rollover.swarm.nats.pump import ChannelPump
from rollover.swarm.nats.sealed import SealedChannel, SessionKeys
from rollover.swarm.wire.messages import SUBPROTOCOL, ProtocolError
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.connection import SAME_VERSION, CoordinatorConnection, Disconnected, Refused

_MAX_REASON = 300


class NatsLink:
    """A ``FrameLink`` over NATS.

    Args:
        has_been_member: the worker was in a session of this coordinator before. Then it does not take a refusal for
            final, for nothing proves that one comes from the coordinator.

    Example: ``await link.send(frame)`` waits while more than a window of bytes is on the way.
    """

    def __init__(
        self, connection: NatsConnection, address: NatsAddress, token: WorkerToken, *, has_been_member: bool = False
    ) -> None:
        self._connection, self._address, self._token = connection, address, token
        self._has_been_member = has_been_member
        self._inbox = address.new_inbox(token.name)
        self._channel: SealedChannel | None = None
        self._pump: ChannelPump | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._frames: asyncio.Queue[tuple[bytes, int] | EngineError] = asyncio.Queue()
        """Frames with their sizes, and after the last of them why there are no more."""
        self._failure: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._watch())]

    async def open(self) -> None:
        """Ask for a session. Raises ``Refused``, ``Disconnected`` and ``NatsFailure``."""
        await self._connection.subscribe(self._inbox, self._came)
        opening = encode_opening(Opening(protocols=(SUBPROTOCOL,)))
        await self._connection.publish(self._address.hello, opening, reply=self._inbox)
        await self._unless_failed(self._opened)

    async def send(self, frame: bytes) -> None:
        assert self._channel is not None and self._pump is not None, "the session is open"
        self._channel.put(frame)
        self._pump.wake()
        await self._unless_failed(asyncio.ensure_future(self._pump.until_sent()))

    async def receive(self) -> bytes:
        item = await self._frames.get()
        if isinstance(item, EngineError):
            self._frames.put_nowait(item)
            raise item
        assert self._channel is not None and self._pump is not None, "the session is open"
        frame, size = item
        self._channel.consumed(size)
        self._pump.wake()
        return frame

    async def close(self) -> None:
        self._fail(Disconnected(f"the session with {self._address} was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    async def _unless_failed(self, done: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait((done, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise self._failure.result()
        finally:
            done.cancel()

    def _fail(self, failure: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)
            self._frames.put_nowait(failure)

    async def _watch(self) -> None:
        """Notice the end of the connection."""
        failure = await self._connection.until_ended()
        if not self._opened.done():
            self._fail(failure)
        self._fail(Disconnected(f"the connection to {self._address} ended: {failure}"))

    async def _send(self, pump: ChannelPump) -> None:
        try:
            await pump.run()
        except NatsFailure as e:
            self._fail(Disconnected(f"the connection to {self._address} ended: {e}"))

    # -- what comes -------------------------------------------------------------------------------------------------

    def _came(self, message: NatsMessage) -> None:
        """Deal with a message to the inbox."""
        if message.is_unheard:
            self._fail(
                Disconnected(
                    f"no coordinator answers on {self._address}: is the trainer running, and is"
                    f" {self._address.subject!r} the subject in its engine.nats_url?"
                )
            )
            return
        try:
            match decode_answer(message.payload):
                case None:
                    self._sealed_came(message.payload)
                case SessionOpened(subject=subject):
                    self._begin(subject)
                case SessionRefused(cause=cause, reason=reason):
                    self._refused(cause, redacted_text(reason[:_MAX_REASON]))
                case SessionEnded(reason=reason):
                    said = redacted_text(reason[:_MAX_REASON])
                    self._fail(Disconnected(f"{self._address} has ended the session: {said}"))
        except ProtocolError as e:
            self._fail(Disconnected(f"the session with {self._address} ended: {e}"))

    def _begin(self, subject: str) -> None:
        if self._channel is not None:
            return  # the first answer counts; one that is not the coordinator's cannot seal what follows
        keys = SessionKeys.of(self._token.hash, self._inbox, subject)
        self._channel = SealedChannel(sending=keys.up, receiving=keys.down, part_bytes=self._connection.part_bytes)
        self._pump = ChannelPump(self._connection, self._channel, subject=subject, reply=self._inbox)
        self._tasks.append(asyncio.create_task(self._send(self._pump)))
        self._opened.set_result(None)

    def _refused(self, cause: str, reason: str) -> None:
        if self._channel is not None and self._channel.is_authentic:
            return  # who is in a session hears of its end in the session
        if cause == "token":
            text = f"refuses the token of {self._token.name!r}: {reason}; ask the owner of the run for a new one"
        else:
            text = f"does not speak this worker's protocol: {reason}; {SAME_VERSION}"
        self._fail((Disconnected if self._has_been_member else Refused)(f"{self._address} {text}"))

    def _sealed_came(self, payload: bytes) -> None:
        if self._channel is None or self._pump is None:
            return
        if (taken := self._channel.take(payload)) is not None:
            self._frames.put_nowait(taken)
        self._pump.wake()


@asynccontextmanager
async def open_nats(
    address: NatsAddress,
    token: WorkerToken,
    tls: ssl.SSLContext | None,
    *,
    timeout_s: float,
    has_been_member: bool = False,
) -> AsyncIterator[CoordinatorConnection]:
    """Open a connection, and close it afterwards. Raises ``Refused`` and ``Disconnected``."""
    try:
        name, replies = f"rollover worker {token.name}", address.replies(token.name)
        connection = await connect(address, tls=tls, name=name, timeout_s=timeout_s, replies=replies)
    except NatsFailure as e:
        raise _not_opened(e, has_been_member=has_been_member) from e
    link = NatsLink(connection, address, token, has_been_member=has_been_member)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await link.open()
        except TimeoutError:
            raise Disconnected(f"no coordinator has answered on {address} within {timeout_s:g} s") from None
        except NatsFailure as e:
            raise _not_opened(e, has_been_member=has_been_member) from e
        yield CoordinatorConnection(link, address)
    finally:
        await link.close()


def _not_opened(failure: NatsFailure, *, has_been_member: bool) -> EngineError:
    return Refused(str(failure)) if failure.is_final and not has_been_member else Disconnected(str(failure))
