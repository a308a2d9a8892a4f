"""The shape of a schema: which types a value at a path may have, which kinds, and what its field declares."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rollover.settings.changes import FIXED, OnResume
from rollover.settings.toml import KeyPath


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
        choices = {kind: handler(option) for option in get_args(source) for kind in own_kinds(option)}
        return {"type": "tagged-union", "discriminator": "kind", "choices": choices}


_hints: dict[Any, dict[str, Any]] = {}


def hints_of(table: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, kept because each evaluation compiles their text."""
    if table not in _hints:
        _hints[table] = get_type_hints(table)
    return _hints[table]


def own_kinds(annotation: Any) -> tuple[str, ...]:
    """Return the values of ``kind`` that select a dataclass; none if it has no such key."""
    if not is_dataclass(annotation):
        return ()
    kind = hints_of(annotation).get("kind")
    return get_args(kind) if get_origin(kind) is Literal else ()


def kinds(union: Any) -> dict[str, Any]:
    """Return the dataclasses of a union by their ``kind``."""
    return {kind: option for option in members_of(union) for kind in own_kinds(option)}


def several_kinds(annotations: Iterable[Any]) -> list[str]:
    """Return the kinds of a table that has several; none for everything else."""
    tables = [annotation for annotation in annotations if is_dataclass(annotation)]
    has_kinds = len(tables) > 1 and all(map(own_kinds, tables))
    return [kind for table in tables for kind in own_kinds(table)] if has_kinds else []


def types_at(schema: Any, path: Sequence[str | int], data: Any = None) -> list[Any]:
    """Return the types that a value at ``path`` may have, with unions split into their members; none when there is no
    such key. Given the ``data`` that the schema describes, return only the types of the kinds that it names."""
    here = members_of(schema)
    for key in path:
        here = [member for annotation in of_kind(here, data) for member in types_within(annotation, key)]
        data = at_key(data, key)
    return of_kind(here, data)


def at_key(data: Any, key: str | int) -> Any:
    """Return the value in a table or list; ``None`` when it is not there."""
    if isinstance(data, dict):
        return data.get(key)
    is_there = isinstance(data, list) and str(key).isdecimal() and int(key) < len(data)
    return data[int(key)] if is_there else None


def of_kind(annotations: list[Any], data: Any) -> list[Any]:
    if len(annotations) < 2 or not isinstance(data, dict) or "kind" not in data:
        return annotations
    chosen = [annotation for annotation in annotations if data["kind"] in own_kinds(annotation)]
    return chosen or annotations


def members_of(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for option in get_args(annotation) for member in members_of(option)]
    if hasattr(annotation, "__metadata__"):  # Annotated
        return members_of(annotation.__origin__)
    return [annotation]


def types_within(annotation: Any, key: str | int) -> list[Any]:
    if is_dataclass(annotation):
        hints = hints_of(annotation)
        return members_of(hints[key]) if key in hints else []
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple and (isinstance(key, int) or key.isdecimal()):
        if arguments[-1] is Ellipsis:
            return members_of(arguments[0])
        return members_of(arguments[int(key)]) if int(key) < len(arguments) else []
    if get_origin(annotation) in (dict, Mapping) and isinstance(key, str):
        return members_of(arguments[1])
    return []


def field_names(annotations: Iterable[Any]) -> list[str]:
    """Return the keys of the tables that these types describe."""
    return [f.name for annotation in annotations if is_dataclass(annotation) for f in fields(annotation)]


def keys(schema: type, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the schema's tables, tables themselves included; not those inside arrays."""
    for name in field_names(types_at(schema, prefix)):
        yield (*prefix, name)
        yield from keys(schema, (*prefix, name))


def declared(schema: Any, path: KeyPath, data: Any) -> Iterator[Any]:
    """Yield the annotations, beside the types, of the fields on the way to ``path``, the outermost first."""
    here = members_of(schema)
    for key in path:
        options = of_kind(here, data)
        for table in filter(is_dataclass, options):
            hint = get_type_hints(table, include_extras=True).get(str(key))
            yield from getattr(hint, "__metadata__", ())
        here = [member for option in options for member in types_within(option, key)]
        data = at_key(data, key)


def on_resume(schema: type, path: KeyPath, data: Any) -> OnResume:
    """Return the innermost declaration about a resume on the way to ``path`` in ``data``: the declaration of the key
    itself, or else of a table around it. For an element of a list, the list declares it."""
    return [FIXED, *(said for said in declared(schema, path, data) if isinstance(said, OnResume))][-1]
