"""A conversation of a worker with the real coordinator, frame by frame, as a file that keeps the protocol as it is.

    python -m tests.swarm.conversation     # records it anew, after a change of the protocol that is meant

``conversation.json`` is a list of what happens, in order. A frame has ``from``, ``frame`` (hexadecimal) and ``body``, the
same as JSON, in which bytes are ``{"hex": ...}``; an event tells what else the coordinator was told, and what time it is.
Whoever writes a worker in another language can read from it what is said when, and test a codec against it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from rollover.engine.base import GenerateRequest
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect, Send
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    CallFailed,
    Decoded,
    FromWorker,
    Head,
    Heartbeat,
    HeldCall,
    Hello,
    Leaving,
    NotServing,
    Ready,
    Serving,
    decode_up,
    encode,
    pack_ids,
    pack_logprobs,
)
from rollover.types import SamplingParams

FILE = Path(__file__).with_name("conversation.json")
TOLD = SampleKeys(bytes(32)).sealed("laptop", "g4.1.")
HEADS = [Head(version=version, manifest=f"{version + 1:x}" * 64) for version in range(3)]


class Conversation:
    """A coordinator to which is said what the file says, and what it answers."""

    def __init__(self) -> None:
        run = RunIdentity(run_id="runs/sums", run_epoch=2, vocab_size=50000, max_context_tokens=4096)
        self.hub = Coordinator(
            run, HEADS[0], ttl_s=15.0, exact=False, checks=False, blob_urls=("https://relay/blobs",), secret=bytes(32)
        )

    def frame(self, frame: bytes, now_s: float) -> list[bytes]:
        """A worker has sent ``frame``. Returns the frames that go back."""
        envelope = decode_up(frame)
        if isinstance(envelope.message, Hello):
            return self._sent(self.hub.connected("laptop", envelope.message, now_s))
        return self._sent(self.hub.received(envelope.lease, envelope.message, now_s))

    def event(self, event: dict[str, Any], now_s: float) -> list[bytes]:
        """The trainer's side, or time, has done something."""
        match event:
            case {"opened": request}:
                return self._sent(self.hub.opened(_request(**request)))
            case {"aborted": call_ids}:
                return self._sent(self.hub.aborted(call_ids))
            case {"cut": call_ids}:
                return self._sent(self.hub.cut(call_ids))
            case {"journaled": [sample_key, num_tokens]}:
                return self._sent(self.hub.journaled(sample_key, num_tokens))
            case {"published": version}:
                return self._sent(self.hub.published(HEADS[version], now_s))
            case {"disconnected": lease}:
                return self._sent(self.hub.disconnected(lease, now_s))
            case _:
                raise AssertionError(event)

    def _sent(self, effects: list[Effect]) -> list[bytes]:
        return [encode(effect.lease, effect.message) for effect in effects if isinstance(effect, Send)]


def opened(frame: bytes) -> bytes:
    """Return the body of a frame: versions of zstd may compress it to other bytes."""
    if frame[:1] == b"\x00":
        return frame[1:]
    return zstandard.ZstdDecompressor().decompress(frame[1:], max_output_size=MAX_FRAME_BYTES)


def readable(frame: bytes) -> Any:
    """Return the body of a frame as JSON can hold it."""

    def plain(value: Any) -> Any:
        match value:
            case bytes():
                return {"hex": value.hex()}
            case dict():
                return {key: plain(each) for key, each in value.items()}
            case list():
                return [plain(each) for each in value]
            case _:
                return value

    return plain(msgspec.msgpack.decode(opened(frame)))


def _request(sample: str, call: int, num_done: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"8f3a.{sample}#{call}.",
        sample_key=f"{sample}.",
        prompt_key="p4.",
        prompt_ids=(5, 70, 49999),
        response_ids=tuple(range(100, 100 + num_done)),
        params=SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(2,)),
        seed=11,
        is_journaled=True,
    )


def _decoded(call: str, offset: int, num: int, *, version: int = 0, reason: Any = None) -> Decoded:
    ids = list(range(100 + offset, 100 + offset + num))
    return Decoded(
        call_id=f"8f3a.{call}.",
        offset=offset,
        token_ids=pack_ids(ids),
        logprobs=pack_logprobs([-0.5 - i / 4 for i in range(num)]),
        version=version,
        kv_version=version,
        finish_reason=reason,
    )


