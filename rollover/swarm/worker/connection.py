"""One WebSocket to the coordinator: frames become messages, and every way to fail becomes one of two errors.

``Refused`` says that there is no use in coming back; ``Disconnected`` that there may be. A worker that has been a
member before takes fewer answers as final: a coordinator that is being replaced or repaired at its address answers
strangely for a while.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidProxy, InvalidStatus
from websockets.typing import Subprotocol

from rollover.errors import ConfigError, EngineError
from rollover.privacy import redacted_text
from rollover.swarm.wire import messages
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.proxies import proxy_for, shown_proxy
from rollover.swarm.wire.tls_errors import speaks_tls, tls_refusal
from rollover.swarm.wire.token import WorkerToken

_REFUSALS = (401, 403)
_NOT_FOUND = 404
_OTHER_PROTOCOL = 426
_MAX_REASON = 300
SAME_VERSION = "install the same version of Rollover on both sides"
_CLOSE_TIMEOUT_S = 2.0


class Refused(EngineError):
    """The coordinator refuses this worker, for a reason that time does not fix."""


class Disconnected(EngineError):
    """There is no connection now; the next attempt may succeed."""


class RunEnded(EngineError):
    """The run is over, and this worker is no longer needed."""


class OlderEpoch(Disconnected):
    """A coordinator of an earlier start of the run answers, which may be about to go."""


class CoordinatorConnection:
    """A WebSocket to the coordinator whose frames are messages, under the lease of its ``Welcome``."""

    def __init__(self, socket: ClientConnection, address: CoordinatorAddress) -> None:
        self._socket, self._address = socket, address
        self._lease = 0

    async def send(self, message: messages.FromWorker) -> None:
        """Send a message; waits while the coordinator does not read. Raises ``Disconnected``."""
        try:
            await self._socket.send(messages.encode(self._lease, message))
        except (ConnectionClosed, OSError) as e:
            raise Disconnected(_closed(self._address, e)) from e

    async def receive(self) -> messages.FromCoordinator:
        """Return the next message. Raises ``Disconnected``, even for what the protocol does not allow, ``Refused`` when
        the coordinator says goodbye for good, and ``RunEnded``."""
        try:
            frame = await self._socket.recv()
        except (ConnectionClosed, OSError) as e:
            raise Disconnected(_closed(self._address, e)) from e
        try:
            if isinstance(frame, str):
                raise messages.ProtocolError(f"it sent a text frame of {len(frame):,} characters, but all are binary")
            envelope = messages.decode_down(frame)
            message = envelope.message
            if isinstance(message, messages.Goodbye):
                raise _goodbye(self._address, message)
            if isinstance(message, messages.Welcome) and self._lease == 0:
                self._lease = envelope.lease
            if envelope.lease != self._lease:
                raise messages.ProtocolError(f"a message of lease {envelope.lease} came under lease {self._lease}")
        except messages.ProtocolError as e:
            raise Disconnected(f"{self._address} violates the protocol: {e}") from e
        return message

    async def close(self) -> None:
        await self._socket.close()


@asynccontextmanager
async def open_connection(
    address: CoordinatorAddress,
    token: WorkerToken,
    tls: ssl.SSLContext | None,
    *,
    timeout_s: float,
    has_been_member: bool = False,
) -> AsyncIterator[CoordinatorConnection]:
    """Open a connection, and close it afterwards. Raises ``Refused`` and ``Disconnected``, and ``ConfigError`` where
    the environment names a proxy that cannot be one."""
    proxy = proxy_for(address.session_url)
    try:
        socket = await connect(
            address.session_url,
            proxy=proxy,
            subprotocols=[Subprotocol(messages.SUBPROTOCOL)],
            additional_headers={"Authorization": f"Bearer {token.text}"},
            ssl=tls if address.is_encrypted else None,
            compression=None,  # messages are compressed already
            max_size=messages.MAX_FRAME_BYTES,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_TIMEOUT_S,
            ping_interval=None,  # heartbeats do that
        )
    except (OSError, InvalidHandshake, InvalidProxy) as e:
        is_garbled = isinstance(e, InvalidMessage) and not address.is_encrypted
        if is_garbled and await speaks_tls(*address.endpoint, timeout_s=timeout_s):
            raise Refused(f"{address} speaks TLS: join {replace(address, scheme='wss')}") from e
        where = address if proxy is None else f"{address}, through the proxy {shown_proxy(proxy)},"
        path = urlsplit(address.session_url).path
        raise _not_opened(where, path, token, e, timeout_s, has_been_member=has_been_member) from e
    try:
        if socket.subprotocol != messages.SUBPROTOCOL:
            spoken = socket.subprotocol or "another protocol"
            raise Refused(f"{address} speaks {spoken}, but this worker speaks {messages.SUBPROTOCOL}; {SAME_VERSION}")
        yield CoordinatorConnection(socket, address)
    finally:
        await socket.close()


async def greet(
    connection: CoordinatorConnection, hello: messages.Hello, address: CoordinatorAddress, timeout_s: float
) -> messages.Welcome:
    """Say hello and return the answer. Raises ``Refused`` and ``Disconnected``."""
    await connection.send(hello)
    try:
        async with asyncio.timeout(timeout_s):
            welcome = await connection.receive()
    except TimeoutError:
        raise Disconnected(f"{address} did not answer a Hello within {timeout_s:g} s") from None
    if not isinstance(welcome, messages.Welcome):
        raise Disconnected(f"{address} answered a Hello with a {type(welcome).__name__}, not with a Welcome")
    if welcome.protocol != messages.PROTOCOL:
        raise Refused(
            f"{address} chose version {welcome.protocol} of the protocol, but this worker speaks {messages.PROTOCOL};"
            f" {SAME_VERSION}"
        )
    if not welcome.ttl_s > 0:
        raise Disconnected(f"{address} gave a lease of {welcome.ttl_s:g} s, which is not a valid time")
    return welcome


def begins_epoch(last: messages.Welcome | None, welcome: messages.Welcome, address: CoordinatorAddress) -> bool:
    """Return whether a welcome is the first, or the first of a new epoch: the run was started again, perhaps from an
    older checkpoint. Raises ``OlderEpoch`` when the run has gone back in time, ``Refused`` for another run."""
    if last is None:
        return True
    if last.run_id != welcome.run_id:
        raise Refused(
            f"{address} runs {welcome.run_id} now, but this worker works for {last.run_id}: start the worker again to"
            " join the other run"
        )
    if welcome.run_epoch < last.run_epoch:
        raise OlderEpoch(
            f"{address} is at epoch {welcome.run_epoch} of {welcome.run_id}, but was at"
            f" {last.run_epoch} before: an old coordinator must still be running"
        )
    return welcome.run_epoch > last.run_epoch


def tls_context(ca_file: Path | None, *, and_system: bool = False) -> ssl.SSLContext:
    """Return the TLS settings: certificates are checked against ``ca_file``, or the system's if it is left out.

    ``and_system``: they are checked against both. Raises ``ConfigError`` when the file holds no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None or and_system else str(ca_file))
        if ca_file is not None and and_system:
            context.load_verify_locations(ca_file)
        return context
    except (OSError, ssl.SSLError) as e:
        reason = "it contains no certificate in PEM format" if isinstance(e, ssl.SSLError) else e.strerror or e
        raise ConfigError(f"{ca_file}: holds no readable certificates: {reason}") from None


