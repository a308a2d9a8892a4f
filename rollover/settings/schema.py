"""Builds a tree of frozen dataclasses, the schema, from TOML and command-line overrides.

Types are strict: nothing is converted except an integer to a float where a float is expected. Numbers are finite unless
a field says ``UNBOUNDED``, float32 can compute with them, whole numbers have 64 bits, and text is text in UTF-8. Every
mistake, whether in the file, in an override or found by a dataclass's ``__post_init__``, becomes one line that names
its place, and all mistakes of a kind are reported together. No message repeats a secret.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from rollover.errors import ConfigError
from rollover.privacy import HIDDEN, Redactor
from rollover.settings.overrides import Override
from rollover.settings.shape import at_key, declared, of_kind, several_kinds, types_at, types_within
from rollover.settings.toml import Document, KeyPath, dotted
from rollover.types import UNBOUNDED, is_moderate

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: the only thing that a string can hold and UTF-8 cannot."""


def build(schema: type[T], document: Document, overrides: Sequence[Override] = ()) -> T:
    """Build an instance of ``schema`` from a document, with overrides applied. Raises ``ConfigError`` with one line for
    each mistake."""
    from pydantic import ValidationError

    data, overridden = _overridden(schema, document.data, overrides)
    wrong: Sequence[Mapping[str, Any]] = list(_impossible(data, schema, data))
    if not wrong:
        try:
            # JSON, because only there does strict mode accept a table for a dataclass and an array for a tuple.
            made: T = _adapter(schema).validate_json(json.dumps(data, default=str), strict=True)  # type: ignore[arg-type]
            return made
        except ValidationError as error:
            wrong = error.errors(include_url=False)
    from rollover.settings.mistakes import Mistakes

    raise ConfigError(Mistakes(schema, document, data, overridden, Redactor(data)).render(wrong))


def kind_at(schema: type, document: Document, overrides: Sequence[Override], path: tuple[str, ...]) -> str:
    """Return the kind of a table of several kinds as an override or the document gives it, or else the first, whether
    or not the document is valid."""
    data, _ = _overridden(schema, document.data, overrides)
    given = functools.reduce(at_key, (*path, "kind"), data)
    return several_kinds(types_at(schema, path))[0] if given is None else str(given)


