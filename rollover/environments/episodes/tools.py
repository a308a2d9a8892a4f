"""``kind = "tools"``: Python functions that the model calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from rollover.environments.episodes.base import (
    Action,
    EnvironmentSettings,
    LiveEpisode,
    Outcome,
    RefusedAnswer,
    awaited,
    whole,
)
from rollover.environments.user_function import PATH, import_function, import_in_run, parameters_of
from rollover.errors import DataError, nearest
from rollover.settings.changes import Changeable

_HERMES = re.compile(
    r"<tool_call>(?:(\s*[{\[].*?)(?:</tool_call>|(?=<tool_call>\s*[{\[])|$)|((?:(?!<tool_call>).)*?)</tool_call>)",
    re.DOTALL,
)
"""A call in JSON, whose end may be missing, or anything else between two tags: one alone may be a word of the text."""
_CLOSED = re.compile(r"<tool_call>\s*[{\[](?:(?!</?tool_call>).)*</tool_call>", re.DOTALL)
_FENCED = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_CALLS = 32
"""Calls of one turn that are made."""


class ToolCall(NamedTuple):
    """A call of a tool, as the model wrote it.

    Example: ``ToolCall("calc", {"a": 12, "b": 34})``. A call that cannot be read has a ``problem``.
    """

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig(EnvironmentSettings):
    """Lets the model call functions of yours. A turn without a call ends the episode.

    Example: with ``functions = ["mine:calc"]`` and a turn of ``<tool_call>{"name": "calc", "arguments": {"a": 12, "b":
    34}}</tool_call>``, the model reads what ``calc(a=12, b=34)`` of ``mine.py`` returns.
    """

    has_state: ClassVar[bool] = False

    kind: Literal["tools"] = "tools"
    """``"tools"`` chooses functions."""
    functions: tuple[str, ...]
    """``"module:function"`` of each tool, sync or async. What the function returns is the tool's answer: a text as it
    is, a dataclass by its fields, anything else as JSON. An exception is an answer too. The chat template gets name,
    parameters and docstring of each: annotate and describe (Google style) every parameter. An argument has the
    annotated type, or the answer says that it has not."""
    parser: str = "hermes"
    """Way in which calls are read in a turn, after its thoughts (``</think>``): ``hermes`` (``<tool_call>{"name": ...,
    "arguments": ...}</tool_call>``), ``json`` (the turn, or each block of code in it, is such an object or a list of
    them), or ``"module:function"`` of yours, which gets the whole text and returns a list of ``(name, arguments)``."""
    tool_role: Literal["tool", "user"] = "tool"
    """Role of the tools' answers; ``user`` for chat templates without a place for ``tool``."""
    threads: Changeable[int] = 16
    """Number of turns that a process answers at the same time."""

    def __post_init__(self) -> None:
        EnvironmentSettings.__post_init__(self)
        if not self.functions:
            raise ValueError("environment.functions names no tool: list 'module:function' of each")
        for path in (*self.functions, *(() if self.parser in PARSERS else (self.parser,))):
            if not PATH.fullmatch(path):
                raise ValueError(f"environment: {path!r} must read 'module:function'")
        names = [path.partition(":")[2] for path in self.functions]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"environment.functions: two tools are called {double[0]!r}")
        if self.threads < 1:
            raise ValueError(f"environment.threads must be at least 1, got {self.threads}")

    @property
    def role(self) -> str:
        return self.tool_role

    @property
    def concurrency(self) -> int:
        return self.threads

    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(describe(import_in_run(path, "tool"), path.partition(":")[2]) for path in self.functions)

    def check(self) -> None:
        if self.parser not in PARSERS:
            import_in_run(self.parser)
        for path in self.functions:
            unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
            if by_position := [p.name for p in parameters_of(path, import_in_run(path, "tool")) if p.kind in unnamed]:
                name = f"tool {path} takes {by_position[0]!r}"
                raise DataError(f"{name} by position, but a call names its arguments; make it an ordinary parameter")

    def begin(self, columns: Mapping[str, Any], seed: int, state: str = "") -> Tools:
        functions = {path.partition(":")[2]: import_function(path, "tool") for path in self.functions}
        return Tools(functions, parser=self.parser, role=self.tool_role)


def describe(function: Callable[..., Any], name: str | None = None) -> Mapping[str, Any]:
    """Return the description of a tool for the chat template, under the name that calls of it have, if that is not the
    function's own. Raises ``DataError`` when it cannot be described."""
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise DataError(
            f"environment: tool {name or getattr(function, '__name__', repr(function))} cannot be described to the"
            f" model ({' '.join(str(error).split())}); annotate each parameter with its type and describe it in the"
            " docstring under 'Args:'"
        ) from None
    return schema if name is None else schema | {"function": schema["function"] | {"name": name}}


