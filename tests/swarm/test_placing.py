"""Waiting calls get the members that they would get if each of them were asked about after every event."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rollover.engine.base import FirstCall
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect, Send
from rollover.swarm.wire.messages import Assign, Serving, Welcome
from tests.swarm.kit import LENGTH, ModelWorker, assert_crowd_is_current, head, request
from tests.swarm.test_coordinator import beat, coordinator, decoded, decodes, join, sent
from tests.swarm.test_moves import given, member

NAMES = "abcdef"


def one_by_one(hub: Coordinator) -> Callable[[], list[Effect]]:
    """Ask about every waiting call, in order of arrival."""

    def place_waiting() -> list[Effect]:
        placing, calls, effects = hub._assignments, hub._calls, list[Effect]()
        for version in calls.waiting.versions():
            for call_id in calls.waiting.accepting(version):
                if (name := placing._choose_for(calls[call_id])) is not None:
                    effects.append(placing.assign(call_id, hub.members[name]))
        return effects

    return place_waiting


class Pair:
    """Two coordinators that the same happens to; one of them asks about every call that waits."""

    def __init__(self, seed: int, *, exact: bool) -> None:
        self.rng = random.Random(seed)
        self.hub, self.plain = coordinator(exact=exact), coordinator(exact=exact)
        self.plain._assignments.place_waiting = one_by_one(self.plain)  # type: ignore[method-assign]
        self.workers = {name: ModelWorker(name, room=self.rng.randint(1, 4)) for name in NAMES}
        self.now_s, self.num_samples, self.num_beats = 0.0, 0, 0
        self.most_waiting = self.num_given_late = 0

    def happens(self, what: Callable[[Coordinator], list[Effect]], *, is_opening: bool = False) -> list[Effect]:
        effects, expected = what(self.hub), what(self.plain)
        assert effects == expected
        assert self.hub.num_waiting == self.plain.num_waiting
        self.check_what_is_left()
        self.most_waiting = max(self.most_waiting, self.hub.num_waiting)
        by_lease = {worker.lease: worker for worker in self.workers.values()}
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Assign):
                by_lease[effect.lease].got(effect.message)
                self.num_given_late += not is_opening
        return effects

    def check_what_is_left(self) -> None:
        calls, open_calls = self.hub._calls, self.hub._calls._calls.values()
        for due_by in (None, *range(self.hub.head.version + 4)):
            due = [c for c in open_calls if due_by is None or (c.due_version is not None and c.due_version <= due_by)]
            assert calls.num_left(due_by) == sum(1.0 if call.member is None else 0.5 for call in due)

    def says(self, worker: ModelWorker, message: Any) -> None:
        self.happens(lambda hub: hub.received(worker.lease, message, self.now_s))

    def join(self, worker: ModelWorker) -> None:
        hello = worker.hello()
        (welcome,) = sent(self.happens(lambda hub: hub.connected(worker.name, hello, self.now_s)), Welcome)
        for message in worker.got(welcome):
            self.says(worker, message)

    def step(self) -> None:
        self.now_s += self.rng.uniform(0.0, 1.0)
        worker = self.workers[self.rng.choice(NAMES)]
        kind = self.rng.choices(("open", "end", "beat", "publish", "serve", "join"), (9, 7, 4, 1, 3, 1))[0]
        if kind == "open":
            num_done, least = self.rng.choice((0, 0, 0, 5, 17)), self.hub.head.version - self.rng.randint(0, 2)
            due = self.rng.choice((None, 0, 1, 3))
            asked = request(
                f"g{self.num_samples}.0",
                num_done=num_done,
                least_version=max(0, least),
                due_version=None if due is None else max(0, least) + due,
            )
            self.num_samples += 1
            self.happens(lambda hub: hub.opened(asked), is_opening=True)
        elif kind == "publish":
            new = head(self.hub.head.version + 1)
            self.happens(lambda hub: hub.published(new, self.now_s))
        elif not worker.lease:
            if kind == "join":
                self.join(worker)
        elif kind == "end" and worker.calls:
            call_id = self.rng.choice(sorted(worker.calls))
            for piece in decoded(worker, call_id, LENGTH):
                self.says(worker, piece)
            self.happens(lambda hub: hub.journaled(worker.calls[call_id].sample_key, LENGTH))
            del worker.calls[call_id]
        elif kind == "serve" and worker.version < self.hub.head.version:
            self.says(worker, worker.change(self.hub.head))
        elif kind == "beat":
            self.num_beats += 1
            speed = self.rng.choice((1.0, 10.0, 50.0))
            self.says(worker, beat(self.num_beats, mean_running=1.0, tokens_per_s=speed))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_asking_about_one_of_many_calls_that_are_alike_is_enough(seed: int, exact: bool) -> None:
    pair = Pair(seed, exact=exact)
    for worker in list(pair.workers.values())[:3]:
        pair.join(worker)
    for _ in range(600):
        pair.step()
    assert pair.most_waiting >= 5 and pair.num_given_late >= 20


def test_a_call_that_no_member_accepts_yet_does_not_keep_others_waiting() -> None:
    hub, worker = coordinator(), ModelWorker("a", room=2)
    join(hub, worker)
    hub.published(head(1), 0.0)
    assert hub.opened(request("g0.0", least_version=1)) == []
    assert len(sent(hub.opened(request("g1.0")), Assign)) == 1
    assert [hub.opened(request(f"g{i}.0", least_version=1)) for i in range(2, 5)] == [[], [], []]
    given = sent(hub.received(worker.lease, worker.change(head(1)), 1.0), Assign)
    assert [(a.call_id, a.least_version) for a in given] == [("g0.0#0.", 1)], "it has room for one more"


@pytest.mark.parametrize("exact", [False, True])
def test_a_member_that_boasts_at_most_doubles_the_time_of_a_call(exact: bool) -> None:
    """A response of unknown length has 20 tokens: 20 s at the honest member."""
    hub = coordinator(exact=exact)
    liar, honest = member(hub, "liar", 1e6), member(hub, "honest", 1.0)
    for worker, prepare_s in ((liar, 20.0), (honest, 1.0)):
        hub.received(worker.lease, Serving(version=0, manifest=head(0).manifest, prepare_s=prepare_s), 0.0)
    hub.published(head(1), 0.0)
    hub.received(honest.lease, honest.change(head(1)), 5.0)
    assert hub.opened(request("g0.0", least_version=1, due_version=1)) == [], "the liar needs 15 s more, it says"
    assert hub.reserve("g1.0.", FirstCall(1, LENGTH, max_staleness=0), until_s=99.0) is None
    beats = ((s, hub.received(honest.lease, beat(s), float(s))) for s in range(6, 41))
    given_s = next(s for s, effects in beats if sent(effects, Assign))
    assert given_s == 25.0 and hub.num_waiting == 0
    assert hub.reserve("g1.0.", FirstCall(1, LENGTH, max_staleness=0), until_s=99.0) == 1
    assert hub.reserve("g2.0.", FirstCall(1, LENGTH, max_staleness=0), until_s=99.0) == 1, (
        "nor does the next one wait again"
    )


def test_a_member_that_is_as_fast_as_it_says_is_waited_for_again_and_again() -> None:
    hub = coordinator(exact=True)
    server, phone = member(hub, "server", 50.0, room=1), member(hub, "phone", 1.0, room=1)
    assert given(hub.opened(request("g0.0")), server, phone) is server
    for number in range(1, 60):
        assert hub.opened(request(f"g{number}.0")) == [], "the server is done with both before the phone is with one"
        assert given(decodes(hub, server, f"g{number - 1}.0#0.", LENGTH, float(number)), server, phone) is server
    assert_crowd_is_current(hub)
