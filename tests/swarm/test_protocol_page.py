"""The page of the protocol names every message and every field of it, and the golden conversation still reads the same."""

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


GOLDEN = [
    (0, messages.Hello(protocols=(1,), software="rollover 0.2.0")),
    (
        3,
        messages.Decoded(
            call_id="a#1.",
            offset=2,
            token_ids=messages.pack_ids([5, 70000]),
            logprobs=messages.pack_logprobs([-0.5, -1.25]),
            version=7,
            kv_version=7,
            finish_reason="stop",
        ),
    ),
    (3, messages.Ack(call_id="a#1.", offset=4)),
]
HEX = [
    "0082a56c6561736500a76d65737361676587a474797065a568656c6c6fa970726f746f636f6c739101a8736f667477617265ae726f6c6c6f76"
    "657220302e322e30a672756e5f6964a0a972756e5f65706f636800a673657276656490a468656c6490",
    "0082a56c6561736503a76d6573736167658aa474797065a76465636f646564a763616c6c5f6964a461",
    "0082a56c6561736503a76d65737361676584a474797065a361636ba763616c6c5f6964a46123312ea66f666673657404a769735f6f766572c2",
]


def test_a_recorded_conversation_reads_the_same_for_ever() -> None:
    frames = [messages.encode(lease, message).hex() for lease, message in GOLDEN]
    assert frames[0] == HEX[0] and frames[2] == HEX[2] and frames[1].startswith(HEX[1])
    assert messages.decode_up(bytes.fromhex(frames[1])).message == GOLDEN[1][1]
