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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rollover.errors import ConfigError, nearest
from rollover.privacy import HIDDEN, Redactor
from rollover.settings.changes import FIXED, OnResume
from rollover.settings.overrides import Override
from rollover.settings.toml import Document, KeyPath, dotted
from rollover.types import UNBOUNDED, is_moderate

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: the only thing that a string can hold and UTF-8 cannot."""


@dataclass(frozen=True)
class ByKind:
    """Marks a union of dataclasses that each have a literal ``kind``. A table's ``kind`` selects one of them, and the
    first is meant if it is missing. A string in place of the table is its kind.

    Example: for a field of type ``Annotated[AprilConfig | SyncConfig, ByKind()]``, ``{"kind": "sync"}`` and ``"sync"``
    both build ``SyncConfig()``, and ``{}`` builds ``AprilConfig()``.
    """

    elsewhere: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Kinds that a user may expect but that are not among these, with the end of the message about each."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        choices = {kind: handler(option) for option in get_args(source) for kind in _kinds(option)}
        return {"type": "tagged-union", "discriminator": "kind", "choices": choices}


@functools.cache
def _hints_of(table: Hashable) -> dict[str, Any]:
    """Return the types of a dataclass's fields, cached because each evaluation compiles their text."""
    return get_type_hints(table)


def _hints(table: Any) -> dict[str, Any]:
    return _hints_of(table)


def _kinds(annotation: Any) -> tuple[str, ...]:
    """Return the values of ``kind`` that select a dataclass; none if it has no such key."""
    if not is_dataclass(annotation):
        return ()
    kind = _hints(annotation).get("kind")
    return get_args(kind) if get_origin(kind) is Literal else ()


def kinds(union: Any) -> dict[str, Any]:
    """Return the dataclasses of a union by their ``kind``."""
    return {kind: option for option in _members(union) for kind in _kinds(option)}


def build(schema: type[T], document: Document, overrides: Sequence[Override] = ()) -> T:
    """Build an instance of ``schema`` from a document, with overrides applied.

    Raises ``ConfigError`` with one line for each mistake.
    """
    from pydantic import ValidationError

    data, overridden = _overridden(schema, document.data, overrides)
    report = _Report(schema, document, data, overridden, Redactor(data))
    if wrong := list(_impossible(data, schema, data)):
        raise ConfigError(report.render(wrong))
    try:
        # JSON, because only there does strict mode accept a table for a dataclass and an array for a tuple.
        made: T = _adapter(schema).validate_json(json.dumps(data, default=str), strict=True)
        return made
    except ValidationError as error:
        raise ConfigError(report.render(error.errors(include_url=False))) from None


def kind_at(schema: type, document: Document, overrides: Sequence[Override], path: tuple[str, ...]) -> str:
    """Return the kind of a table of several kinds as an override or the document gives it, or else the first, whether
    or not the document is valid."""
    data, _ = _overridden(schema, document.data, overrides)
    given = functools.reduce(_at_key, (*path, "kind"), data)
    return _choice(types_at(schema, path))[0] if given is None else str(given)


def _overridden(
    schema: type, written: Mapping[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], set[KeyPath]]:
    """Return ``written`` with the overrides applied and all kinds filled in, and the paths of the overrides."""
    data = copy.deepcopy(dict(written))
    _write_kinds(data, [schema])
    overrides = [_in_full(schema, override) for override in overrides]
    for override in overrides:
        _change_kind(data, schema, override)
    overridden = {_apply(data, schema, override) for override in overrides}
    _write_kinds(data, [schema])
    return data, overridden


def _adapter(schema: Any) -> Any:
    """Return pydantic's adapter that builds instances of ``schema``; deriving one takes some tenths of a second."""
    from pydantic import TypeAdapter, with_config

    if schema not in _adapters:
        _adapters[schema] = TypeAdapter(with_config({"extra": "forbid"})(schema))  # its parts inherit it
    return _adapters[schema]


