"""A worker without engine, network or clock, for tests of the coordinator: what it decodes is a function of the sample."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rollover.engine.base import GenerateRequest
from rollover.swarm.coordinator.machine.calls.sample_keys import SampleKeys
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.coordinator.machine.placing.rule import Crowd
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Abort,
    Ack,
    Adopt,
    Assign,
    CallFailed,
    Decoded,
    FromCoordinator,
    FromWorker,
    Head,
    HeldCall,
    Hello,
    Ready,
    Release,
    Serving,
    Welcome,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from rollover.types import SamplingParams

VOCAB = 1000
LENGTH = 40
TTL_S = 15.0
SECRET = b"of the run"
KEYS = SampleKeys(SECRET)


def coordinator(**changes: Any) -> Coordinator:
    run = RunIdentity(run_id="run", run_epoch=1, vocab_size=VOCAB, max_context_tokens=64)
    return Coordinator(run, head(0), **{"ttl_s": TTL_S, "exact": False, "checks": False, "secret": SECRET, **changes})


def plain(sample_key: str) -> str:
    """Return a sample key without its seal."""
    return sample_key.partition("~")[0]


def token_at(sample_key: str, position: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{sample_key}/{position}".encode(), digest_size=2).digest(), "big") % VOCAB


def response(sample_key: str, start: int = 0, end: int = LENGTH) -> tuple[int, ...]:
    return tuple(token_at(sample_key, i) for i in range(start, end))


def head(version: int, epoch: int = 1) -> Head:
    """The publication of a version by one start of the run; a manifest names its epoch."""
    return Head(version=version, manifest=hashlib.sha256(f"manifest {epoch} {version}".encode()).hexdigest())


def ready(**changes: Any) -> Ready:
    engine: dict[str, Any] = {"max_running": 4, "max_context_tokens": 64, "seeded": True, "number_format": "float32"}
    return Ready(**engine | changes)


def request(
    sample: str,
    call: int = 0,
    *,
    num_done: int = 0,
    least_version: int = 0,
    due_version: int | None = None,
    journaled: bool = True,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{sample}#{call}.",
        sample_key=f"{sample}.",
        prompt_key="p.",
        prompt_ids=(1, 2),
        response_ids=response(f"{sample}.", 0, num_done),
        params=SamplingParams(max_new_tokens=LENGTH),
        seed=0,
        least_version=least_version,
        due_version=due_version,
        is_journaled=journaled,
    )


def assert_crowd_is_current(hub: Coordinator) -> None:
    """The placing rule was told of every change."""
    assignments = hub._assignments
    able = [m for m in hub.members.values() if m.serves(checked=hub.checks) is not None]
    assert assignments.max_running == sum(m.ready.max_running for m in able if m.ready is not None)
    fresh, crowd = Crowd(), assignments._crowd
    for member in able:
        fresh.put(member.name, member.facts(checked=hub.checks))
    assert (crowd.facts, crowd.free, crowd.by_speed) == (fresh.facts, fresh.free, fresh.by_speed)
    assert crowd.drain_s(1.0) == fresh.drain_s(1.0)


@dataclass
class ModelCall:
    """A call as a worker remembers it: tokens before ``acked`` are forgotten."""

    call_id: str
    told: str
    """The sample's key, as the worker was told it."""
    start: int
    """Where the call began."""
    end: int
    acked: int
    sent: int
    least_version: int
    versions: dict[int, int] = field(default_factory=dict)
    """Version by position."""
    is_over: bool = False
    is_aborted: bool = False
    is_end_sent: bool = False

    @property
    def sample_key(self) -> str:
        return plain(self.told)