READY = Ready(max_running=4, max_context_tokens=4096, seeded=True, number_format="bfloat16")
HELLO = Hello(protocols=(PROTOCOL,), software="rollover 0.2.0")
SCRIPT: list[tuple[float, int, FromWorker | dict[str, Any]]] = [
    (0.0, 0, HELLO),
    (1.0, 1, READY),
    (1.0, 1, NotServing(version=0, reason="blob 9c1e... has another content than its name says")),
    (2.0, 1, Serving(version=0, manifest=HEADS[0].manifest, prepare_s=1.5, pause_s=0.25, wire_bytes=81264640)),
    (3.0, 1, {"opened": {"sample": "g4.1", "call": 7}}),
    (3.0, 1, {"opened": {"sample": "g4.2", "call": 8, "num_done": 2}}),
    (3.0, 1, {"opened": {"sample": "g4.3", "call": 9}}),
    (4.0, 1, _decoded("g4.1#7", 0, 3)),
    (4.0, 1, _decoded("g4.2#8", 2, 1)),
    (4.5, 1, {"journaled": ["g4.1.", 3]}),
    (5.0, 1, {"published": 1}),
    (5.0, 1, Heartbeat(number=1, num_running=3, tokens_per_s=42.5, mean_running=1.5, num_held=3)),
    (10.0, 1, Heartbeat(number=2, num_running=3, tokens_per_s=42.5, mean_running=2.0, num_held=1)),
    (10.5, 1, _decoded("g4.2#8", 3, 2)),
    (11.0, 1, Serving(version=1, manifest=HEADS[1].manifest, prepare_s=4.1, pause_s=0.3, wire_bytes=1048576)),
    (11.5, 1, _decoded("g4.1#7", 3, 2, version=1)),
    (12.0, 1, {"aborted": ["8f3a.g4.2#8."]}),
    (12.5, 1, _decoded("g4.2#8", 5, 0, version=1, reason="abort")),
    (12.5, 1, {"journaled": ["g4.2.", 5]}),
    (13.0, 1, CallFailed(call_id="8f3a.g4.3#9.", reason="the engine is out of memory")),
    # The connection breaks; the worker is back with what it holds, and goes on behind the last token that arrived.
    (14.0, 1, {"disconnected": 1}),
    (
        16.0,
        0,
        Hello(
            protocols=(PROTOCOL,),
            software="rollover 0.2.0",
            run_id="runs/sums",
            run_epoch=2,
            served=(HEADS[0], HEADS[1]),
            held=(HeldCall(call_id="8f3a.g4.1#7.", sample_key=TOLD, start=3, end=7, is_running=True),),
        ),
    ),
    (16.0, 2, READY),
    (16.0, 2, Serving(version=1, manifest=HEADS[1].manifest)),
    (17.0, 2, _decoded("g4.1#7", 5, 3, version=1, reason="length")),
    (17.5, 2, {"journaled": ["g4.1.", 8]}),
    (18.0, 2, {"opened": {"sample": "g4.2", "call": 10, "num_done": 5}}),
    (18.5, 2, {"cut": ["8f3a.g4.2#10."]}),
    (19.0, 2, Leaving(reason="stopped by its user")),
    # Another time it sends tokens that are not the next ones: its connection ends, and it may come back.
    (20.0, 0, HELLO),
    (20.0, 3, READY),
    (20.0, 3, Serving(version=1, manifest=HEADS[1].manifest)),
    (21.0, 3, {"opened": {"sample": "g4.4", "call": 11}}),
    (22.0, 3, _decoded("g4.4#11", 2, 2, version=1)),
]


def record() -> list[dict[str, Any]]:
    """Hold the conversation. Returns what the file holds."""
    conversation, lines = Conversation(), []
    for now_s, lease, said in SCRIPT:
        if isinstance(said, dict):
            lines.append({"time_s": now_s, "event": said})
            answers = conversation.event(said, now_s)
        else:
            frame = encode(lease, said)
            lines.append({"time_s": now_s, "from": "worker", "frame": frame.hex(), "body": readable(frame)})
            answers = conversation.frame(frame, now_s)
        for answer in answers:
            lines.append({"from": "coordinator", "frame": answer.hex(), "body": readable(answer)})
    return lines


def main() -> None:
    FILE.write_text("[\n" + ",\n".join(json.dumps(line) for line in record()) + "\n]\n")


if __name__ == "__main__":
    main()
