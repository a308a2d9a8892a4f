"""HTTP calls to one inference server, each with a deadline and each failure an ``EngineError`` that names the server.

Invariants: no call waits for ever and none takes more memory than an answer needs, whatever the server does;
the API key leaves this process in the ``Authorization`` header only, to the server that the config names, and never in
a message, a log line or a ``repr``.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from rollover.engine.background import within
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.http.answer import Reader, ServerBusy
from rollover.errors import ConfigError, EngineError, EngineTimeout

MAX_EVENT_CHARS = 1 << 27
"""An event longer than this is no stream of tokens. SGLang's last one has 67 million for the routes of 32,768 tokens of
Qwen3-30B-A3B."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 10.0

T = TypeVar("T", bound=BaseModel)


class Unreachable(EngineError):
    """A server to which no connection can be made: there is none at its address."""


@contextmanager
def meant_for(kind: str, servers: str) -> Iterator[None]:
    """Name ``engine.kind`` in the error of a server that answers, but not as ``servers`` do."""
    try:
        yield
    except (EngineTimeout, Unreachable):
        raise
    except EngineError as e:
        raise EngineError(f"{e}; engine.kind {kind!r} is for {servers}") from e


class Patience:
    """The deadline of one streaming call: moved on by each sign of life, suspended while the server is paused.

    An async context manager; ``TimeoutError`` leaves it when the deadline passes. ``what`` says what was waited for.
    """

    def __init__(self, *, first_s: float, between_s: float) -> None:
        self._first_s, self._between_s = first_s, between_s
        self._limit_s = first_s
        self._suspended = False
        self._scope = asyncio.timeout(None)
        self._entered = False

    @property
    def what(self) -> str:
        waiting_for = "first token" if self._limit_s == self._first_s else "next token"
        return f"its {waiting_for} for {self._limit_s:g} s"

    async def __aenter__(self) -> Patience:
        await self._scope.__aenter__()
        self._entered = True
        self._restart()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._entered = False
        await self._scope.__aexit__(*error)

    def heard(self) -> None:
        """Restart the deadline, since tokens have come."""
        self._limit_s = self._between_s
        self._restart()

    def suspend(self) -> None:
        self._suspended = True
        self._restart()

    def resume(self) -> None:
        self._suspended = False
        self._restart()

    def _restart(self) -> None:
        if self._entered and not self._scope.expired():
            now_s = asyncio.get_running_loop().time()
            self._scope.reschedule(None if self._suspended else now_s + self._limit_s)