@dataclass
class ModelWorker:
    """Speaks the worker's side of the protocol."""

    name: str
    room: int = 4
    version: int = 0
    lease: int = 0
    served: dict[int, Head] = field(default_factory=dict)
    calls: dict[str, ModelCall] = field(default_factory=dict)
    run_id: str = ""
    run_epoch: int = 0
    keeps_kv: bool = False

    def hello(self) -> Hello:
        held = tuple(
            HeldCall(call_id=c.call_id, sample_key=c.told, start=c.acked, end=c.end, is_running=not c.is_over)
            for c in self.calls.values()
        )
        return Hello(
            protocols=(PROTOCOL,),
            software="model",
            run_id=self.run_id,
            run_epoch=self.run_epoch,
            served=tuple(self.served.values()),
            held=held,
        )

    def start(self, welcome: Welcome) -> list[FromWorker]:
        self.lease, self.run_id, self.run_epoch = welcome.lease, welcome.run_id, welcome.run_epoch
        if not self.served:
            self.version = welcome.head.version
            self.served[self.version] = welcome.head
        return [ready(max_running=self.room, keeps_kv=self.keeps_kv), self.serving()]

    def serving(self) -> Serving:
        return Serving(version=self.version, manifest=self.served[self.version].manifest)

    def change(self, new: Head) -> Serving:
        self.version, self.served[new.version] = new.version, new
        return self.serving()

    def got(self, message: FromCoordinator) -> list[FromWorker]:
        match message:
            case Welcome():
                return self.start(message)
            case Assign() if message.call_id not in self.calls:
                start = len(unpack_ids(message.response_ids))
                assert unpack_ids(message.response_ids) == response(plain(message.sample_key), 0, start)
                self.calls[message.call_id] = ModelCall(
                    message.call_id, message.sample_key, start, start, start, start, message.least_version
                )
            case Adopt():
                call = self.calls.pop(message.held, None)
                if call is None or not call.acked <= message.offset <= call.end:
                    return [CallFailed(call_id=message.call_id, reason="it is not held any more")]
                prefix = pack_ids(response(call.sample_key, 0, message.offset))
                assert hashlib.sha256(prefix).hexdigest() == message.prefix
                call.call_id, call.sent = message.call_id, message.offset
                call.is_aborted = call.is_end_sent = False
                call.is_over = call.end == LENGTH  # one that was stopped goes on
                self.calls[message.call_id] = call
            case Abort(call_ids=call_ids):
                for call_id in call_ids:
                    if call_id in self.calls:
                        self.calls[call_id].is_aborted = True
            case Ack(call_id=call_id, offset=offset, is_over=is_over):
                if (call := self.calls.get(call_id)) is not None:
                    call.acked = max(call.acked, offset)
                    if is_over:
                        del self.calls[call_id]
            case Release(call_ids=call_ids):
                for call_id in call_ids:
                    self.calls.pop(call_id, None)
            case _:
                pass
        return []

    def decode(self, call_id: str, num_tokens: int) -> None:
        call = self.calls[call_id]
        if call.is_over or self.version < call.least_version:
            return
        for position in range(call.end, min(LENGTH, call.end + num_tokens)):
            call.versions[position] = self.version
        call.end = min(LENGTH, call.end + num_tokens)
        call.is_over = call.end == LENGTH

    def send(self, call_id: str) -> list[Decoded]:
        """What was decoded since the last time, one message for each version."""
        call, out = self.calls[call_id], []
        while call.sent < call.end:
            version, stop = call.versions[call.sent], call.sent + 1
            while stop < call.end and call.versions[stop] == version:
                stop += 1
            out.append(self.piece(call, call.sent, stop, version))
            call.sent = stop
        if not call.is_end_sent and (call.is_over or call.is_aborted):
            if not (out and out[-1].finish_reason):
                out.append(self.piece(call, call.end, call.end, self.version, None if call.is_over else "abort"))
            call.is_over = call.is_end_sent = True
        return out

    def piece(self, call: ModelCall, start: int, stop: int, version: int, reason: str | None = None) -> Decoded:
        return Decoded(
            call_id=call.call_id,
            offset=start,
            token_ids=pack_ids(response(call.sample_key, start, stop)),
            logprobs=pack_logprobs([-0.5] * (stop - start)),
            version=version,
            kv_version=version,
            finish_reason=reason or ("length" if stop == LENGTH else None),  # type: ignore[arg-type]
        )
