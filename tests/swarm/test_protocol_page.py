"""The page of the protocol names every message and every field of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from rollover.swarm.wire import messages

PAGE = (Path(__file__).parents[2] / "docs" / "swarm-protocol.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
MESSAGES = {m.__struct_config__.tag: m for m in (*get_args(messages.FromWorker), *get_args(messages.FromCoordinator))}


def test_the_page_has_a_section_for_each_message_and_no_other() -> None:
    assert SECTIONS.keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_the_page_names_each_field(name: str) -> None:
    fields = {field.name for field in msgspec.structs.fields(MESSAGES[name])}
    if name == "hello":
        fields |= {field.name for field in msgspec.structs.fields(messages.HeldCall)}
    assert {f for f in fields if f"`{f}`" not in SECTIONS[name]} == set()


_WORDS = {int: "integer", float: "number", str: "text", bool: "boolean", bytes: "binary"}


def word(hint: Any) -> str:
    """A type as the page writes it."""
    options = [option for option in get_args(hint) if option not in (type(None), ...)]
    if get_origin(hint) is tuple:
        return f"array of {word(options[0])}"
    if get_origin(hint) is Literal:
        return "text"
    if options:
        return f"{word(options[0])} or nil"
    return _WORDS.get(hint) or f"`{hint.__struct_config__.tag or INNER[hint]}`"


INNER = {messages.HeldCall: "held call"}


def row(name: str, struct: type) -> str:
    hints = get_type_hints(struct)
    keys = (f"`{f.name}`{'' if f.required else '?'} {word(hints[f.name])}" for f in msgspec.structs.fields(struct))
    return f"| `{name}` | {', '.join(keys)} |"


@pytest.mark.parametrize(("name", "struct"), [*MESSAGES.items(), *((name, struct) for struct, name in INNER.items())])
def test_the_page_gives_the_type_of_each_key_and_if_it_is_optional(name: str, struct: type) -> None:
    assert row(name, struct) in PAGE


def test_limits_and_names_are_those_of_the_code() -> None:
    assert messages.SUBPROTOCOL in PAGE
    assert f"{messages.MAX_FRAME_BYTES // 2**20} MiB" in PAGE
    assert f"at\nmost {messages.MAX_HELD_CALLS:,}," in SECTIONS["hello"]
    assert f"at most {messages.MAX_SERVED}," in SECTIONS["hello"]
    assert f"speaks, at most {messages.MAX_PROTOCOLS}." in SECTIONS["hello"]
    assert f"at most {messages.MAX_RUNNING:,}." in SECTIONS["ready"]
    for section in ("hello", "ready"):
        assert f"at most {messages.MAX_NAME_CHARACTERS} characters" in " ".join(SECTIONS[section].split())
