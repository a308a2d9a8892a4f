"""Mistakes in a config: pydantic's errors as lines that a user can act on, each with the place where it was made."""

from __future__ import annotations

import functools
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, get_args, get_origin

from rollover.errors import nearest
from rollover.privacy import Redactor
from rollover.settings.shape import ByKind, declared, field_names, keys, own_kinds, types_at
from rollover.settings.toml import Document, KeyPath, dotted


@dataclass(frozen=True)
class Mistakes:
    """The document in which mistakes are, for lines about them."""

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
                said = [a.elsewhere for a in declared(self.schema, path, self.data) if isinstance(a, ByKind)]
                known = next((f": {kinds[tag]}" for kinds in said if tag in kinds), nearest(tag, tags))
                message = f"{tag!r} is not allowed{known}"
                path += (context["discriminator"].strip("'"),)
            case kind if kind.endswith("_type") or kind == "int_from_float":
                expected = dict.fromkeys(map(_name, types_at(self.schema, path, self.data)))
                message = f"expected {' or '.join(expected)}, got {_show(seen)}"
            case "too_long":
                message = f"expected at most {context['max_length']} values, got {_show(seen)}"
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
            kinds = " or ".join(dict.fromkeys(repr(kind) for a in others for kind in own_kinds(a)))
            here: Any = functools.reduce(lambda table, key: table[key], path[:-1], self.data)  # type: ignore[index]
            return f" of kind {here['kind']!r}; it belongs to kind {kinds}"
        names = getattr(self.schema, "other_names", {}).items()
        if meant := [key for key, others in names if {str(path[-1]), dotted(path)} & {*others.split()}]:
            return f"; did you mean {meant[0]!r}?"
        elsewhere = [key for key in keys(self.schema) if key[-1] == path[-1]]
        if elsewhere:
            return f"; did you mean {dotted(min(elsewhere, key=len))!r}?"
        return nearest(str(path[-1]), field_names(types_at(self.schema, path[:-1], self.data)))

    def _place_of_message(self, section: KeyPath, message: str) -> tuple[int, str]:
        """Locate the error of a dataclass at the first key that it mentions, an overridden one before all others and
        the file's own before inherited ones. Add what has set the keys in place of the file."""
        dotted_words = [word.strip(".").split(".") for word in re.findall(r"[A-Za-z_][\w.]*", message)]
        words: list[KeyPath] = [
            tuple(int(part) if part.isdecimal() else part for part in parts) for parts in dotted_words
        ]
        mentioned = [path for word in words if (path := self._key_named(section, word))]
        text = f"{dotted(section)}: {message}" if section else message
        if mentioned and message.startswith(str(words[0][0])) and self._key_named(section, words[0]) == mentioned[0]:
            text = dotted(mentioned[0]) + message.removeprefix(dotted(words[0]))
        laid = {path: said for path in mentioned if (said := self._laid_over(path))}
        written = [path for path in mentioned if path in {*self.overridden, *self.document.lines, *laid}]
        written.sort(key=lambda path: (path not in self.overridden, path in self.document.files))
        by_others = "; ".join(laid.values())
        if written and written[0] in laid:
            return 0, f"{by_others}: {text}"
        return self._at(written[0] if written else section, f"{text} ({by_others})" if laid else text)

    def _laid_over(self, path: KeyPath) -> str | None:
        """Return what has set a key in place of the file, unless an override has set it again."""
        is_overridden = path in self.overridden or (*path, "kind") in self.overridden
        return None if is_overridden else self.document.laid_over.get(path)

    def _key_named(self, section: KeyPath, word: KeyPath) -> KeyPath | None:
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
                return line, f"{self.document.files.get(written, self.document.name)}:{line}: {text}"
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