_adapters: dict[Any, Any] = {}
"""Adapters that have been built, by schema."""


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
            if value == math.inf and UNBOUNDED in _declared(schema, path, data):
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


def _declared(schema: Any, path: KeyPath, data: Any) -> Iterator[Any]:
    """Yield the annotations, beside the types, of the fields on the way to ``path``, the outermost first."""
    here = _members(schema)
    for key in path:
        options = _of_kind(here, data)
        for table in filter(is_dataclass, options):
            hint = get_type_hints(table, include_extras=True).get(str(key))
            yield from getattr(hint, "__metadata__", ())
        here = [member for option in options for member in _inner(option, key)]
        data = _at_key(data, key)


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
        options = [member for annotation in annotations for member in _inner(annotation, key)]
        if _unsets(inner, options):
            data[key] = None
            continue
        if kinds := _choice(options):
            if isinstance(inner, str):
                data[key] = inner = {"kind": inner}
            if isinstance(inner, dict) and isinstance(data, dict):
                inner.setdefault("kind", kinds[0])
        if isinstance(inner, dict | list):
            _write_kinds(inner, _of_kind(options, inner))


def _choice(annotations: Iterable[Any]) -> list[str]:
    """Return the kinds of a table that has several; none for everything else."""
    tables = [annotation for annotation in annotations if is_dataclass(annotation)]
    return [kind for table in tables for kind in _kinds(table)] if len(tables) > 1 and all(map(_kinds, tables)) else []


def _in_full(schema: type, override: Override) -> Override:
    """Expand ``--table KIND`` to ``--table.kind KIND``."""
    options = types_at(schema, override.path)
    is_short = _choice(options) and isinstance(_value(override.text, options), str)
    return replace(override, path=(*override.path, "kind")) if is_short else override


def _change_kind(data: dict[str, Any], schema: type, override: Override) -> None:
    """Empty a table whose kind the override changes, since its keys belonged to the old kind. An element of a list
    keeps its name and all its other keys."""
    *head, last = override.path
    if last != "kind" or not (kinds := _choice(types_at(schema, head))) or head[-1].isdecimal():
        return
    table = functools.reduce(_at_key, head, data)
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


def types_at(schema: Any, path: Sequence[str | int], data: Any = None) -> list[Any]:
    """Return the types that a value at ``path`` may have, with unions split into their members; none when there is no
    such key. Given the ``data`` that the schema describes, return only the types of the kinds that it names."""
    here = _members(schema)
    for key in path:
        here = [member for annotation in _of_kind(here, data) for member in _inner(annotation, key)]
        data = _at_key(data, key)
    return _of_kind(here, data)


def _at_key(data: Any, key: str | int) -> Any:
    """Return the value in a table or list; ``None`` when it is not there."""
    if isinstance(data, dict):
        return data.get(key)
    is_there = isinstance(data, list) and str(key).isdecimal() and int(key) < len(data)
    return data[int(key)] if is_there else None


def _of_kind(annotations: list[Any], data: Any) -> list[Any]:
    """Return the types that ``data`` can have by its ``kind``."""
    if len(annotations) < 2 or not isinstance(data, dict) or "kind" not in data:
        return annotations
    chosen = [annotation for annotation in annotations if data["kind"] in _kinds(annotation)]
    return chosen or annotations


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for option in get_args(annotation) for member in _members(option)]
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _members(annotation.__origin__)
    return [annotation]


def _inner(annotation: Any, key: str | int) -> list[Any]:
    if is_dataclass(annotation):
        hints = _hints(annotation)
        return _members(hints[key]) if key in hints else []
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and (isinstance(key, int) or key.isdecimal()):
        if arguments[-1] is Ellipsis:
            return _members(arguments[0])
        return _members(arguments[int(key)]) if int(key) < len(arguments) else []
    if get_origin(annotation) in (dict, Mapping) and isinstance(key, str):
        return _members(arguments[1])
    return []


def field_names(annotations: Iterable[Any]) -> list[str]:
    """Return the keys of the tables that these types describe."""
    return [f.name for annotation in annotations if is_dataclass(annotation) for f in fields(annotation)]


