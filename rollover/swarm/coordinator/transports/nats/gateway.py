"""The gateway over NATS: workers ask for a session on one subject, and get a subject of their own.

========================  ===================  ==========================================================
subject                   is listened to by    a message is
========================  ===================  ==========================================================
``S.hello``               the coordinator      a request for a session
``S.session.SECRET``      the coordinator      sealed, of the worker that was given the subject
``S.worker.NAME.SECRET``  the worker NAME      an answer, or sealed
``S.coordinator``         the coordinator      the question whether there is one already
========================  ===================  ==========================================================

It is a ``Transport``, and decides nothing.

What it keeps true: who does not know a token of this run gets no further than the refusal, and learns no token by
listening; a session's frames are handed on in order, and end where one is missing; when the connection to the cluster
is lost, all sessions have ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

from rollover.errors import EngineError
from rollover.swarm.coordinator.transports.base import HELLO_TIMEOUT_S, Sessions
from rollover.swarm.coordinator.transports.nats.cluster import NatsCluster
from rollover.swarm.coordinator.transports.nats.session import NatsSession
from rollover.swarm.nats.client import NatsConnection, NatsFailure, NatsMessage
from rollover.swarm.nats.opening import (
    SessionEnded,
    SessionOpened,
    SessionRefused,
    decode_opening,
    encode_answer,
)
from rollover.swarm.wire.messages import SUBPROTOCOL, ProtocolError

logger = logging.getLogger(__name__)

_MAX_UNGREETED = 4096
_UNKNOWN = "the worker's token does not belong to this run, or was revoked"


class NatsGateway:
    """Serves workers over a NATS cluster, in the event loop of its owner.

    Args:
        cluster: open; it is the gateway's from now on.
        hashes: returns the hashes of the valid tokens by name, as they are now.
        fill: puts weights that workers need, and the cluster lacks, into it; called whenever the connection is back,
            since a server may come back without its disk.

    Example: ``await gateway.serve()``; ``gateway.url`` is ``"nats://127.0.0.1:4222/rollover"``.
    """

    def __init__(
        self,
        cluster: NatsCluster,
        sessions: Sessions,
        *,
        hashes: Callable[[], Mapping[str, str]],
        fill: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._cluster, self._address = cluster, cluster.address
        self._sessions_of, self._hashes, self._fill = sessions, hashes, fill
        self._sessions: dict[str, NatsSession] = {}
        self._ungreeted: dict[str, NatsSession] = {}
        """Sessions whose worker has not said hello yet, the oldest first."""
        self._id = secrets.token_hex(8).encode()
        """Sent with its question whether another run uses the subject, so that it does not answer itself."""
        self._is_established = False
        """No other run uses the subject: whoever comes later has to stay away."""
        self._lost: list[str] = []
        """Inboxes of sessions that ended with the last connection."""
        self._keeping: asyncio.Task[None] | None = None
        self._filling: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Return the address that workers are to join."""
        return str(self._address)

    async def serve(self) -> None:
        """Answer workers from now on, and again whenever the connection to the cluster was lost."""
        assert self._cluster.connection is not None, "the cluster is open"
        try:
            await self._listen(self._cluster.connection)
        except NatsFailure as e:
            raise self._cluster.unusable(e) from e
        self._keeping = asyncio.create_task(self._cluster.keep(self._connection_lost, self._connection_back))

    async def close(self) -> None:
        """End all sessions after everything that was sent, and leave the cluster."""
        upkeep = [task for task in (self._keeping, self._filling) if task is not None]
        for task in upkeep:
            task.cancel()
        await asyncio.gather(*upkeep, return_exceptions=True)
        sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        await asyncio.gather(*(session.until_over() for session in sessions))
        await self._cluster.close()

    async def _listen(self, connection: NatsConnection) -> None:
        self._is_established = False
        await connection.subscribe(self._address.coordinator, self._question_came)
        await connection.flush()  # what the cluster does not permit it has said by then
        await self._cluster.stay_away_from_others(connection, self._id)  # who began while this run warmed its model up
        self._is_established = True
        await connection.subscribe(self._address.hello, self._hello_came)
        await connection.subscribe(self._address.sessions, self._message_came)
        await connection.flush()
        if not connection.is_open:
            raise await connection.until_ended()

    def _connection_lost(self) -> None:
        """End all sessions: messages may have been lost."""
        self._lost = [session.inbox for session in self._sessions.values()]
        for session in list(self._sessions.values()):
            session.end()

    async def _connection_back(self, connection: NatsConnection) -> None:
        await self._listen(connection)
        ended = encode_answer(SessionEnded(reason="the coordinator lost its connection to the NATS cluster"))
        for inbox in self._lost:  # workers elsewhere on the cluster have not noticed
            await connection.publish(inbox, ended)
        if self._fill is not None and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(_filled(self._fill))

    # -- what comes -------------------------------------------------------------------------------------------------

    def _question_came(self, message: NatsMessage) -> None:
        """Answer another coordinator, which then stays away. Of two that ask each other at the same time, the one with
        the smaller id stays."""
        asker = message.payload
        stays_away = asker == self._id or (not self._is_established and b"" < asker < self._id)
        if message.reply and not stays_away:
            self._publish(message.reply, b"")

    def _hello_came(self, message: NatsMessage) -> None:
        """Give a worker a session, if its token may be known; its first sealed message shows whether it is."""
        name = self._address.inbox_owner(message.reply)
        if name is None or (connection := self._cluster.connection) is None:
            return  # whose answers would go anywhere is answered nowhere
        try:
            offered = decode_opening(message.payload).protocols
        except ProtocolError as e:
            self._refuse(message.reply, "protocol", str(e))
            return
        if SUBPROTOCOL not in offered:
            text = f"this run speaks {SUBPROTOCOL}, but the worker offers {', '.join(offered) or 'none'}"
            self._refuse(message.reply, "protocol", text)
            return
        if (token_hash := self._hashes().get(name)) is None:
            self._refuse(message.reply, "token", _UNKNOWN)
            return
        self._make_room()
        session = NatsSession(
            connection,
            self._sessions_of,
            name=name,
            token_hash=token_hash,
            subject=self._address.new_session(),
            inbox=message.reply,
            ended=self._forget,
        )
        self._sessions[session.subject] = self._ungreeted[session.subject] = session
        self._answer(message.reply, SessionOpened(subject=session.subject))
        asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._expect_hello, session)

    def _message_came(self, message: NatsMessage) -> None:
        session = self._sessions.get(message.subject)
        if session is None:
            if self._address.inbox_owner(message.reply) is not None:
                reason = "the coordinator does not know this session, because it was restarted or has lost messages"
                self._answer(message.reply, SessionEnded(reason=reason))
            return
        if message.is_unheard:  # the worker does not listen any more
            session.end()
            return
        try:
            session.came(message.payload)
        except ProtocolError as e:
            logger.info("the session of %s ends: %s", session.name, e)
            session.end()
            self._answer(session.inbox, SessionEnded(reason=str(e)))
            return
        if not session.is_authentic:
            session.end()
            self._refuse(session.inbox, "token", _UNKNOWN)

    def _expect_hello(self, session: NatsSession) -> None:
        if self._ungreeted.pop(session.subject, None) is not None and not session.has_begun:
            session.end()

    def _make_room(self) -> None:
        """Drop the oldest request for a session when too many have not come to a hello."""
        if len(self._ungreeted) >= _MAX_UNGREETED:
            oldest = next(iter(self._ungreeted.values()))
            del self._ungreeted[oldest.subject]
            if not oldest.has_begun:
                oldest.end()

    def _forget(self, session: NatsSession) -> None:
        self._sessions.pop(session.subject, None)
        self._ungreeted.pop(session.subject, None)

    def _refuse(self, inbox: str, cause: Literal["token", "protocol"], reason: str) -> None:
        self._sessions_of.refused(cause)
        self._answer(inbox, SessionRefused(cause=cause, reason=reason))

    def _answer(self, inbox: str, answer: SessionOpened | SessionRefused | SessionEnded) -> None:
        self._publish(inbox, encode_answer(answer))

    def _publish(self, subject: str, payload: bytes) -> None:
        if (connection := self._cluster.connection) is not None:
            task = asyncio.create_task(_sent(connection, subject, payload))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)


async def _filled(fill: Callable[[], Awaitable[None]]) -> None:
    try:
        await fill()
    except EngineError as e:
        logger.warning("%s", e)


async def _sent(connection: NatsConnection, subject: str, payload: bytes) -> None:
    try:
        await connection.publish(subject, payload)
    except NatsFailure:
        return  # the connection has ended, and with it the session that this was about
