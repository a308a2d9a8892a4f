"""The conversation of an agent's program with the model: its requests, in the form in which they are compared, and the
replies to them. Nothing here waits or decides.

A message counts as its role (``developer`` is ``system``), its text (parts joined, ``null`` is empty) and its calls
(name and parsed arguments). Ids, empty fields and extensions do not count: clients change them when they repeat the
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollover.environments.episodes.base import RefusedAnswer
from rollover.environments.episodes.tools import ToolCall, before_calls

_ROLES = {"system", "user", "assistant", "tool"}
_MOST_LEVELS = 100
"""Far less than Python's limit of recursion, which whatever handles the request later would meet."""

Messages = list[dict[str, Any]]


class RefusedRequest(Exception):
    """A request that is answered with an error.

    Args:
        message: what is wrong with it.
        code: OpenAI's name of the error, if it has any.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for a chat completion."""

    messages: Messages
    """The whole conversation, each message in the form that counts."""
    tools: Sequence[Mapping[str, Any]] = ()
    stop: tuple[str, ...] = ()
    """Texts before which the reply is cut."""
    may_call: bool = True
    """False if the program wants no calls in the reply (``tool_choice = "none"``)."""
    streams: bool = False
    counts: bool = False
    """True if a stream ends with the numbers of tokens."""
    model: str = ""


def read_request(body: bytes) -> ChatRequest:
    """Read the body of a request.

    Raises:
        RefusedRequest: it is no request for a chat completion, or asks for what this model cannot give.
    """
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # a text may hold half a character
        raise RefusedRequest(f"the request is no JSON: {error}") from None
    if _is_deeper(given, _MOST_LEVELS):
        raise RefusedRequest(f"the request is nested more than {_MOST_LEVELS} levels deep")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list) or not given["messages"]:
        raise RefusedRequest("the request has no messages")
    for name, wanted in (("n", (None, 1)), ("logprobs", (None, False)), ("functions", (None,))):
        if given.get(name) not in wanted:
            raise RefusedRequest(f"{name} = {json.dumps(given[name])[:40]} is not supported", "unsupported_parameter")
    if (given.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise RefusedRequest("response_format: only text is supported", "unsupported_parameter")
    stop, tools = given.get("stop") or (), given.get("tools") or ()
    try:
        are_named = all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (TypeError, KeyError):
        are_named = False
    if not are_named:
        raise RefusedRequest("tools is no list of functions with names")
    try:
        return ChatRequest(
            messages=[_message(message, f"messages[{number}]") for number, message in enumerate(given["messages"])],
            tools=tools,
            stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            may_call=bool(tools) and given.get("tool_choice") != "none",
            streams=given.get("stream") is True,
            counts=(given.get("stream_options") or {}).get("include_usage") is True,
            model=str(given.get("model", "")),
        )
    except (TypeError, AttributeError) as error:
        raise RefusedRequest(f"the request has a field of a wrong type: {error}") from None


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise RefusedRequest(f"{where}: the role is {role!r}, and none of {', '.join(sorted(_ROLES))}")
    found = {"role": role, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls") if role == "assistant" else None
    return found | ({"tool_calls": [_call(call, where) for call in calls]} if calls else {})


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise RefusedRequest(f"{where}: the content is neither a text nor parts of text")
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise RefusedRequest(f"{where}: a call has no name, or arguments that are no JSON") from None
    if _is_deeper(arguments, _MOST_LEVELS):
        raise RefusedRequest(f"{where}: the arguments of a call are nested more than {_MOST_LEVELS} levels deep")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def record_of(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a request adds to the conversation, as the journal has it."""
    return json.dumps({"messages": messages} | ({"tools": tools} if tools else {}), ensure_ascii=False)


class ChatReply(NamedTuple):
    """The model's turn, as the program gets it."""

    number: int
    content: str
    calls: tuple[ToolCall, ...]
    num_prompt_tokens: int
    num_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """Return the message in the form that counts."""
        return _message({"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}, "reply")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the calls as clients expect them. Their ids follow from the turn, since programs repeat them."""
        return [
            {
                "id": f"call_{self.number}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(self.calls)
        ]

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def completion(self, request: ChatRequest) -> dict[str, Any]:
        """Return the reply to a request that does not stream."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self.tool_calls
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
        return self._frame(request, "chat.completion", [choice]) | {"usage": self.usage}

    def pieces(self, request: ChatRequest) -> list[dict[str, Any]]:
        """Return the pieces of a stream."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": self.content}]
        deltas += [{"tool_calls": [{"index": place} | call]} for place, call in enumerate(self.tool_calls)]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices += [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]
        pieces = [self._frame(request, "chat.completion.chunk", [choice]) for choice in choices]
        if request.counts:
            pieces.append(self._frame(request, "chat.completion.chunk", []) | {"usage": self.usage})
        return pieces

    def _frame(self, request: ChatRequest, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what surrounds ``choices``; nothing in it depends on the time, which a repeated program would see."""
        return {
            "id": f"chatcmpl-{self.number}",
            "object": kind,
            "created": 0,
            "model": request.model,
            "choices": choices,
        }


def reply_to(
    request: ChatRequest, text: str, read: Callable[[str], Sequence[ToolCall]], *, number: int, sizes: tuple[int, int]
) -> ChatReply:
    """Return a turn of the model as the reply to a request. ``sizes``: the tokens before the turn, and its own. Raises
    ``RefusedAnswer`` if a parser of the user's returns what JSON does not have."""
    for stop in request.stop:
        text = text.partition(stop)[0] if stop else text
    calls = tuple(read(text)) if request.may_call else ()
    if not calls or any(call.problem for call in calls):
        return ChatReply(number, text, (), *sizes)
    reply = ChatReply(number, before_calls(text), calls, *sizes)
    try:
        _ = reply.message
    except (RefusedRequest, RecursionError):  # its calls are nested too deep to come back in a request
        return ChatReply(number, text, (), *sizes)
    except (TypeError, ValueError) as error:
        raise RefusedAnswer(f"environment.parser: the arguments of a call are no JSON ({error})") from None
    return reply
