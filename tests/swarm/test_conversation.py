"""The recorded conversation: both sides' frames read and write the same, and the coordinator gives the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from rollover.swarm.wire import messages
from rollover.swarm.wire.messages import decode_down, decode_up, encode
from tests.swarm.conversation import FILE, Conversation, opened, readable

LINES: list[dict[str, Any]] = json.loads(FILE.read_text())
FRAMES = [line for line in LINES if "frame" in line]


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_a_frame_is_decoded_and_encoded_to_the_same_bytes(number: int) -> None:
    line = FRAMES[number]
    frame = bytes.fromhex(line["frame"])
    envelope = decode_up(frame) if line["from"] == "worker" else decode_down(frame)
    again = encode(envelope.lease, envelope.message)
    assert (again[:1], opened(again)) == (frame[:1], opened(frame))
    assert readable(frame) == line["body"]


def test_the_coordinator_answers_as_it_was_recorded() -> None:
    conversation, lines = Conversation(), iter(LINES)
    for answers, line in _turns(lines):
        if "event" in line:
            given = conversation.event(line["event"], line["time_s"])
        else:
            given = conversation.frame(bytes.fromhex(line["frame"]), line["time_s"])
        assert [opened(frame) for frame in given] == [opened(bytes.fromhex(answer)) for answer in answers], line


def _turns(lines: Iterator[dict[str, Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield what is said to the coordinator, with the frames that it answers."""
    said: dict[str, Any] | None = None
    answers: list[str] = []
    for line in lines:
        if line.get("from") == "coordinator":
            answers.append(line["frame"])
            continue
        if said is not None:
            yield answers, said
        said, answers = line, []
    assert said is not None
    yield answers, said


def test_every_message_of_the_protocol_is_in_it() -> None:
    every = {m.__struct_config__.tag for m in (*get_args(messages.FromWorker), *get_args(messages.FromCoordinator))}
    assert {line["body"]["message"]["type"] for line in FRAMES} == every
