"""Connections that are cut at any time: the next greeting settles what was lost, and the tokens come once and in order.

The coordinator is the real one, and so is what the workers hold. Frames of both directions arrive in order and once, or
their connection is cut with all that is under way.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from rollover.engine.base import FirstCall
from rollover.swarm.coordinator.machine.effects import Deliver, Effect, Fail, Send
from rollover.swarm.wire.messages import Adopt, Assign, Goodbye, HeldCall, Welcome
from rollover.types import FinishReason
from tests.swarm.held_worker import HeldWorker
from tests.swarm.kit import LENGTH, TTL_S, assert_crowd_is_current, coordinator, head, plain, request, response

NUM_ROUNDS = 60
"""Heartbeats without a cut in which everything must have come to its end."""


class CutSwarm(RuleBasedStateMachine):
    """Samples are driven to their end over connections that are cut at any time, with what is under way.

    Tokens are written down now and then; a coordinator that starts again knows only those.
    """

    names = st.sampled_from("ab")

    def __init__(self) -> None:
        super().__init__()
        self.hub = coordinator()
        self.now_s = 0.0
        self.done: dict[str, list[int]] = {}
        """Tokens by sample, as the driver has them."""
        self.least: dict[str, int] = {}
        self.open: dict[str, str] = {}
        """Sample by open call."""
        self.finished: set[str] = set()
        self.num_calls = 0
        self.given: dict[str, set[str]] = {name: set() for name in "ab"}
        """Samples that each worker was assigned."""
        self.workers = {name: HeldWorker(name) for name in "ab"}
        self.up: dict[str, list[tuple[int, Any]]] = {name: [] for name in "ab"}
        self.down: dict[str, list[tuple[int, Any]]] = {name: [] for name in "ab"}
        self.connected: set[str] = set()
        self.journaled: dict[str, int] = {}

    # -- the shell ------------------------------------------------------------------------------------------------

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(call_id, chunk):
                    sample = self.open[call_id]
                    if chunk.token_ids:
                        assert chunk.policy_version >= self.least[sample]
                    self.done[sample] += chunk.token_ids
                    if chunk.finish_reason is not None:
                        del self.open[call_id]
                        if chunk.finish_reason is not FinishReason.ABORT:
                            self.finished.add(sample)
                case Fail(call_id, _):
                    del self.open[call_id]
                case Send(lease, message):
                    assert not isinstance(message, Goodbye) or "has not been heard from" in message.reason
                    for worker in self.workers.values():
                        if worker.lease == lease and worker.name in self.connected:
                            if isinstance(message, Assign):
                                self.given[worker.name].add(self.open[message.call_id])
                            if isinstance(message, Adopt):
                                assert self.open[message.call_id] in self.given[worker.name]
                            self.down[worker.name].append((lease, message))
                        if worker.lease == lease and isinstance(message, Goodbye):
                            self.cut(worker.name)

    def cut(self, name: str) -> None:
        self.connected.discard(name)
        self.up[name], self.down[name] = [], []

    def post(self, name: str, messages: list[Any]) -> None:
        if name in self.connected:
            self.up[name] += [(self.workers[name].lease, m) for m in messages]

    def arrive(self, name: str, direction: str) -> None:
        under_way = self.up[name] if direction == "up" else self.down[name]
        if not under_way:
            return
        lease, message = under_way.pop(0)
        worker = self.workers[name]
        if direction == "up":
            self.perform(self.hub.received(lease, message, self.now_s))
        elif lease == worker.lease:
            self.post(name, worker.got(message))

    # -- what happens ---------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for name in "ab":
            self.connect(name, anew=False)
            self.deliver(name)

    @rule(name=names, what=st.sampled_from(["dial", "dial", "anew", "cut", "restart", "wait"]))
    def upheaval(self, name: str, what: str) -> None:
        if what == "restart":
            self.restart_the_coordinator()
        elif what == "cut":
            self.disconnect(name)
        elif what == "wait":
            self.wait(TTL_S + 1.0)
        else:
            self.connect(name, anew=what == "anew")

    @rule(name=names, other=names, number=st.integers(0, 3))
    def connect_as_a_liar(self, name: str, other: str, number: int) -> None:
        """A worker says that it holds a call of a sample, whose name it guesses or has heard from another worker."""
        heard = {stream.assign.sample_key for stream in self.workers[other].held} if other != name else set()
        claims = [f"g{number}.0.", *sorted(heard)]
        lies = [
            HeldCall(call_id=f"guess {i}", sample_key=key, start=0, end=LENGTH, is_running=True)
            for i, key in enumerate(claims)
        ]
        self.connect(name, anew=False, lies=tuple(lies))

    def connect(self, name: str, anew: bool, lies: tuple[HeldCall, ...] = ()) -> None:
        if anew:
            self.workers[name] = HeldWorker(name)
        worker = self.workers[name]
        worker.now_s = self.now_s
        hello = worker.hello()
        effects = self.hub.connected(name, structs.replace(hello, held=hello.held + lies), self.now_s)
        (welcome,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)]
        self.cut(name)
        self.connected.add(name)
        self.post(name, worker.welcomed(welcome))
        goodbye = (Welcome, Goodbye)
        self.perform([e for e in effects if not (isinstance(e, Send) and isinstance(e.message, goodbye))])
        self.connected.add(name)

    @rule(name=names, direction=st.sampled_from(["up", "down"]), number=st.integers(1, 4))
    def arrives(self, name: str, direction: str, number: int) -> None:
        """Some of the messages that are under way arrive, in order."""
        for _ in range(number):
            self.arrive(name, direction)

    @rule(number=st.integers(0, 3), is_cut=st.booleans(), num_tokens=st.integers(1, 30))
    def begin_one(self, number: int, is_cut: bool, num_tokens: int) -> None:
        """A call is opened, and its member decodes; the connection is cut before its assignment or its tokens arrive."""
        self.start(number)
        for name in "ab":
            if is_cut:
                self.disconnect(name)
            self.deliver(name)
            self.decode(name, num_tokens)
            if not is_cut:
                self.disconnect(name)

    @rule(name=names)
    def deliver(self, name: str) -> None:
        while self.up[name] or self.down[name]:
            for direction in ("up", "down"):
                self.arrive(name, direction)

    def disconnect(self, name: str) -> None:
        if name in self.connected:
            self.cut(name)
            self.perform(self.hub.disconnected(self.workers[name].lease, self.now_s))

    @rule(name=names, num_tokens=st.integers(0, 25))
    def decode(self, name: str, num_tokens: int) -> None:
        self.workers[name].decode(num_tokens)
        if name in self.connected:
            self.post(name, self.workers[name].outgoing())

    @rule(name=names)
    def beat(self, name: str) -> None:
        if name in self.connected:
            self.post(name, [self.workers[name].heartbeat()])

    @rule(name=names)
    def change(self, name: str) -> None:
        """A worker that is away changes its weights too."""
        self.post(name, self.workers[name].change())

    @rule(step_s=st.sampled_from([1.0, 4.0]))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s
        for worker in self.workers.values():
            worker.now_s = self.now_s
        self.perform(self.hub.expire(self.now_s))

    @rule(number=st.integers(0, 3))
    def start(self, number: int) -> None:
        sample = f"g{number}.0"
        if sample in self.finished or sample in self.open.values():
            return
        self.done.setdefault(sample, [])
        least = self.least.get(sample)
        if least is None:
            least = self.hub.reserve(f"{sample}.", FirstCall(0, LENGTH), until_s=self.now_s + 60.0)
            if least is None:
                return
            self.least[sample] = least
        self.journal(sample)
        if len(self.done[sample]) == LENGTH:  # its end was lost with the coordinator that had it
            self.finished.add(sample)
            return
        self.num_calls += 1
        call = request(sample, self.num_calls, num_done=len(self.done[sample]), least_version=least)
        self.open[call.request_id] = sample
        self.perform(self.hub.opened(call))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_asked_again=st.booleans())
    def abort(self, data: st.DataObject, is_asked_again: bool) -> None:
        """A call is stopped. Its worker may get its sample again at once."""
        call_id = data.draw(st.sampled_from(sorted(self.open)))
        sample = self.open[call_id]
        self.perform(self.hub.aborted([call_id]))
        if is_asked_again:
            for name in "ab":
                self.deliver(name)
                self.decode(name, 1)
                self.deliver(name)
            self.start(int(sample[1:-2]))

    @rule()
    def publish(self) -> None:
        self.perform(self.hub.published(head(self.hub.head.version + 1), self.now_s))

    @rule(slow=names)
    def move(self, slow: str) -> None:
        """One member is found to be slow, the others are fast."""
        for name, member in self.hub.members.items():
            member.measured(0.01 if name == slow else 1000.0, 1.0)
            self.hub._assignments.changed(member)
        self.perform(self.hub.move_calls(self.now_s))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.perform(self.hub.cut([data.draw(st.sampled_from(sorted(self.open)))]))

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def write_down(self, data: st.DataObject) -> None:
        self.journal(data.draw(st.sampled_from(sorted(self.done))))

    def journal(self, sample: str) -> None:
        self.journaled[sample] = len(self.done[sample])
        self.perform(self.hub.journaled(f"{sample}.", self.journaled[sample]))

    def restart_the_coordinator(self) -> None:
        version = self.hub.head.version
        self.hub = coordinator()
        for v in range(1, version + 1):
            self.hub.published(head(v), self.now_s)
        for name in "ab":
            self.cut(name)
        self.open.clear()
        for sample, tokens in self.done.items():
            del tokens[self.journaled.get(sample, 0) :]
            if len(tokens) < LENGTH:
                self.finished.discard(sample)

    # -- laws -----------------------------------------------------------------------------------------------------

    @invariant()
    def tokens_are_the_samples_own(self) -> None:
        for sample, tokens in self.done.items():
            assert tuple(tokens) == response(f"{sample}.", 0, len(tokens))

    @invariant()
    def the_rule_knows_the_members_as_they_are(self) -> None:
        assert_crowd_is_current(self.hub)

    @invariant()
    def each_call_is_with_one_member(self) -> None:
        calls = [call for member in self.hub.members.values() for call in member.calls]
        assert len(calls) == len(set(calls)) and {*calls} <= {*self.open}

    @invariant()
    def offers_are_known_by_sample_and_by_member(self) -> None:
        offers = sorted((name, held.call_id) for each in self.hub._offers._offers.values() for name, held in each)
        assert offers == sorted((m.name, call_id) for m in self.hub.members.values() for call_id in m.held)

    @invariant()
    def nobody_is_given_more_than_there_is_room_for(self) -> None:
        """Calls that a member held already come on top: nobody decodes those again."""
        for member in self.hub.members.values():
            given = [call_id for call_id, call in self.hub._calls.of(member) if not call.held_as]
            assert member.ready is None or len(given) + len(member.reserved) <= member.ready.max_running

    @invariant()
    def what_a_worker_was_told_to_let_go_is_written_down(self) -> None:
        for worker in self.workers.values():
            for stream in worker.held:
                sample = plain(stream.assign.sample_key)[:-1]
                assert stream.start <= max(stream.origin, self.journaled.get(sample, 0))

    @invariant()
    def no_honest_worker_is_sent_away_or_out_of_order(self) -> None:
        assert not any(member.distrust for member in self.hub.members.values())
        assert self.hub.counters["out_of_order"] == 0

    def teardown(self) -> None:
        """Once nothing is cut any more, all ends."""
        for _ in range(NUM_ROUNDS):
            self.round()
            if self.finished == self.done.keys() and not self.held():
                break
        assert self.finished == self.done.keys(), f"{self.done.keys() - self.finished} were never finished"
        self.now_s += 901.0  # what nobody asked for again after a restart is forgotten
        for name in "ab":
            self.connect(name, anew=False)
        for _ in range(3):
            self.now_s += 901.0
            for worker in self.workers.values():
                worker.now_s = self.now_s
            for name in "ab":
                self.beat(name)
                self.deliver(name)
        assert self.held() == 0 and len(self.hub._calls.acknowledgements) == 0

    def held(self) -> int:
        return sum(len([*worker.held]) for worker in self.workers.values())

    def round(self) -> None:
        self.wait(5.0)
        for name in "ab":
            if name not in self.connected:
                self.connect(name, anew=False)
            self.deliver(name)
            self.change(name)
            self.decode(name, LENGTH)
            self.beat(name)
            self.deliver(name)
        for sample in list(self.done):
            self.start(int(sample[1:-2]))
            self.journal(sample)


TestCutSwarm = CutSwarm.TestCase
TestCutSwarm.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
