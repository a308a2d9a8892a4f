"""Samples in an engine that says where each of them may run: who is asked about, and that nobody is overlooked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.engine.base import FirstCall
from rollover.rollout.actions import StartSample
from rollover.rollout.config import Limits
from rollover.rollout.events import Event, SampleStarted
from rollover.rollout.scheduler import Scheduler
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SampleId
from tests.rollout.kit import Prompts, make_rig, strategy_of, with_stop
from tests.rollout.test_episodes import Game
from tests.rollout.test_ledger import ABORT, STOP, ended
from tests.rollout.test_written_prompts import Author, Unwritten


class Places:
    """So many places, at members that serve one version or several."""

    def __init__(self, num: int) -> None:
        self.num, self.version = num, 0
        self.taken: set[SampleId] = set()
        self.asked: list[SampleId] = []

    def room(self) -> int:
        return self.num

    def takes_one(self, least_version: int, num_waiting: int) -> bool:
        return self.version >= least_version and len(self.taken) < self.num

    def reserve(self, sample_id: SampleId, least_version: int, num_waiting: int) -> int | None:
        self.asked.append(sample_id)
        if not self.takes_one(least_version, num_waiting):
            return None
        self.taken.add(sample_id)
        return self.version


class AsksAboutEach(Scheduler):
    """Looks at every sample that could start."""

    _all_have_to_wait = False


class Shell:
    def __init__(self, places: Places, kind: type[Scheduler] = Scheduler, **config: Any) -> None:
        self.places, self.events, self.state = places, list[Event](), RolloutState()
        settings: dict[str, Any] = {"num_running": 8, "rollout_batch_size": 2, "group_size": 2, "max_staleness": 4}
        self.scheduler = kind(
            strategy=strategy_of("bounded_async", **settings | config),
            source=Prompts(),
            state=self.state,
            max_running=0,
            limits=Limits(),
            placement=places,
            emit=self.events.append,
        )
        self.scheduler.begin_round()

    def started(self) -> list[str]:
        actions = self.scheduler.decide(0.0)
        self.state.ledger.check()
        return [str(action.sample_id) for action in actions if isinstance(action, StartSample)]

    def ends(self, sample_id: SampleId, reason: FinishReason) -> None:
        version = self.state.ledger.groups[sample_id.group].start_version
        assert version is not None
        self.scheduler.segment_ended(sample_id, ended(sample_id, 2, reason, version=version).segment, 0.0)
        self.places.taken.discard(sample_id)
        if reason is STOP:
            self.scheduler.scored(sample_id, 1.0, 0.0)


def test_a_refusal_holds_for_all_samples_that_have_not_begun() -> None:
    shell = Shell(places := Places(8))
    places.taken |= {SampleId(99, i) for i in range(7)}
    assert shell.started() == ["g0.0", "g0.1"]
    assert places.asked == [SampleId(0, 0), SampleId(1, 0)]
    shell.ends(SampleId(0, 1), ABORT)
    places.asked.clear()
    places.taken.add(SampleId(0, 0))
    assert shell.started() == ["g0.1"], "what was parked needs no promise"
    assert places.asked == [SampleId(1, 0)], "one of six"


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_the_same_is_started_as_if_each_sample_was_looked_at(seed: int) -> None:
    shells = Shell(Places(6)), Shell(Places(6), AsksAboutEach)
    rng, num_refused = random.Random(seed), 0
    for _ in range(300):
        ledger = shells[0].state.ledger
        running = sorted(ledger.running)
        draw = rng.random()
        for shell in shells:
            if running and draw < 0.7:
                shell.ends(running[int(draw * 1000) % len(running)], STOP if draw < 0.5 else ABORT)
            elif draw < 0.8:
                shell.places.num = 3 + int(draw * 1000) % 6
            elif draw < 0.9 and shell.scheduler._batch_is_full:
                step = shell.scheduler.consume(0.0).step
                shell.scheduler.published(step + 1, 0.0, pause_s=0.0)
                shell.scheduler.begin_round()
            elif draw > 0.95:
                shell.places.version = shell.state.ledger.policy_version
        assert shells[0].started() == shells[1].started()
        assert shells[0].events == shells[1].events
        num_refused += len(shells[1].places.asked) - len(shells[0].places.asked)
    assert num_refused > 0


class Asked:
    """Places everybody at a member with the oldest weights that will do, and remembers when samples are due."""

    def __init__(self) -> None:
        self.max_staleness: set[int | None] = set()

    def room(self) -> int:
        return 64

    def takes_one(self, call: FirstCall) -> bool:
        self.max_staleness.add(call.max_staleness)
        return True

    def reserve(self, sample_key: str, call: FirstCall) -> int | None:
        self.max_staleness.add(call.max_staleness)
        return call.least_version

    def on_change(self, listener: Callable[[], None]) -> None: ...

    def on_distrust(self, listener: Callable[[str], None]) -> None: ...

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None: ...

    def run_ended(self) -> None: ...


async def test_an_engine_is_told_at_which_version_a_step_waits_for_each_sample() -> None:
    asked = Asked()
    rig = make_rig("bounded_async", placement=asked, max_staleness=3, num_running=8)
    await rig.train(6)
    starts: dict[int, int] = {}
    for event in rig.events:
        if isinstance(event, SampleStarted):
            starts.setdefault(event.sample_id.group, event.policy_version)
    due = {request.sample_key: request.due_version for request in rig.engine.requests}
    assert due == {f"{i}.": starts[i.group] + 3 for i in map(_sample_id, due)}
    assert len(set(due.values())) > 2 and asked.max_staleness == {3}


class Promises(Asked):
    """Keeps each place until the call for which it was promised takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.promised: list[str] = []

    def reserve(self, sample_key: str, call: FirstCall) -> int | None:
        self.promised.append(sample_key)
        return super().reserve(sample_key, call)


@pytest.mark.parametrize(("game", "source"), [(Game(), Prompts()), (Author(), Unwritten())])
async def test_each_promise_is_for_the_next_call_of_its_sample(game: Game, source: Prompts) -> None:
    """An empty turn, whose answer is the prompt, has no call."""
    places = Promises()
    rig = make_rig("bounded_async", placement=places, environment=game, source=source, num_running=8, max_staleness=3)
    await with_stop(rig, rig.train(6))
    calls: dict[tuple[str, ...], str] = {}
    for request in rig.engine.requests:
        calls.setdefault(tuple(request.sample_key.split(".")[:2]), request.sample_key)
    taken = [(key, calls[sample]) for key in places.promised if (sample := tuple(key.split(".")[:2])) in calls]
    assert len(taken) > 6 and all(promised == called for promised, called in taken)


def _sample_id(key: str) -> SampleId:
    group, index = key.removeprefix("g").removesuffix(".").split(".")
    return SampleId(int(group), int(index))


class Breaks(Asked):
    """Has no place until it breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.has_broken = False
        self.changed: Callable[[], None] = lambda: None

    def takes_one(self, call: FirstCall) -> bool:
        if self.has_broken:
            raise KeyError("a bug")
        return False

    def on_change(self, listener: Callable[[], None]) -> None:
        self.changed = listener


async def test_an_engine_that_breaks_while_no_call_is_open_ends_the_run() -> None:
    engine = Breaks()
    training = asyncio.create_task(make_rig("bounded_async", placement=engine).train(1))
    await asyncio.sleep(3)
    engine.has_broken = True
    engine.changed()
    with pytest.raises(KeyError, match="a bug"):
        await training
    assert asyncio.get_running_loop().time() == 3
