"""A session over NATS between two channels: what a bad way does to it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.swarm.nats.sealed import (
    HEADER_BYTES,
    PART_BYTES,
    WINDOW_BYTES,
    SealedChannel,
    SequenceBroken,
    SessionKeys,
)
from rollover.swarm.wire.messages import MAX_FRAME_BYTES, ProtocolError

HASH = bytes(range(32)).hex()
KEYS = SessionKeys.of(HASH, "rollover.worker.a.x", "rollover.session.y")


def pair(part_bytes: int = PART_BYTES) -> tuple[SealedChannel, SealedChannel]:
    """The worker's side and the coordinator's."""
    return (
        SealedChannel(sending=KEYS.up, receiving=KEYS.down, part_bytes=part_bytes),
        SealedChannel(sending=KEYS.down, receiving=KEYS.up, part_bytes=part_bytes),
    )


def took(channel: SealedChannel, message: bytes) -> list[bytes]:
    """Deliver a message and deal with its frame at once."""
    taken = channel.take(message)
    if taken is None:
        return []
    channel.consumed(taken[1])
    return [taken[0]]


def exchanged(sender: SealedChannel, receiver: SealedChannel) -> list[bytes]:
    """Deliver until nothing is left to send, and return the frames that came."""
    frames: list[bytes] = []
    while True:
        messages = [*sender.outgoing()]
        for message in messages:
            frames += took(receiver, message)
        answers = [*receiver.outgoing()]
        for answer in answers:
            assert sender.take(answer) is None
        if not messages and not answers:
            return frames


def test_frames_of_any_size_come_as_they_went() -> None:
    a, b = pair()
    random = Random(5)
    frames = [random.randbytes(size) for size in (0, 1, PART_BYTES, PART_BYTES + 1, 5 * WINDOW_BYTES, 7)]
    for frame in frames:
        a.put(frame)
    assert exchanged(a, b) == frames
    assert a.is_drained and a.num_waiting_bytes == 0


def test_no_more_than_a_window_is_on_the_way_until_some_was_dealt_with() -> None:
    a, b = pair()
    for _ in range(20):
        a.put(bytes(PART_BYTES))
    first = [*a.outgoing()]
    assert WINDOW_BYTES <= sum(map(len, first)) <= WINDOW_BYTES + PART_BYTES + HEADER_BYTES
    taken = [b.take(message) for message in first]
    assert [*a.outgoing()] == [] and [*b.outgoing()] == [], "what has come but is not dealt with gives no room"
    for each in taken:
        assert each is not None
        b.consumed(each[1])
    (told,) = b.outgoing()
    assert a.take(told) is None
    assert len([*a.outgoing()]) == len(first)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 500), min_size=1, max_size=30),
    faults=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(("drop", "double", "swap", "alter", "add"))), max_size=4
    ),
    seed=st.integers(0, 2**32),
)
def test_whatever_becomes_of_messages_frames_come_in_order_or_the_session_ends(
    sizes: list[int], faults: list[tuple[int, str]], seed: int
) -> None:
    random = Random(seed)
    a, b = pair(part_bytes=64)
    frames = [random.randbytes(size) for size in sizes]
    for frame in frames:
        a.put(frame)
    messages = [*a.outgoing()]
    for place, fault in faults:
        i = place % len(messages)
        match fault:
            case "drop" if len(messages) > 1:
                del messages[i]
            case "double":
                messages.insert(random.randrange(i, len(messages)) + 1, messages[i])
            case "swap":
                j = random.randrange(len(messages))
                messages[i], messages[j] = messages[j], messages[i]
            case "alter":
                k = random.randrange(len(messages[i]))
                messages[i] = (
                    messages[i][:k] + bytes([messages[i][k] ^ (1 << random.randrange(8))]) + messages[i][k + 1 :]
                )
            case "add":
                messages.insert(i, random.randbytes(random.randrange(80)))
    came: list[bytes] = []
    try:
        for message in messages:
            came += took(b, message)
    except SequenceBroken:
        pass
    assert came == frames[: len(came)]


def test_what_is_lost_is_noticed_by_the_next_message() -> None:
    a, b = pair()
    for frame in (b"one", b"two", b"three"):
        a.put(frame)
    one, _, three = a.outgoing()
    assert took(b, one) == [b"one"]
    with pytest.raises(SequenceBroken, match="1 messages were lost"):
        b.take(three)


def test_messages_of_another_session_direction_or_token_are_ignored() -> None:
    a, b = pair()
    others = [
        SessionKeys.of(HASH, "rollover.worker.a.x", "rollover.session.z"),
        SessionKeys.of(HASH, "rollover.worker.b.x", "rollover.session.y"),
        SessionKeys.of(bytes(32).hex(), "rollover.worker.a.x", "rollover.session.y"),
    ]
    for key in [*(keys.up for keys in others), KEYS.down]:
        stranger = SealedChannel(sending=key, receiving=key)
        stranger.put(b"me too")
        assert [b.take(message) for message in stranger.outgoing()] == [None]
    assert not b.is_authentic
    a.put(b"mine")
    assert exchanged(a, b) == [b"mine"] and b.is_authentic


def test_limits_hold_for_who_knows_the_token_too() -> None:
    a, b = pair()
    a.put(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="a frame of more than"):
        exchanged(a, b)
    liar, c = pair()
    with pytest.raises(ProtocolError, match="are acknowledged, but only 0 were sent"):
        c.take(liar._sealed(b"\x03", (1000).to_bytes(8, "little")))
    assert "up=" not in repr(KEYS)
