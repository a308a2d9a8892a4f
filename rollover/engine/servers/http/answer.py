"""Answers of servers, read before they are used: bounded, typed, and free of our secrets before it is shown to anybody.

Invariants: nothing that a server sends is used before it has been checked against the type that is expected of
it; an answer that does not fit is one ``EngineError`` that names the server, the call and the field; a server that
repeats our request's headers cannot bring the API key into a message, for secrets are blanked before a text is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import from_json

from rollover.errors import EngineError

T = TypeVar("T", bound=BaseModel)

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
MAX_ANSWER_BYTES = 1 << 24
"""A longer answer is refused: none of our calls has one."""
_MAX_REFUSAL_BYTES = 1 << 16
"""Error pages are read up to here."""
_MAX_SHOWN_CHARS, _MAX_VALUE_CHARS = 600, 120
_BLANKED = "***"


class ServerBusy(EngineError):
    """A server that takes no calls now and answers 429 or 503, as a paused server may."""


class Answer(BaseModel):
    """A JSON object of a server. Fields that the model does not declare are left out; the others are of exactly their
    type.

    Example: ``PauseState.model_validate_json('{"is_paused": true, "more": 1}')`` is ``PauseState(is_paused=True)``;
    with ``"yes"`` in place of ``true`` it is refused.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Event(Answer):
    """One event of a stream. An event that reports an error has another form and ends the stream with that error."""

    error: None = None


def _shown(text: str, info: ValidationInfo) -> str:
    return info.context.shown(text) if isinstance(info.context, Reader) else text


Shown = Annotated[str, AfterValidator(_shown)]
"""A text that is there to be shown: read without secrets and cut."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Reader:
    """Reads what one server sends.

    Args:
        server: what messages call it.
        secrets: texts that no message may hold.
    """

    def __init__(self, server: str, secrets: Iterable[str] = ()) -> None:
        self._server = server
        forms = {form for s in secrets for form in (s, repr(s)[1:-1], json.dumps(s)[1:-1], quote(s, safe=""))}
        self._secrets = sorted(forms, key=len, reverse=True)

    def shown(self, text: str, limit: int = _MAX_SHOWN_CHARS) -> str:
        """Prepare ``text`` for a message: in one line, without secrets, cut."""
        for secret in self._secrets:
            text = text.replace(secret, _BLANKED)
        text = " ".join(text.split())
        return text if len(text) <= limit else f"{text[:limit]}..."

    # -- answers ---------------------------------------------------------------------------------------------

    async def accepted(self, answer: httpx.Response, what: str) -> bytes:
        """Read the body of an answer that says yes.

        Args:
            what: the call, as messages name it.

        Raises ``EngineError`` with the server's own words when it says no.
        """
        if not answer.is_success:
            raise await self.refusal(answer, what)
        self.check_encoding(answer, what)
        body = bytearray()
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise EngineError(f"{self._server} answered {what} with more than {MAX_ANSWER_BYTES} bytes")
        return bytes(body)

    def check_encoding(self, answer: httpx.Response, what: str) -> None:
        """Raise ``EngineError`` when a body is compressed, which we have not asked for: a few bytes of it may hold any
        amount of text."""
        if encoding := _encoding(answer):
            raise EngineError(
                f"{self._server} answered {what} in the encoding {self.shown(encoding, _MAX_VALUE_CHARS)!r}, although"
                " the call allows none: make the server, or the proxy in front of it, send answers uncompressed"
            )

    def typed(self, kind: type[T], body: bytes | str, what: str) -> T:
        """Return the JSON of ``body`` as a ``kind``. Raises ``EngineError`` naming the first field that does not
        fit."""
        try:
            return kind.model_validate_json(body, strict=True, context=self)
        except ValidationError as e:
            raise self._misfit(e, body, what) from None

    def event(self, kind: type[T], data: str, what: str) -> T:
        """Read an event as ``typed`` does; an event that reports an error is raised as that error."""
        try:
            return self.typed(kind, data, what)
        except EngineError:
            if said := _error_in(data):
                raise EngineError(
                    f"{self._server} refused {what} in the middle of its answer: {self.shown(said)}"
                ) from None
            raise

    def _misfit(self, error: ValidationError, body: bytes | str, what: str) -> EngineError:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            text = body.decode(errors="replace") if isinstance(body, bytes) else body
            reason = first["msg"].removeprefix("Invalid JSON: ")
            return EngineError(
                f"{self._server} answered {what} with invalid JSON ({reason}):"
                f" {self.shown(repr(text), _MAX_VALUE_CHARS)}"
            )
        field = ".".join(map(str, first["loc"]))
        where = f"field {field!r}" if field else "the whole of it"
        return EngineError(
            f"{self._server} answered {what} with an unusable value, {where}: {first['msg']}, got"
            f" {self.shown(repr(first['input']), _MAX_VALUE_CHARS)}"
        )

    # -- refusals --------------------------------------------------------------------------------------------

    async def refusal(self, answer: httpx.Response, what: str) -> EngineError:
        """Make an error of an answer that refuses a call. A redirect is not followed: calls and the key go where the
        config says and nowhere else."""
        if 300 <= answer.status_code < 400:
            return EngineError(
                f"{self._server} answered {what} with {answer.status_code}, a redirect to"
                f" {self._location(answer)}, and redirects are not followed: give the final address"
            )
        said = self.shown(_message(await _head_of(answer))) or "no reason given"
        hint = "; is engine.api_key_env set?" if answer.status_code in (401, 403) and not self._secrets else ""
        kind = ServerBusy if answer.status_code in BUSY else EngineError
        return kind(f"{self._server} refused {what} with {answer.status_code}: {said}{hint}")

    def _location(self, answer: httpx.Response) -> str:
        """Name the target of a redirect, without its query, which may hold secrets."""
        try:
            parts = urlsplit(answer.headers.get("Location", ""))
        except ValueError:
            return "nowhere"
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""
        return self.shown(f"{place}{parts.path}", _MAX_VALUE_CHARS) or "nowhere"


def _encoding(answer: httpx.Response) -> str:
    """Name the encoding of a compressed body; empty for a body that is not compressed."""
    encoding = str(answer.headers.get("Content-Encoding", ""))
    return "" if encoding.strip().lower() in ("identity", "") else encoding


async def _head_of(answer: httpx.Response) -> str:
    """Read the beginning of an error's body; a compressed one is not read."""
    if _encoding(answer):
        return ""
    body = bytearray()
    async for piece in answer.aiter_raw():
        body += piece[: _MAX_REFUSAL_BYTES - len(body)]
        if len(body) >= _MAX_REFUSAL_BYTES:
            break
    return body.decode(errors="replace")


def _error_in(data: str) -> str:
    """Return the message of an event that reports an error; empty if it reports none."""
    try:
        event = from_json(data)
    except ValueError:
        return ""
    return _message(data) if isinstance(event, dict) and event.get("error") else ""


def _message(text: str) -> str:
    """Unwrap the message of an error answer: ``error.message``, ``error``, ``message``,
    ``detail``. Anything else is taken as it stands."""
    try:
        said: Any = from_json(text)
    except ValueError:
        return text
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), None)
    return said if isinstance(said, str) else text