class HTTPClient:
    """Makes the calls to one server, from one event loop.

    Args:
        name: the server's name in messages and reports, which stays when it moves; its address when left out. The
            API key then comes with the address.
        transport: in place of the network (tests).
    """

    def __init__(
        self,
        url: str,
        config: ServerConfig,
        *,
        name: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self.key_env = config.api_key_env
        self.last_heard_s = float("-inf")
        """Loop time at which the server last sent something."""
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},
            verify=_tls(config, url),
            timeout=httpx.Timeout(None, connect=config.connect_timeout_s),
            # vLLM and SGLang close an idle connection after 5 s, perhaps while a call is on its way.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            transport=transport,
            follow_redirects=False,
            trust_env=False,  # no proxy, no .netrc: the config alone says where calls go and with which key
        )
        self.move(url, api_key(config) if name is None else None)

    def __repr__(self) -> str:
        return self._name or self.url

    def move(self, url: str, key: str | None = None) -> None:
        """Use another address for the server from now on; calls in progress continue where they were sent."""
        self.url = url.rstrip("/")
        self.reader = Reader(self.url, [] if key is None else [key])
        """Through which everything that the server says is read."""
        self._http.base_url = httpx.URL(self.url)
        self._http.headers.pop("Authorization", None)
        if key is not None:
            self._http.headers["Authorization"] = f"Bearer {key}"

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """Make a call and return the body of an answer that says yes.

        Raises ``EngineTimeout`` after ``timeout_s`` (``control_timeout_s`` when left out) and ``EngineError``
        with the server's own words when it refuses.
        """
        limit_s = self._config.control_timeout_s if timeout_s is None else timeout_s
        what = f"{method} {path}"
        async with within(limit_s, f"{self.url} did not answer {what} within {limit_s:g} s"):
            with self._naming(what):
                async with self._http.stream(method, path, json=body, params=params) as answer:
                    self._heard()
                    return await self.reader.accepted(answer, what)

    async def ask(self, kind: type[T], method: str, path: str, **call: Any) -> T:
        """Return the answer's JSON as a ``kind``. Raises as ``call`` does, and ``EngineError`` when it is none."""
        return self.reader.typed(kind, await self.call(method, path, **call), f"{method} {path}")

    async def events(self, kind: type[T], path: str, body: Any, patience: Patience) -> AsyncGenerator[T, None]:
        """Yield the events of the stream that answers a POST, each a ``kind``, up to ``[DONE]`` or the end of the
        connection.

        A server that is busy (429, 503) is asked again, after the seconds of its ``Retry-After`` or a growing time.

        Raises:
            EngineTimeout: ``patience`` ran out, or the server was busy for ``busy_timeout_s``.
            EngineError: the server refuses, breaks off or sends something other than an event stream.
        """
        try:
            async with patience, self._open(path, body) as answer:
                decoder = EventDecoder()
                async for received in answer.aiter_raw():
                    self._heard()
                    for data in self._decoded(decoder, received, path):
                        if data == "[DONE]":
                            return
                        yield self.reader.event(kind, data, f"POST {path}")
        except EngineTimeout:
            raise
        except TimeoutError:
            raise EngineTimeout(f"{self.url} did not send {path} {patience.what}") from None

    @asynccontextmanager
    async def _open(self, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.busy_timeout_s
        backoff_s = _FIRST_BACKOFF_S
        with self._naming(f"POST {path}"):
            while True:
                async with self._http.stream("POST", path, json=body) as answer:
                    self._heard()
                    if answer.is_success:
                        self.reader.check_encoding(answer, f"POST {path}")
                        yield answer
                        return
                    refusal = await self.reader.refusal(answer, f"POST {path}")
                if not isinstance(refusal, ServerBusy):
                    raise refusal
                wait_s = max(_seconds(answer.headers.get("Retry-After", "")) or backoff_s, _FIRST_BACKOFF_S)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                if loop.time() + wait_s > give_up_s:
                    raise EngineTimeout(
                        f"{refusal}; busy for {self._config.busy_timeout_s:g} s (engine.busy_timeout_s)"
                    )
                await asyncio.sleep(wait_s)

    def _decoded(self, decoder: EventDecoder, received: bytes, path: str) -> list[str]:
        try:
            return decoder.feed(received)
        except ValueError as e:
            raise EngineError(
                f"{self.url} answered POST {path} with something other than an event stream: {e}"
            ) from None

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn what httpx raises into ``EngineError``."""
        try:
            yield
        except httpx.ConnectTimeout:
            raise EngineTimeout(f"{self.url} did not accept a connection for {what} in time") from None
        except httpx.ConnectError as e:
            problem = f"{self.url} cannot be reached for {what} ({self.reader.shown(str(e))})"
            raise Unreachable(f"{problem}: is a server running there?") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as e:
            reason = self.reader.shown(str(e)) or type(e).__name__  # it may quote the server
            raise EngineError(f"{self.url} broke off {what}: {reason}") from None

    def _heard(self) -> None:
        self.last_heard_s = asyncio.get_running_loop().time()


def api_key(config: ServerConfig) -> str | None:
    """Return the API key of the variable that ``config`` names. Raises ``ConfigError`` when it holds none."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            f"engine.api_key_env: the environment variable {config.api_key_env} must hold the API key"
            " (printable characters, no spaces around it)"
        )
    return key


def _seconds(text: str) -> float | None:
    """Read a number of seconds; ``None`` if it is none, or a date."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return None


def _tls(config: ServerConfig, url: str) -> ssl.SSLContext | bool:
    if not config.verify_tls or url.startswith("http:"):
        return False
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"engine.ca_file {config.ca_file!r} cannot be used: {e}") from None


class EventDecoder:
    """The ``data`` of each complete event; an event that the end of the stream cuts off never happened.

    Raises ``ValueError`` when the bytes are no event stream.
    """

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")()
        self._line: list[str] = []
        """Pieces of a line that has not ended."""
        self._data: list[str] = []
        self._num_chars = 0
        """Characters held in both."""

    def feed(self, received: bytes) -> list[str]:
        """Return the data of the events that ``received`` completes."""
        *ends, rest = self._text.decode(received).split("\n")
        events = []
        for end in ends:
            line = "".join([*self._line, end]).removesuffix("\r")
            self._line = []
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        if rest:
            self._line.append(rest)
        self._num_chars = len(rest) + (self._num_chars if not ends else sum(map(len, self._data)))
        if self._num_chars > MAX_EVENT_CHARS:
            raise ValueError(f"an event of more than {MAX_EVENT_CHARS} characters")
        return events