class Tools(LiveEpisode):
    """Answers turns by calling functions, which are given by name."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], *, parser: str, role: str) -> None:
        self._functions = functions
        self._role = role
        self._read = call_reader(parser)

    def step(self, action: Action) -> Outcome:
        calls = self._read(action.text)
        if not calls:
            return Outcome(done=True)
        begun = [self._begin(call) for call in calls[:_MOST_CALLS]]
        if (more := len(calls) - _MOST_CALLS) > 0:
            begun.append(f"Error: the last {more} calls were not made: a turn may have {_MOST_CALLS}")
        waiting = [answer for answer in begun if not isinstance(answer, str)]
        ended = iter(awaited(_together(waiting)) if waiting else ())
        answers = [answer if isinstance(answer, str) else next(ended) for answer in begun]
        return Outcome(messages=[{"role": self._role, "content": answer} for answer in answers])

    def _begin(self, call: ToolCall) -> str | Awaitable[str]:
        """Call a tool, outside any event loop, which it may start itself; return its answer, if need be to await."""
        if call.problem:
            return f"Error: {call.problem}"
        from rollover.environments.episodes.arguments import fitted

        function = self._functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}{nearest(call.name, self._functions)}"
        try:
            value = function(**fitted(function, call.arguments))
            return _later(value) if inspect.isawaitable(value) else _text(value)
        except BaseException as error:  # Ctrl-C does not reach this process: any interrupt comes from the tool
            return f"Error: {type(error).__name__}: {error}"


async def _together(waiting: Sequence[Awaitable[str]]) -> list[str]:
    return await asyncio.gather(*waiting)


async def _later(value: Awaitable[Any]) -> str:
    try:
        return _text(await value)
    except BaseException as error:
        return f"Error: {type(error).__name__}: {error}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=_in_json, ensure_ascii=False, allow_nan=False)


def _in_json(value: Any) -> Any:
    """Return what stands for a value that JSON does not have, and is the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays, tensors
        return value.tolist()
    if isinstance(value, Set):
        return sorted(value, key=repr)
    if _ADDRESS.search(text := str(value)):
        raise TypeError(f"the tool has returned {type(value).__name__}; return text or JSON")
    return text


def call_reader(parser: str) -> Callable[[str], list[ToolCall]]:
    """Return a function that reads the calls in a turn. It raises ``RefusedAnswer`` if a parser of the user's fails."""
    if parser in PARSERS:
        return PARSERS[parser]
    function = import_function(parser)

    def read(text: str) -> list[ToolCall]:
        try:
            calls = [ToolCall(*call) for call in function(text)]
            for name, arguments, _ in calls:
                if not isinstance(name, str) or not isinstance(arguments, Mapping):
                    raise TypeError(f"it has returned {(name, arguments)!r:.80}")
        except Exception as error:
            raise RefusedAnswer(
                f"environment.parser {parser} must return a list of (name, arguments), a text and a table"
                f" ({type(error).__name__}: {error})"
            ) from error
        return calls

    return read


def before_calls(text: str) -> str:
    """Return what a turn says before its first call in tags; all that it thinks is a part of it."""
    found = _HERMES.search(text, len(text) - len(_spoken(text)))
    return text[: found.start()].strip() if found else ""


def _spoken(text: str) -> str:
    """Return the turn without its thoughts, which may rehearse calls. A call may have ``</think>`` in an argument."""
    outside = _CLOSED.sub(lambda call: " " * len(call[0]), text)
    return text[len(text) - len(outside.rpartition("</think>")[2]) :]


def _hermes(text: str) -> list[ToolCall]:
    return [_call(written or other) for written, other in _HERMES.findall(_spoken(text))]


def _json(text: str) -> list[ToolCall]:
    spoken = _spoken(text)
    blocks = [block for language, block in _FENCED.findall(spoken) if language.strip() in ("", "json")]
    parts = blocks or ([spoken] if spoken.strip()[:1] in ("{", "[") else [])
    return [call for part in parts for call in _calls(part)]


def _calls(text: str) -> list[ToolCall]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [_call(text)]
    return [_call(json.dumps(one)) for one in (found if isinstance(found, list) else [found])]


def _call(text: str) -> ToolCall:
    try:
        found = _loaded(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is no JSON ({error})")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, "the call is no object with a name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, "the arguments of the call are no object")
    return ToolCall(found["name"], arguments)


def _loaded(text: str) -> Any:
    return json.loads(whole(json.dumps(json.loads(text), ensure_ascii=False)))


PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {"hermes": _hermes, "json": _json}