def _final(has_been_member: bool) -> type[EngineError]:
    return Disconnected if has_been_member else Refused


def _not_opened(
    address: object, path: str, token: WorkerToken, error: Exception, timeout_s: float, *, has_been_member: bool
) -> EngineError:
    """Return the error for a connection to ``address`` that was not opened, when ``path`` was asked for."""
    if isinstance(error, InvalidStatus):
        status = error.response.status_code
        body = (error.response.body or b"")[:_MAX_REASON].decode(errors="replace").strip()
        said = redacted_text(f": {body}") if body else ""
        if status in _REFUSALS:
            return Refused(
                f"{address} refuses the token of {token.name!r} (HTTP {status}){said}; ask its owner for a new one"
            )
        if status == _OTHER_PROTOCOL:
            return Refused(f"{address} does not speak this worker's protocol{said}; {SAME_VERSION}")
        if status == _NOT_FOUND:
            return _final(has_been_member)(
                f"{address} accepts no workers at the path {path} (HTTP 404){said}; are the address and its path right?"
            )
        kind = Disconnected if status >= 500 or status in (408, 425, 429) else _final(has_been_member)
        return kind(f"{address} answers HTTP {status}, as a coordinator never does{said}; is the address right?")
    if (refusal := tls_refusal(error)) is not None:
        return _final(has_been_member)(f"{address}: {refusal}")
    if isinstance(error, TimeoutError):
        return Disconnected(
            f"{address} did not open a connection within {timeout_s:g} s: is the address right,"
            " or does a firewall block it?"
        )
    if isinstance(error, OSError):
        return Disconnected(f"{address} cannot be reached: {_unreachable(error)}")
    return Disconnected(f"{address} did not open a connection: {redacted_text(str(error))}")


def _unreachable(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved ({error.strerror}); is it right?"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (connection refused); is the port right, and is the trainer running?"
    return os.strerror(error.errno) if error.errno is not None else str(error) or "the connection ended at once"


def _closed(address: CoordinatorAddress, error: Exception) -> str:
    return f"the connection to {address} ended: {redacted_text(str(error))[:_MAX_REASON]}"


def _goodbye(address: CoordinatorAddress, goodbye: messages.Goodbye) -> EngineError:
    reason = redacted_text(goodbye.reason[:_MAX_REASON])
    if goodbye.has_ended:
        return RunEnded(reason)
    if goodbye.is_final:
        return Refused(f"{address} refuses this worker: {reason}")
    return Disconnected(f"{address} ended the connection: {reason}")
