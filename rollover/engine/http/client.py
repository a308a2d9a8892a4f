"""HTTP calls to one inference server, each with a deadline and each failure an ``EngineError`` that names the
server.

What it keeps true: no call waits for ever, whatever the server does; the API key leaves this process in the
``Authorization`` header only, never in a message, a log line or a ``repr``.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import httpx

from rollover.engine.http.config import ServerConfig
from rollover.engine.http.sse import EventDecoder
from rollover.errors import ConfigError, EngineError, EngineTimeout

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 10.0
_MAX_MESSAGE_CHARS = 600


class Patience:
    """The deadline of one streaming call: moved on by each sign of life, suspended while the server is
    paused.

    An async context manager; ``TimeoutError`` leaves it when the deadline passes. ``what`` says what was
    waited for.
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
        """Tokens have come."""
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
    """One server. Used from one event loop.

    Args:
        transport: in place of the network (tests).
    """

    def __init__(self, url: str, config: ServerConfig, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._key = _api_key(config)
        self.last_heard_s = float("-inf")
        """Loop time at which the server last sent something."""
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            verify=_tls(config, self.url),
            timeout=httpx.Timeout(None, connect=config.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
            trust_env=False,  # no proxy, no .netrc: the config alone says where calls go and with which key
        )

    def __repr__(self) -> str:
        return self.url

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
    ) -> Any:
        """The answer's JSON; ``None`` when it is empty.

        Raises ``EngineTimeout`` after ``timeout_s`` (``control_timeout_s`` when left out) and ``EngineError``
        with the server's own words when it refuses.
        """
        limit_s = self._config.control_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                with self._naming(f"{method} {path}"):
                    answer = await self._http.request(method, path, json=body, params=params)
        except EngineTimeout:
            raise
        except TimeoutError:
            raise EngineTimeout(f"{self.url} did not answer {method} {path} within {limit_s:g} s") from None
        self._heard()
        if answer.status_code >= 400:
            raise self._refusal(f"{method} {path}", answer.status_code, answer.text)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            raise EngineError(
                f"{self.url} answered {method} {path} with what is no JSON: {answer.text[:80]!r}"
            ) from None

    async def events(self, path: str, body: Any, patience: Patience) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of the event stream that answers a POST, up to ``[DONE]`` or the end of the
        connection.

        A server that is busy (429, 503) is asked again, after what its ``Retry-After`` says or a growing
        time.

        Raises:
            EngineTimeout: ``patience`` ran out, or the server was busy for ``busy_timeout_s``.
            EngineError: the server refuses, breaks off or sends what is no event stream.
        """
        try:
            async with patience, self._open(path, body) as answer:
                decoder = EventDecoder()
                async for received in answer.aiter_bytes():
                    self._heard()
                    for data in self._decoded(decoder, received, path):
                        if data == "[DONE]":
                            return
                        yield self._parsed(data, path)
                if decoder.inside_event:
                    raise EngineError(f"{self.url} broke off in the middle of an event of {path}")
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
                    if answer.status_code < 400:
                        yield answer
                        return
                    text = (await answer.aread()).decode(errors="replace")
                    self._heard()
                refusal = self._refusal(f"POST {path}", answer.status_code, text)
                if answer.status_code not in BUSY:
                    raise refusal
                wait_s = self._retry_after(answer) or backoff_s
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                if loop.time() + wait_s > give_up_s:
                    raise EngineTimeout(
                        f"{refusal}; busy for {self._config.busy_timeout_s:g} s (engine.busy_timeout_s)"
                    )
                await asyncio.sleep(wait_s)

    def _retry_after(self, answer: httpx.Response) -> float | None:
        """Seconds, from a number or a date measured against the answer's own."""
        value = answer.headers.get("Retry-After", "")
        try:
            return max(0.0, float(value))
        except ValueError:
            pass
        try:
            return max(
                0.0,
                (parsedate_to_datetime(value) - parsedate_to_datetime(answer.headers["Date"])).total_seconds(),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def _decoded(self, decoder: EventDecoder, received: bytes, path: str) -> list[str]:
        try:
            return decoder.feed(received)
        except ValueError as e:
            raise EngineError(f"{self.url} answered POST {path} with what is no event stream: {e}") from None

    def _parsed(self, data: str, path: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EngineError(f"{self.url} sent an event of {path} that is no JSON object: {data[:80]!r}")
        if event.get("error"):
            raise self._refusal(f"POST {path}", None, data)
        return event

    def _naming(self, what: str) -> _Naming:
        return _Naming(self.url, what)

    def _refusal(self, what: str, status: int | None, text: str) -> EngineError:
        said = _message(text)
        if self._key:
            said = said.replace(self._key, "***")
        code = f" with {status}" if status is not None else " while it answered"
        hint = "; is engine.api_key_env set?" if status in (401, 403) and self._key is None else ""
        return EngineError(f"{self.url} refused {what}{code}: {said or 'no reason given'}{hint}")

    def _heard(self) -> None:
        self.last_heard_s = asyncio.get_running_loop().time()


class _Naming:
    """Turns what httpx raises into ``EngineError``."""

    def __init__(self, url: str, what: str) -> None:
        self._url, self._what = url, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, httpx.ConnectTimeout):
            raise EngineTimeout(f"{self._url} did not accept a connection for {self._what} in time") from None
        if isinstance(error, httpx.ConnectError):
            raise EngineError(f"{self._url} cannot be reached for {self._what}: {error}") from None
        if isinstance(error, httpx.HTTPError):
            reason = str(error) or type(error).__name__
            raise EngineError(f"{self._url} broke off {self._what}: {reason}") from None


def _message(text: str) -> str:
    """What an error answer says, out of the wrappings in use: ``error.message``, ``error``, ``message``,
    ``detail``."""
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    while isinstance(said, dict):
        said = next(
            (said[key] for key in ("error", "message", "detail") if key in said),
            json.dumps(said, indent=None),
        )
    return " ".join(str(said).split())[:_MAX_MESSAGE_CHARS]


def _api_key(config: ServerConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "")
    if not key or not key.isascii() or key != key.strip():
        raise ConfigError(
            f"engine.api_key_env: the environment variable {config.api_key_env} must hold the API key"
            " (printable characters, no spaces around it)"
        )
    return key


def _tls(config: ServerConfig, url: str) -> ssl.SSLContext | bool:
    if not config.verify_tls or url.startswith("http:"):
        return False
    if config.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"engine.ca_file {config.ca_file!r} cannot be used: {e}") from None
