"""Reads TOML together with the line of each key, and writes the values that a configuration is made of.

Reading keeps the line on which each key was written, so that a complaint about a value can name it.
Writing is the inverse of reading for tables of strings, numbers, booleans, arrays and tables; TOML has no
null, so an unset key is written as a comment.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""The place of a value: keys of tables and indices of arrays."""


def dotted(path: KeyPath) -> str:
    """Write a place as users do: ``rollout.strategy.kind``."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed file: its values and the line of each key.

    Example: ``parse("steps = 4", "run.toml")`` has ``data == {"steps": 4}`` and ``lines == {("steps",): 1}``.
    """

    name: str
    """The file's name in messages."""
    data: dict[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """The line, from 1, on which each key was first written."""
    files: Mapping[KeyPath, str] = field(default_factory=dict)
    """The files of the lines that are in a file that this one extends."""
    laid_over: Mapping[KeyPath, str] = field(default_factory=dict)
    """For each key whose value comes from elsewhere and replaces the file's own, the words that say so: ``plan.json
    sets trainer.num_devices = 2``."""


def read(file: Path, name: str | None = None) -> Document:
    """Parse ``file``; raises ``ConfigError`` naming file, line and column."""
    name = name or str(file)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse ``text``; raises ``ConfigError`` naming ``name``, line and column."""
    text = text.replace("\r\n", "\n")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        if place is None:
            raise ConfigError(f"{name}: {message}") from None
        raise ConfigError(f"{name}:{place[1]}:{place[2]}: {message[: place.start()]}") from None
    except ValueError:  # Python's own limit for the digits of a number
        raise ConfigError(f"{name}: a number has thousands of digits") from None
    except RecursionError:
        raise ConfigError(f"{name}: lists or tables are nested too deeply") from None
    return Document(name=name, data=data, lines=_key_lines(text))


def _key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line on which each key of a valid document is first mentioned."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    num_elements: dict[KeyPath, int] = {}
    for number, statement in _statements(text):
        value = tomllib.loads(statement)
        if not statement.lstrip().startswith("["):
            _note(value, table, number, lines)
            continue
        is_array = statement.lstrip().startswith("[[")
        table = ()
        while value:
            (key, inner), *_ = value.items()
            table += (key,)
            lines.setdefault(table, number)
            value = inner[0] if isinstance(inner, list) else inner
            if is_array and not value:
                num_elements[table] = num_elements.get(table, 0) + 1
            if table in num_elements:
                table += (num_elements[table] - 1,)
                lines.setdefault(table, number)
    return lines


def _statements(text: str) -> list[tuple[int, str]]:
    """Split a document into headers and assignments, each with its first line; a value that spans lines stays whole."""
    statements = []
    pending, start = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        if not pending:
            start = number
            if not line.strip() or line.lstrip().startswith("#"):
                continue
        is_inside = bool(pending)
        pending += line + "\n"
        if is_inside and not any(end in line for end in ('"""', "'''", "]", "}")):
            continue
        try:
            tomllib.loads(pending)
        except tomllib.TOMLDecodeError:
            continue  # the value continues on the next line: the document as a whole is known to be valid
        statements.append((start, pending))
        pending = ""
    return statements


def _note(value: object, path: KeyPath, number: int, lines: dict[KeyPath, int]) -> None:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        lines.setdefault((*path, key), number)
        _note(inner, (*path, key), number, lines)


def dumps(data: Mapping[str, Any]) -> str:
    """Write ``data`` as a TOML document: plain keys first, then a section for each table."""
    return "\n".join(_table_lines(data, ())).strip() + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain, sections, unset = [], [], []
    for key, value in table.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        if value is None:
            unset.append(_key(key))
        elif isinstance(value, Mapping):
            sections += ["", f"[{name}]", *_table_lines(value, inner)]
        elif isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
            for element in value:
                sections += ["", f"[[{name}]]", *_table_lines(element, inner)]
        else:
            plain.append(f"{_key(key)} = {literal(value)}")
    comment = textwrap.wrap("unset: " + ", ".join(unset), 98) if unset else []
    return plain + [f"# {line}" for line in comment] + sections


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else literal(key)


def literal(value: object) -> str:
    """Write ``value`` as TOML in one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(literal, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items()) + "}"
    raise TypeError(f"TOML has no {type(value).__name__}")
