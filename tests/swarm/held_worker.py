"""A worker without engine, network or clock, around what a worker really holds: for tests of lost messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollover.engine.base import Chunk
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Adopt,
    Assign,
    Beat,
    CallFailed,
    FromCoordinator,
    FromWorker,
    Head,
    Heartbeat,
    Hello,
    Release,
    Serving,
    Welcome,
)
from rollover.swarm.worker.held import HeldCalls, ServedHeads
from rollover.swarm.worker.held_stream import HeldStream, StreamEnding
from rollover.types import FinishReason
from tests.swarm.kit import LENGTH, plain, ready, response


@dataclass
class Decoding:
    """A call that is decoded."""

    stream: HeldStream
    is_aborted: bool = False


@dataclass
class HeldWorker:
    """Decodes calls whose tokens are a function of the sample, and does with messages what ``WorkerCalls`` does."""

    name: str
    room: int = 2
    lease: int = 0
    run_id: str = ""
    held: HeldCalls = field(default_factory=lambda: HeldCalls(10**6))
    serves: Head | None = None
    newest: Head | None = None
    running: dict[str, Decoding] = field(default_factory=dict)
    num_heartbeats: int = 0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.served = ServedHeads(self.held)

    def hello(self) -> Hello:
        served, held = self.served.needed(), self.held.listed()
        return Hello(protocols=(PROTOCOL,), software="held", run_id=self.run_id, served=served, held=held)

    def welcomed(self, welcome: Welcome) -> list[FromWorker]:
        self.lease, self.run_id, self.num_heartbeats = welcome.lease, welcome.run_id, 0
        self.held.connected(self.now_s)
        self.newest = welcome.head
        if self.serves is None:
            self.serves = welcome.head
            self.served.add(welcome.head)
        return [ready(max_running=self.room), Serving(version=self.serves.version, manifest=self.serves.manifest)]

    def change(self) -> list[FromWorker]:
        """Serve the newest version that was announced."""
        assert self.newest is not None and self.serves is not None
        if self.newest.version <= self.serves.version:
            return []
        self.serves = self.newest
        self.served.add(self.serves)
        return [Serving(version=self.serves.version, manifest=self.serves.manifest)]

    def heartbeat(self) -> Heartbeat:
        self.num_heartbeats += 1
        return Heartbeat(
            number=self.num_heartbeats,
            num_running=len(self.running),
            tokens_per_s=1.0,
            mean_running=float(len(self.running)),
            num_held=self.held.num_tokens,
        )

    def got(self, message: FromCoordinator) -> list[FromWorker]:
        match message:
            case Assign():
                self.running[message.call_id] = Decoding(self.held.open(message))
            case Adopt():
                return self.adopt(message)
            case Abort(call_ids=call_ids):
                for call_id in call_ids:
                    if call_id in self.running:
                        self.running[call_id].is_aborted = True
            case Ack(call_id=call_id, offset=offset, is_over=is_over):
                self.held.acked(call_id, offset)
                if is_over:
                    self.release((call_id,))
            case Release(call_ids=call_ids):
                self.release(call_ids)
            case Head():
                self.aim(message)
            case Beat(head=head):
                self.aim(head)
                self.release(tuple(self.held.expired(self.now_s)))
            case _:
                pass
        return []

    def adopt(self, adopt: Adopt) -> list[FromWorker]:
        answer = self.held.adopt(adopt)
        if isinstance(answer, CallFailed):
            self.running.pop(adopt.held, None)
            return [answer]
        if (call := self.running.pop(adopt.held, None)) is not None:
            self.running[adopt.call_id] = call
            call.is_aborted = False
        elif answer.ending is None and answer.call_id not in self.running:
            self.running[answer.call_id] = Decoding(answer)
        return []

    def release(self, call_ids: tuple[str, ...]) -> None:
        self.held.release(call_ids)
        for call_id in call_ids:
            self.running.pop(call_id, None)

    def aim(self, head: Head) -> None:
        if self.newest is None or head.version > self.newest.version:
            self.newest = head

    def decode(self, num_tokens: int) -> None:
        assert self.serves is not None, "calls come behind a welcome"
        for call_id, call in list(self.running.items()):
            stream, assign = call.stream, call.stream.assign
            version = self.serves.version
            may_decode = version >= assign.least_version and not call.is_aborted
            if num := min(num_tokens, LENGTH - stream.end) if may_decode else 0:
                ids = response(plain(assign.sample_key), stream.end, stream.end + num)
                chunk = Chunk(token_ids=ids, logprobs=(-0.5,) * num, policy_version=version, kv_version=version)
                self.held.decoded(stream, chunk)
            reason = FinishReason.LENGTH if stream.end == LENGTH else FinishReason.ABORT if call.is_aborted else None
            if reason is not None:
                self.held.ended(stream, StreamEnding(reason=reason, version=version))
                del self.running[call_id]

    def outgoing(self) -> list[FromWorker]:
        out: list[FromWorker] = []
        while (message := self.held.next_message()) is not None:
            out.append(message)
        return out
