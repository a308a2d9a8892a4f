"""One connection to one server of a NATS cluster, by ``nats-py``: opened, watched and given up by us.

The library can reconnect by itself. Here it does not: the owner of a connection must know when messages may have been
lost, and begins again on a fresh one.

====================  ==========================================  ====================================================
task                  waits for                                   is unblocked by
====================  ==========================================  ====================================================
``_watch``            an answer to a ping, every ``PING_S``       the answer; the same time again, then the end
``publish``           the server, to read                         the server; the end of the connection
====================  ==========================================  ====================================================

What it keeps true: every way to fail is one ``NatsFailure`` that says whether another attempt may help; with ``tls://``
nothing is said before TLS is there; no wait outlives the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollover.errors import EngineError
from rollover.privacy import redacted_text
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.credentials import WHERE_CREDENTIALS
from rollover.swarm.nats.sealed import HEADER_BYTES, PART_BYTES

logger = logging.getLogger(__name__)

PING_S = 5.0
"""Seconds without an answer after which a server is taken for gone."""
_CLOSE_TIMEOUT_S = 2.0
_LEAST_PAYLOAD_BYTES = 4096
_MAX_PENDING_BYTES = 64 * 2**20
"""Messages that came and were not dealt with; beyond, they are dropped, which the sessions notice."""
_MAX_REASON = 300
_CERTIFICATE_WANTED = f"if it requires a client certificate, name its file with {WHERE_CREDENTIALS}"


class NatsFailure(EngineError):
    """A NATS cluster cannot be used; ``is_final`` where time does not fix it.

    Example: ``NatsFailure("Connection refused", is_final=False)``
    """

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsMessage:
    """A message as it came.

    Example: ``NatsMessage(subject="rollover.hello", reply="rollover.worker.laptop.x", payload=b"...")``
    """

    subject: str
    reply: str
    payload: bytes
    is_unheard: bool = False
    """It is the server's answer to a message on a subject without a listener."""


class NatsConnection:
    """A connection that ends once and does not come back.

    Example: ``connection = await connect(address, tls=None, name="laptop", timeout_s=10)``, then
    ``await connection.publish("rollover.hello", b"...")``; ``await connection.until_ended()`` returns why it ended.
    """

    def __init__(self, client: Client, server: str) -> None:
        self._client, self._server = client, server
        self._ended: asyncio.Future[NatsFailure] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch())

    @property
    def client(self) -> Client:
        """Return the library's client, for JetStream."""
        return self._client

    @property
    def part_bytes(self) -> int:
        """Return the largest content of a sealed message that the server takes."""
        return min(PART_BYTES, self._client.max_payload - HEADER_BYTES)

    @property
    def is_open(self) -> bool:
        return not self._ended.done()

    async def until_ended(self) -> NatsFailure:
        """Return why the connection has ended, once it has."""
        return await asyncio.shield(self._ended)

    def ended(self, failure: NatsFailure) -> None:
        """Take the connection for gone."""
        if not self._ended.done():
            self._ended.set_result(failure)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send a message; waits while the server does not read. Raises ``NatsFailure``."""
        await self._unless_ended(self._client.publish(subject, payload, reply=reply))

    async def subscribe(self, subject: str, took: Callable[[NatsMessage], None]) -> None:
        """Have ``took`` called with each message on a subject, in order. Raises ``NatsFailure``."""

        async def came(message: Msg) -> None:
            status = (message.headers or {}).get("Status")
            took(
                NatsMessage(
                    subject=message.subject,
                    reply=message.reply,
                    payload=message.data,
                    is_unheard=status == "503" and not message.data,
                )
            )

        await self._unless_ended(self._client.subscribe(subject, cb=came, pending_bytes_limit=_MAX_PENDING_BYTES))

    async def asks(self, subject: str, payload: bytes = b"", *, timeout_s: float) -> bool:
        """Ask on a subject whether there is a listener; tell whether there was an answer. Raises ``NatsFailure``."""
        answered = asyncio.ensure_future(self._client.request(subject, payload, timeout=timeout_s))
        try:
            await self._unless_ended(answered)
        except NatsFailure as e:
            if isinstance(e.__cause__, nats.errors.NoRespondersError | nats.errors.TimeoutError):
                return False  # there is no listener, or it is stopped or gone without the server's knowing
            raise
        return True

    async def flush(self) -> None:
        """Return when the server has dealt with all that was sent. Raises ``NatsFailure``, after ``PING_S``."""
        timeout_s = PING_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._unless_ended(self._client.flush(timeout=timeout_s * 2))  # type: ignore[arg-type]
        except TimeoutError:
            raise NatsFailure(f"{self._server} has not answered for {timeout_s:g} s", is_final=False) from None

    async def close(self) -> None:
        """Close the connection after everything that was sent."""
        self._watching.cancel()
        self.ended(NatsFailure("it was closed", is_final=False))
        await asyncio.gather(self._watching, return_exceptions=True)
        await _close(self._client)

    async def _unless_ended(self, work: Any) -> None:
        """Do ``work`` while the connection lasts.

        In a task of its own, since the library takes a cancellation for the end of its wait and continues.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise NatsFailure(str(self._ended.result()), is_final=self._ended.result().is_final)
            task.result()
        except (nats.errors.Error, OSError, AttributeError) as e:  # AttributeError: its socket is gone already
            raise NatsFailure(_said(e), is_final=False) from e
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_forget)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            try:
                await self.flush()
            except NatsFailure as e:
                self.ended(e)
                return