def keys(schema: type, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the schema's tables, tables themselves included; not those inside arrays."""
    for name in field_names(types_at(schema, prefix)):
        yield (*prefix, name)
        yield from keys(schema, (*prefix, name))


def on_resume(schema: type, path: KeyPath, data: Any) -> OnResume:
    """Return the innermost declaration about a resume on the way to ``path`` in ``data``: the declaration of the key
    itself, or else of a table around it. For an element of a list, the list declares it."""
    return [FIXED, *(said for said in _declared(schema, path, data) if isinstance(said, OnResume))][-1]


@dataclass(frozen=True)
class _Report:
    """Turns pydantic's errors into lines that a user can act on."""

    schema: type
    document: Document
    data: dict[str, Any]
    overridden: set[KeyPath]
    redactor: Redactor

    def render(self, found: Iterable[Mapping[str, Any]]) -> str:
        lines: dict[str, int] = {}
        for error in found:
            line, text = self._describe(error)
            lines.setdefault(text, line)
        return "\n".join(self.redactor.text(text) for text in sorted(lines, key=lambda text: lines[text]))

    def _describe(self, error: Mapping[str, Any]) -> tuple[int, str]:
        path = self._path(error["loc"])
        seen, context = self.redactor.value(error["input"], dotted(path)), error.get("ctx", {})
        match error["type"]:
            case "value_error":
                return self._place_of_message(path, str(context["error"]))
            case "missing":
                message = "this key is required"
            case "unexpected_keyword_argument" | "extra_forbidden":
                message = f"unknown key{self._suggestion(path)}"
            case "literal_error" | "enum":
                message = f"{seen!r} is not allowed{_choices(str(seen), _quoted(context['expected']))}"
            case "union_tag_not_found":
                path += (context["discriminator"].strip("'"),)
                message = "this key is required"
            case "union_tag_invalid":
                tag, tags = context["tag"], _quoted(context["expected_tags"])
                said = [a.elsewhere for a in _declared(self.schema, path, self.data) if isinstance(a, ByKind)]
                known = next((f": {kinds[tag]}" for kinds in said if tag in kinds), nearest(tag, tags))
                message = f"{tag!r} is not allowed{known}"
                path += (context["discriminator"].strip("'"),)
            case kind if kind.endswith("_type") or kind == "int_from_float":
                expected = dict.fromkeys(map(_name, types_at(self.schema, path, self.data)))
                message = f"expected {' or '.join(expected)}, got {_show(seen)}"
            case _:
                message = f"{error['msg']}, got {_show(seen)}"
        return self._at(path, f"{dotted(path)}: {message}")

    def _path(self, loc: Sequence[str | int]) -> KeyPath:
        """Return pydantic's location without the names of union members that it inserts."""
        path: KeyPath = ()
        here: Any = self.data
        tagged = False
        for key in loc:
            of_several = isinstance(here, dict) and len(types_at(self.schema, path)) > 1
            if of_several and not tagged and key == here.get("kind"):
                tagged = True  # pydantic puts it before the keys of the table
            elif (isinstance(here, dict) and key in here) or (isinstance(here, list) and isinstance(key, int)):
                path, here, tagged = (*path, key), here[key], False  # type: ignore[index]
            elif isinstance(here, dict) and key in field_names(types_at(self.schema, path, self.data)):
                return (*path, key)
        return path

    def _suggestion(self, path: KeyPath) -> str:
        others = [a for a in types_at(self.schema, path[:-1]) if path[-1] in field_names([a])]
        if others:
            kinds = " or ".join(dict.fromkeys(repr(kind) for a in others for kind in _kinds(a)))
            here: Any = functools.reduce(lambda table, key: table[key], path[:-1], self.data)  # type: ignore[index]
            return f" of kind {here['kind']!r}; it belongs to kind {kinds}"
        elsewhere = [key for key in keys(self.schema) if key[-1] == path[-1]]
        if elsewhere:
            return f"; did you mean {dotted(min(elsewhere, key=len))!r}?"
        return nearest(str(path[-1]), field_names(types_at(self.schema, path[:-1], self.data)))

    def _place_of_message(self, section: KeyPath, message: str) -> tuple[int, str]:
        """Locate the error of a dataclass at the first key that it mentions, an overridden one before all others. Add
        what has set the keys that are not the file's own."""
        words = [tuple(word.strip(".").split(".")) for word in re.findall(r"[A-Za-z_][\w.]*", message)]
        mentioned = [path for word in words if (path := self._key_named(section, word))]
        text = f"{dotted(section)}: {message}" if section else message
        if mentioned and message.startswith(words[0][0]) and self._key_named(section, words[0]) == mentioned[0]:
            text = dotted(mentioned[0]) + message.removeprefix(".".join(words[0]))
        laid = {path: said for path in mentioned if (said := self._laid_over(path))}
        written = [path for path in mentioned if path in {*self.overridden, *self.document.lines, *laid}]
        written.sort(key=lambda path: path not in self.overridden)
        by_others = "; ".join(laid.values())
        if written and written[0] in laid:
            return 0, f"{by_others}: {text}"
        return self._at(written[0] if written else section, f"{text} ({by_others})" if laid else text)

    def _laid_over(self, path: KeyPath) -> str | None:
        """Return what has set a key in place of the file, unless an override has set it again."""
        is_overridden = path in self.overridden or (*path, "kind") in self.overridden
        return None if is_overridden else self.document.laid_over.get(path)

    def _key_named(self, section: KeyPath, word: tuple[str, ...]) -> KeyPath | None:
        """Return the key that a word of a message names: one of its own section or, dotted, of one around it. A message
        about a table of a list, such as ``rewards.1``, may call it by the name of one: ``reward.url``."""
        if section[-2:-1] == (f"{word[0]}s",) and len(word) > 1:
            return self._key_named(section, word[1:])
        candidates = [(*section[:depth], *word) for depth in range(len(section), -1, -1)]
        candidates = candidates if len(word) > 1 else candidates[:1]
        return next((path for path in candidates if types_at(self.schema, path)), None)

    def _at(self, path: KeyPath, text: str) -> tuple[int, str]:
        """Return the line to sort by, and the text headed by the place where the key or its table was written."""
        for written in (path[:end] for end in range(len(path), 0, -1)):
            line = self.document.lines.get(written)
            inside = line is None and any(p[: len(written)] == written for p in self.overridden)
            if inside or written in self.overridden:
                return 1 << 30, f"command line: --{text}"
            if line is not None:
                return line, f"{self.document.name}:{line}: {text}"
            if said := self._laid_over(written):
                return 0, f"{said}: {text}"
        return 0, f"{self.document.name}: {text}"


def _choices(value: str, allowed: Sequence[str]) -> str:
    """Return all of a few values that could be meant, or the one of many that looks like ``value``."""
    if len(allowed) > 3:
        return nearest(value, allowed)
    return f"; choose {' or '.join(map(repr, allowed))}"


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _name(annotation: Any) -> str:
    """Name a type as a user of TOML knows it."""
    names = {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "nothing"}
    if annotation in names:
        return names[annotation]
    if is_dataclass(annotation) or get_origin(annotation) in (dict, Mapping):
        return "a table"
    if get_origin(annotation) is tuple:
        return "a list"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, get_args(annotation)))
    return "a string"


def _show(value: object) -> str:
    """Show a value as a user of TOML knows it, its secrets hidden before it is cut."""
    kinds = {
        bool: "",
        int: "the whole number ",
        float: "the number ",
        str: "the string ",
        list: "the list ",
        dict: "the table ",
    }
    try:
        text = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    except ValueError:
        text = "with thousands of digits"
    text = text.encode(errors="backslashreplace").decode()
    return kinds.get(type(value), "") + (text if len(text) <= 60 else text[:57] + "...")
