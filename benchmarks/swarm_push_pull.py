"""Push-pull training by a swarm in virtual time, for ``swarm_dispatch.py``.

The scheduler, the strategy, the ledger and the coordinator are those of production, and take every decision. The
members, their links, the trainer and the rewards are models; no message is lost. A member decodes each of its calls at
a speed of its own, reports with every heartbeat what it has decoded, and fetches a version when it hears of it while it
decodes on. One that leaves takes its unreported tokens with it, and fetches the weights afresh when it returns.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollover.batch import Batch
from rollover.engine.base import FirstCall
from rollover.garbage import rare_collections
from rollover.rollout.actions import ConsumeBatch, StartSample
from rollover.rollout.config import Limits
from rollover.rollout.events import CheckpointSaved
from rollover.rollout.generation import generation_request, sample_key
from rollover.rollout.scheduler import Scheduler
from rollover.rollout.state import RolloutState
from rollover.rollout.strategies.bounded_async import BoundedAsync
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Changed, Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.coordinator.machine.placing.rule import CallFacts, Crowd
from rollover.swarm.wire.messages import (
    PROTOCOL,
    Ack,
    Assign,
    Decoded,
    FromCoordinator,
    FromWorker,
    Head,
    Heartbeat,
    Hello,
    Ready,
    Release,
    Serving,
    Welcome,
    unpack_ids,
)
from rollover.types import FinishReason, Prompt, SampleId, SamplingParams, Segment

LEASE_S, BEAT_S, KEEP_S = 30.0, 10.0, 2.0
"""A lease; between two heartbeats; between two looks at leases and slow members."""
PREFILL = 100.0
"""Times as fast as it decodes, a member reads the response so far of a call that goes on with it."""
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How calls are assigned to members."""

    by_speed: bool = True
    """By the rule; else to the member with the least calls for its room."""
    has_deadlines: bool = True
    """The rule is told when a response is due."""
    moves: bool = True
    """Calls are taken from slow members where faster ones have nothing to do."""