async def connect(
    address: NatsAddress, *, tls: ssl.SSLContext | None, name: str, timeout_s: float, replies: str = "_INBOX"
) -> NatsConnection:
    """Connect to the first server of an address that can be reached.

    Args:
        tls: how certificates are checked; where it is left out, by the system's authorities.
        name: shown by the cluster's own tools.
        timeout_s: for all servers together.
        replies: the subject below which requests are answered.

    Raises:
        NatsFailure: none of them; the reason of the last, or the first that is final.
    """
    if address.credentials is not None and address.credentials.is_certificate:
        tls = tls or ssl.create_default_context()
        address.credentials.add_to(tls)
    failures: list[NatsFailure] = []
    each_s = timeout_s / len(address.servers)
    for server in address.servers:
        try:
            return await _connect(server, address, tls, name, each_s, replies)
        except NatsFailure as e:
            failures.append(e)
    raise next((e for e in failures if e.is_final), failures[-1])


async def _connect(
    server: str, address: NatsAddress, tls: ssl.SSLContext | None, name: str, timeout_s: float, replies: str
) -> NatsConnection:
    client = _OneServer(needs_tls=address.is_encrypted)
    options = {} if address.credentials is None else dict(address.credentials.options)
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(
                server,
                name=name,
                error_cb=client.failed,
                closed_cb=client.closed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                ping_interval=24 * 3600,  # we ping
                connect_timeout=timeout_s,  # type: ignore[arg-type]
                tls=tls,
                inbox_prefix=replies,
                **options,
            )
    except (TimeoutError, nats.errors.Error, OSError, ssl.SSLError, ValueError) as e:
        await _close(client)
        raise _not_connected(server, e, timeout_s) from e
    except BaseException:
        await _close(client)
        raise
    if not client.is_connected:
        await _close(client)
        raise NatsFailure(
            f"{server} closed the connection instead of accepting the login; {_CERTIFICATE_WANTED}",
            is_final=False,
        )
    connection = NatsConnection(client, server)
    client.owner = connection
    if client.max_payload < _LEAST_PAYLOAD_BYTES:
        await connection.close()
        raise NatsFailure(
            f"{server} accepts messages of at most {client.max_payload:,} bytes: set its"
            f" max_payload to at least {_LEAST_PAYLOAD_BYTES:,}",
            is_final=True,
        )
    return connection


class _OneServer(Client):
    """A client that fails at once where the library would try again, and speaks in plain text only where it may."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self.owner: NatsConnection | None = None

    async def failed(self, error: Exception) -> None:
        if self.owner is None:
            if self._reading_task is None:  # no connection yet: the library would try again
                raise error
            return
        if isinstance(error, nats.errors.SlowConsumerError):
            return  # what was dropped is missing in its session, which ends
        if "permissions violation" in str(error).lower():
            self.owner.ended(NatsFailure(f"{_said(error)}: grant it to the NATS user", is_final=True))
        elif not isinstance(error, nats.errors.Error | OSError):
            logger.error("a message could not be handled", exc_info=error)

    async def closed(self) -> None:
        if self.owner is not None:
            said = f": {_said(self.last_error)}" if self.last_error is not None else ""
            self.owner.ended(NatsFailure(f"the NATS server has closed the connection{said}", is_final=False))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if self._needs_tls and initial_connection and not info.get("tls_required"):
            raise ssl.SSLError(
                "the server does not offer TLS: configure TLS on it, or use nats:// if the network is private"
            )
        await super()._process_info(info, initial_connection)


async def _close(client: Client) -> None:
    """Close a client; a server that does not read must not hold us up."""
    closing = asyncio.ensure_future(client.close())
    closing.add_done_callback(_forget)
    await asyncio.wait((closing,), timeout=_CLOSE_TIMEOUT_S)
    if not closing.done():
        closing.cancel()
    transport = getattr(client, "_transport", None)
    for writer in ("_io_writer", "_bare_io_writer"):
        with contextlib.suppress(AttributeError):
            getattr(transport, writer).transport.abort()


def _forget(task: asyncio.Future[Any]) -> None:
    """Look at the end of a task that is not waited for."""
    if not task.cancelled():
        task.exception()


def _not_connected(server: str, error: Exception, timeout_s: float) -> NatsFailure:
    """Return the failure to report for a connection that was not opened."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return NatsFailure(
            f"{server}: its certificate cannot be trusted: {error.verify_message}; if the"
            " certificate is your own, name its authority with --ca-file (engine.nats_ca_file)",
            is_final=True,
        )
    if isinstance(error, ssl.SSLError):
        reason = str(getattr(error, "reason", None) or error.args[0])
        wanted = f"; {_CERTIFICATE_WANTED}" if "CERTIFICATE" in reason else ""
        return NatsFailure(f"{server}: TLS failed: {reason}{wanted}", is_final=True)
    if "authorization" in text.lower() or "authentication" in text.lower():
        return NatsFailure(
            f"{server} refuses the login ({_said(error)}): name a file with a valid one with {WHERE_CREDENTIALS}",
            is_final=True,
        )
    if isinstance(error, TimeoutError):
        return NatsFailure(f"{server} did not open a connection within {timeout_s:g} s", is_final=False)
    if "INFO" in text:
        return NatsFailure(f"{server} does not answer like a NATS server; is the address right?", is_final=True)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return NatsFailure(f"{server} has closed the connection at once; {_CERTIFICATE_WANTED}", is_final=False)
    if isinstance(error, OSError):
        return NatsFailure(f"{server} cannot be reached: {error.strerror or error}", is_final=False)
    return NatsFailure(f"{server} did not open a connection: {_said(error)}", is_final=False)


def _said(error: BaseException | None) -> str:
    text = str(error).removeprefix("nats: ").strip("' ") or type(error).__name__
    return redacted_text(text)[:_MAX_REASON]