def with_kinds(schema: type, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``written`` in which each table of several kinds names its own, if only by default."""
    data = copy.deepcopy(dict(written))
    _write_kinds(data, [schema])
    return data


def _overridden(
    schema: type, written: Mapping[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], set[KeyPath]]:
    """Return ``written`` with the overrides applied and all kinds filled in, and the paths of the overrides."""
    data = with_kinds(schema, written)
    overrides = [in_full(schema, override) for override in overrides]
    for override in overrides:
        _change_kind(data, schema, override)
    overridden = {_apply(data, schema, override) for override in overrides}
    _write_kinds(data, [schema])
    return data, overridden


@functools.cache
def _adapter(schema: Any) -> Any:
    """Return pydantic's adapter that builds instances of ``schema``; deriving one takes some tenths of a second."""
    from pydantic import TypeAdapter, with_config

    return TypeAdapter(with_config({"extra": "forbid"})(schema))  # its parts inherit it


def _impossible(value: Any, schema: Any, data: Any, path: KeyPath = ()) -> Iterator[dict[str, Any]]:
    """Yield the values that no setting can have, whatever its type, in the form of pydantic's own errors."""
    match value:
        case dict() | list():
            items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in list(items):
                yield from _impossible(inner, schema, data, (*path, key))
            return
        case bool():
            return
        case int() if not -(2**63) <= value < 2**63:
            message = "whole numbers are limited to 64 bits"
        case float() if not math.isfinite(value) and float in types_at(schema, path, data):
            if value == math.inf and UNBOUNDED in declared(schema, path, data):
                return
            message = "this must be a finite number"
        case float() if not is_moderate(value) and float in types_at(schema, path, data):
            message = "this must be 0 or between 1e-30 and 1e30 in size, so that float32 can compute with it"
        case str() if _SURROGATE.search(value):
            message = "this is not text in UTF-8"
        case str() if "\0" in value:
            message = "this text contains the null character, which files and programs do not accept"
        case str() if HIDDEN in value:
            message = "this is the placeholder of a hidden secret: write the secret itself"
        case _:
            return
    yield {"type": "impossible", "loc": path, "input": value, "msg": message}


def _apply(data: dict[str, Any], schema: type, override: Override) -> KeyPath:
    """Apply an override to ``data`` and return its path; missing tables on the way are created, arrays are indexed."""
    here: Any = data
    path: KeyPath = ()
    for depth, part in enumerate(override.path):
        key: str | int = part
        if isinstance(here, list):
            key = _index(override, part, len(here), dotted(path))
            here.extend([{}] * (key == len(here)))
        elif not isinstance(here, dict):
            raise ConfigError(f"command line: {override}: {dotted(path)} has no keys of its own")
        path += (key,)
        if depth == len(override.path) - 1:
            here[key] = _value(override.text, types_at(schema, path))
        elif isinstance(here, list):
            here = here[int(key)]
        else:
            if here.get(part) is None:  # absent, or a table that a run was begun without
                here[part] = [] if override.path[depth + 1].isdigit() else {}
            here = here[part]
    return path


def _write_kinds(data: Any, annotations: list[Any]) -> None:
    """Fill in the ``kind`` of each table that has several kinds: the first if none is given, or the string given in
    place of the table. Elements of a list must give theirs. Keys that are ``"none"`` are unset."""
    for key, inner in list(data.items() if isinstance(data, dict) else enumerate(data)):
        options = [member for annotation in annotations for member in types_within(annotation, key)]
        if _unsets(inner, options):
            data[key] = None
            continue
        if kinds := several_kinds(options):
            if isinstance(inner, str):
                data[key] = inner = {"kind": inner}
            if isinstance(inner, dict) and isinstance(data, dict):
                inner.setdefault("kind", kinds[0])
        if isinstance(inner, dict | list):
            _write_kinds(inner, of_kind(options, inner))


def in_full(schema: type, override: Override) -> Override:
    """Expand ``--table KIND`` to ``--table.kind KIND``, and write the dashes of keys as underscores. Names that the
    user has chosen keep theirs."""
    path: tuple[str, ...] = ()
    for part in override.path:
        path += (part if types_at(schema, (*path, part)) else part.replace("-", "_"),)
    options = types_at(schema, path)
    is_short = several_kinds(options) and isinstance(_value(override.text, options), str)
    return replace(override, path=(*path, "kind") if is_short else path)


def _change_kind(data: dict[str, Any], schema: type, override: Override) -> None:
    """Empty a table whose kind the override changes, since its keys belonged to the old kind. An element of a list
    keeps its name and all its other keys."""
    *head, last = override.path
    if last != "kind" or not (kinds := several_kinds(types_at(schema, head))) or head[-1].isdecimal():
        return
    table = functools.reduce(at_key, head, data)
    if isinstance(table, dict) and override.text.strip("'\"") != table.get("kind", kinds[0]):
        table.clear()


def _index(override: Override, part: str, length: int, array: str) -> int:
    if not (part.isascii() and part.isdigit()) or len(part) > 9 or int(part) > length:
        raise ConfigError(
            f"command line: {override}: {array} is a list of {length}; "
            f"write an index from 0 to {length} ({length} appends) in place of {part!r}"
        )
    return int(part)


def _value(text: str, expected: Sequence[Any]) -> object:
    """Parse the text as a TOML literal; return it unchanged if it is not one, or if only a string is allowed."""
    if _unsets(text, expected):
        return None
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also a number of thousands of digits, or lists nested as deep
        return text
    if table.keys() != {"value"} or (not isinstance(table["value"], str) and expected and all(map(_is_text, expected))):
        return text
    return table["value"]


def _unsets(value: object, expected: Sequence[Any]) -> bool:
    """Return whether a value stands for none: ``"none"`` for a key that can be unset and has no such choice."""
    choices = (
        choice for annotation in expected if get_origin(annotation) is Literal for choice in get_args(annotation)
    )
    return value == "none" and types.NoneType in expected and "none" not in choices


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    return annotation is types.NoneType or (isinstance(annotation, type) and issubclass(annotation, str))