DEALINGS = {
    "even": Dealing(by_speed=False, has_deadlines=False, moves=False),
    "even, with moves": Dealing(by_speed=False, has_deadlines=False),
    "rule without deadlines": Dealing(has_deadlines=False),
    "rule": Dealing(),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is trained."""

    groups: int
    """In a batch."""
    max_staleness: int
    train_s: float
    """Seconds for which the trainer has a batch."""
    until_s: float
    from_s: float
    """Before this nothing is counted."""
    limit: int
    """Tokens of a response at most."""
    up_s: float
    down_s: float
    """Mean times for which a member stays and stays away."""


@dataclass
class Call:
    sample_key: str
    start: int
    begins_s: float
    """When its first token is begun."""
    length: int
    """Of the response, with what it had before this call."""
    sent: int


@dataclass
class Worker:
    """A model of a member."""

    name: str
    speed: float
    """Tokens per second of each call."""
    room: int
    fetch_s: float
    rng: random.Random
    lease: int = 0
    """0 while it is away."""
    version: int = -1
    """-1 before it has any weights."""
    newest: Head = field(default_factory=lambda: Head(version=-1, manifest=""))
    is_fetching: bool = False
    calls: dict[str, Call] = field(default_factory=dict)
    num_beats: int = 0
    beaten_s: float = 0.0
    counted_s: float = 0.0
    call_s: float = 0.0
    num_decoded: int = 0
    """Since the last heartbeat, as ``call_s``, the calls it had times seconds, up to ``counted_s``."""

    def count(self, now_s: float) -> None:
        self.call_s += len(self.calls) * (now_s - self.counted_s)
        self.counted_s = now_s

    def pieces(self, now_s: float, call_ids: Iterable[str], *, ended: bool = False) -> list[FromWorker]:
        """What it has decoded of these calls and not yet sent."""
        out: list[FromWorker] = []
        for call_id in call_ids:
            call = self.calls[call_id]
            since_s = max(0.0, now_s - call.begins_s)
            # The last token is sent with the end of the response.
            end = call.length if ended else min(call.length - 1, call.start + int(since_s * self.speed))
            if end > call.sent:
                zeros = bytes(4 * (end - call.sent))
                out.append(
                    Decoded(
                        call_id=call_id,
                        offset=call.sent,
                        token_ids=zeros,
                        logprobs=zeros,
                        version=self.version,
                        kv_version=self.version,
                        finish_reason="stop" if ended else None,
                    )
                )
                self.num_decoded += end - call.sent
                call.sent = end
        return out

    def heartbeat(self, now_s: float) -> Heartbeat:
        self.count(now_s)
        elapsed_s, self.num_beats = now_s - self.beaten_s, self.num_beats + 1
        beat = Heartbeat(
            number=self.num_beats,
            num_running=len(self.calls),
            tokens_per_s=self.num_decoded / elapsed_s,
            mean_running=self.call_s / elapsed_s,
            num_held=0,
        )
        self.beaten_s, self.call_s, self.num_decoded = now_s, 0.0, 0
        return beat


@dataclass
class _Open:
    """A call as the driver has it: tokens of one version that are not in the ledger yet."""

    sample_id: SampleId
    start_s: float
    version: int = 0
    num_tokens: int = 0


class _Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=str(index), token_ids=(1,), text="", source="")


class PushPull:
    """One run of a swarm that trains in push-pull mode."""

    def __init__(self, workers: Sequence[Worker], load: Load, dealing: Dealing, seed: int) -> None:
        self.workers, self.load, self.dealing, self.seed = workers, load, dealing, seed
        self.now_s = 0.0
        self.agenda: list[tuple[float, int, str, Any]] = []
        self.serial = 0
        identity = RunIdentity(run_id="run", run_epoch=1, vocab_size=2 * load.limit, max_context_tokens=2 * load.limit)
        self.hub = Coordinator(identity, _head(0), ttl_s=LEASE_S, exact=False, checks=False)
        if not dealing.by_speed:
            self.hub._assignments._choose = _evenly(self.hub._assignments._crowd)  # type: ignore[assignment, method-assign]
        self.by_lease: dict[int, Worker] = {}
        state = RolloutState()
        self.ledger = state.ledger
        self.strategy = BoundedAsync(
            batch_size=load.groups,
            group_size=GROUP_SIZE,
            max_staleness=load.max_staleness,
            num_running=sum(worker.room for worker in workers),
        )
        self.scheduler = Scheduler(
            strategy=self.strategy,
            source=_Prompts(),
            state=state,
            max_running=0,
            limits=Limits(),
            placement=self,
        )
        self.sampling = SamplingParams(max_new_tokens=load.limit)
        self.open: dict[str, _Open] = {}
        self.num_calls = 0
        self.is_training = False
        self.steps_s: list[float] = []
        """When each batch was handed out."""
        self.held_up_s = self.idle_s = self.counted_s = 0.0
        self.num_tokens = 0
        self.lag = 0.0

    # -- the places of the scheduler, as the driver has them ------------------------------------------------------

    def room(self) -> int:
        return self.hub.max_running

    def _first_call(self, least_version: int, num_waiting: int) -> FirstCall:
        max_staleness = self.load.max_staleness if self.dealing.has_deadlines else None
        return FirstCall(least_version, self.load.limit, num_waiting, max_staleness)

    def takes_one(self, least_version: int, num_waiting: int) -> bool:
        return self.hub.takes_one(self._first_call(least_version, num_waiting))

    def reserve(self, sample_id: SampleId, least_version: int, num_waiting: int) -> int | None:
        call = self._first_call(least_version, num_waiting)
        return self.hub.reserve(sample_key(sample_id), call, until_s=self.now_s + 60.0)

    # -- time -----------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, kind: str, what: Any) -> None:
        self.serial += 1
        heapq.heappush(self.agenda, (self.now_s + delay_s, self.serial, kind, what))

    def run(self) -> dict[str, float]:
        """Train until the end of the load. Returns what was trained, and what was lost by waiting."""
        self.hub.published(_head(0), 0.0)
        self.scheduler.begin_round()
        for worker in self.workers:
            self._comes(worker)
        self.at(KEEP_S, "keep", None)
        happen: dict[str, Callable[[Any], None]] = {
            "beat": self._beat,
            "ends": self._ends,
            "fetched": self._fetched,
            "keep": self._keep,
            "trained": self._trained,
            "comes": self._comes,
            "leaves": self._leaves,
        }
        with rare_collections(1_000_000):
            while self.agenda[0][0] <= self.load.until_s:
                at_s, _, kind, what = heapq.heappop(self.agenda)
                self._count(at_s)
                self.now_s = at_s
                happen[kind](what)
        self.ledger.check()
        return self._found()

    def _count(self, until_s: float) -> None:
        """Add up what is true until the next event."""
        since_s = max(self.counted_s, self.load.from_s)
        self.counted_s = until_s
        if until_s <= since_s:
            return
        if not self.is_training and len(self.ledger.ready) >= self.load.groups:
            self.held_up_s += until_s - since_s
        self.idle_s += (until_s - since_s) * (1 - self.hub.num_running / max(1, self.hub.max_running))

    def _found(self) -> dict[str, float]:
        seconds = self.load.until_s - self.load.from_s
        steps = [at_s for at_s in self.steps_s if at_s >= self.load.from_s]
        took_s = [b - a for a, b in pairwise([*steps, self.load.until_s])]
        return {
            "groups_per_min": 60 * self.load.groups * len(steps) / seconds,
            "trained_tokens_per_s": self.num_tokens / seconds,
            "longest_step_s": max(took_s, default=seconds),
            "held_up_share": self.held_up_s / seconds,
            "idle_share": self.idle_s / seconds,
            "mean_lag": self.lag / max(1, len(steps)),
            "moved_calls": self.hub.counters["moved_calls"],
        }

    # -- members --------------------------------------------------------------------------------------------------

    def _comes(self, worker: Worker) -> None:
        worker.version, worker.num_beats, worker.calls, worker.is_fetching = -1, 0, {}, False
        worker.newest = Head(version=-1, manifest="")
        worker.num_decoded, worker.call_s, worker.counted_s, worker.beaten_s = 0, 0.0, self.now_s, self.now_s
        effects = self.hub.connected(worker.name, Hello(protocols=(PROTOCOL,), software="model"), self.now_s)
        worker.lease = self.hub.last_lease
        self.by_lease[worker.lease] = worker
        self._perform(effects)
        context = self.hub.run.max_context_tokens
        self._say(
            worker,
            Ready(max_running=worker.room, max_context_tokens=context, seeded=True, number_format="bfloat16"),
        )
        self.at(worker.rng.expovariate(1 / self.load.up_s), "leaves", worker)
        self.at(worker.rng.uniform(0.1, 1.0) * BEAT_S, "beat", (worker, worker.lease))

    def _leaves(self, worker: Worker) -> None:
        self.at(worker.rng.expovariate(1 / self.load.down_s), "comes", worker)
        lease, worker.lease, worker.calls = worker.lease, 0, {}
        self._perform(self.hub.disconnected(lease, self.now_s))

    def _beat(self, what: tuple[Worker, int]) -> None:
        worker, lease = what
        if worker.lease == lease:
            for piece in worker.pieces(self.now_s, list(worker.calls)):
                self._say(worker, piece)
            self._say(worker, worker.heartbeat(self.now_s))
            self.at(BEAT_S, "beat", what)

    def _ends(self, what: tuple[Worker, str]) -> None:
        worker, call_id = what
        if call_id in worker.calls:
            worker.count(self.now_s)
            for piece in worker.pieces(self.now_s, [call_id], ended=True):
                self._say(worker, piece)

    def _fetch(self, worker: Worker) -> None:
        if not worker.is_fetching and worker.newest.version > worker.version:
            worker.is_fetching = True
            self.at(worker.fetch_s, "fetched", (worker, worker.lease, worker.newest))

    def _fetched(self, what: tuple[Worker, int, Head]) -> None:
        worker, lease, head = what
        if worker.lease != lease:
            return
        for piece in worker.pieces(self.now_s, list(worker.calls)):
            self._say(worker, piece)
        worker.version, worker.is_fetching = head.version, False
        self._say(worker, Serving(version=head.version, manifest=head.manifest, prepare_s=worker.fetch_s))
        self._fetch(worker)

    def _say(self, worker: Worker, message: FromWorker) -> None:
        self._perform(self.hub.received(worker.lease, message, self.now_s))

    def _hears(self, worker: Worker, message: FromCoordinator) -> None:
        match message:
            case Welcome(head=head) | (Head() as head):
                worker.newest = head
                self._fetch(worker)
            case Assign(call_id=call_id):
                worker.count(self.now_s)
                start = len(unpack_ids(message.response_ids))
                length = max(start + 1, self._length(message.sample_key.partition("~")[0]))
                begins_s = self.now_s + start / (PREFILL * worker.speed)
                worker.calls[call_id] = Call(message.sample_key, start, begins_s, length, start)
                self.at(begins_s - self.now_s + (length - start) / worker.speed, "ends", (worker, call_id))
            case Release(call_ids=call_ids):
                worker.count(self.now_s)
                for call_id in call_ids:
                    worker.calls.pop(call_id, None)
            case Ack(call_id=call_id, is_over=True):
                worker.count(self.now_s)
                worker.calls.pop(call_id, None)

    def _length(self, key: str) -> int:
        """Log-normal with a long tail, cut at the limit: median 700, one in 40 at the limit."""
        drawn = random.Random(f"{self.seed}/{key}").lognormvariate(math.log(700), 1.25)
        return min(self.load.limit, max(8, round(drawn)))

    # -- the driver -----------------------------------------------------------------------------------------------

    def _keep(self, _: None) -> None:
        self._perform(self.hub.expire(self.now_s))
        if self.dealing.moves:
            self._perform(self.hub.move_calls(self.now_s))
        self._act()
        self.at(KEEP_S, "keep", None)

    def _perform(self, effects: list[Effect]) -> None:
        has_changed = False
        for effect in effects:
            match effect:
                case Send(lease, message):
                    if (worker := self.by_lease[lease]).lease == lease:
                        self._hears(worker, message)
                case Deliver(call_id, chunk):
                    call = self.open[call_id]
                    if call.num_tokens and call.version != chunk.policy_version:
                        self._segment(call, None)
                    call.version, call.num_tokens = chunk.policy_version, call.num_tokens + len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        self._segment(self.open.pop(call_id), chunk.finish_reason)
                        self.scheduler.scored(call.sample_id, 0.0, self.now_s)
                        has_changed = True
                case Fail(call_id, _):
                    self._segment(self.open.pop(call_id), FinishReason.ABORT)
                    has_changed = True
                case Changed():
                    has_changed = True
        if has_changed:
            self._act()

    def _segment(self, call: _Open, reason: FinishReason | None) -> None:
        tokens = range(call.num_tokens)  # stands for so many tokens
        segment = Segment(call.version, tokens, tokens, reason, call.version, call.start_s, self.now_s)
        self.scheduler.segment_ended(call.sample_id, segment, self.now_s)
        call.num_tokens, call.start_s = 0, self.now_s

    def _act(self) -> None:
        """Do what the scheduler decides, until it decides nothing more."""
        while True:
            is_full = False
            for action in self.scheduler.decide(self.now_s):
                match action:
                    case StartSample():
                        self._start(action)
                    case ConsumeBatch():
                        is_full = True
            if not is_full or self.is_training:
                return
            self.is_training = True
            batch = self.scheduler.consume(self.now_s)
            self.steps_s.append(self.now_s)
            if self.now_s >= self.load.from_s:
                self.num_tokens += batch.num_tokens
                self.lag += sum(batch.step - g.oldest_version for g in batch.groups) / len(batch.groups)
            self.at(self.load.train_s, "trained", batch)

    def _start(self, start: StartSample) -> None:
        self.num_calls += 1
        group = self.ledger.groups[start.sample_id.group]
        assert group.start_version is not None
        request = generation_request(
            self.ledger.sample(start.sample_id).trajectory,
            str(self.num_calls),
            self.sampling,
            self.seed,
            start,
            least_version=group.start_version,
            due_version=group.start_version + self.load.max_staleness if self.dealing.has_deadlines else None,
        )
        self.open[request.request_id] = _Open(start.sample_id, self.now_s, version=group.start_version)
        self._perform(self.hub.opened(request))

    def _trained(self, batch: Batch) -> None:
        version = batch.step + 1
        self.is_training = False
        self.scheduler.published(version, self.now_s, pause_s=0.0)
        self.scheduler.record(CheckpointSaved(time_s=self.now_s, step=version))
        self.scheduler.begin_round()
        self._perform(self.hub.published(_head(version), self.now_s))
        self._act()


def _head(version: int) -> Head:
    return Head(version=version, manifest=f"{version:064x}")


def _evenly(crowd: Crowd) -> Callable[[CallFacts], str | None]:
    """Choose the member with the least calls for its room."""

    def choose(call: CallFacts) -> str | None:
        named = ((name, crowd.facts[name]) for keys in crowd.free for _, name in keys)
        free = [
            (facts.num_running / facts.places, name) for name, facts in named if facts.version >= call.least_version
        ]
        return min(free)[1] if free else None

    return choose
