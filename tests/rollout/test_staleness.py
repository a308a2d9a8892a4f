"""The theorem of ``rollover.rollout.staleness``: under any timing, admission and choice keep the bound."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.rollout.ledger import Ledger
from rollover.rollout.records import GroupRecord
from rollover.rollout.staleness import choose_batch, headroom, least_start_version
from rollover.types import SampleId
from tests.rollout.kit import assert_bounded, num_due
from tests.rollout.test_ledger import STOP, consumed, dropped, ended, opened, published, scored, started

Chooser = Callable[..., tuple[int, ...] | None]


class World:
    """Groups of one sample, opened, started, finished, dropped, published and consumed in an order drawn by lot."""

    def __init__(self, batch_size: int, max_staleness: int, *, surplus: int = 0) -> None:
        self.batch_size, self.max_staleness, self.surplus = batch_size, max_staleness, surplus
        self.ledger = Ledger()

    def open(self) -> None:
        self.ledger.apply(opened(self.ledger.next_group_id))

    def start(self, sample_id: SampleId) -> None:
        self.ledger.apply(started(sample_id, self.ledger.policy_version))

    def finish(self, sample_id: SampleId) -> None:
        self.ledger.apply(ended(sample_id, 1, STOP, version=self.ledger.policy_version))
        self.ledger.apply(scored(sample_id))

    def drop(self, group_id: int) -> None:
        self.ledger.apply(dropped(group_id))

    def publish(self) -> None:
        self.ledger.apply(published(self.ledger.policy_version + 1))

    def consume(self, group_ids: tuple[int, ...]) -> None:
        self.ledger.apply(consumed(self.ledger.next_step, *group_ids))

    @property
    def room(self) -> int:
        allowed = headroom(self.ledger, batch_size=self.batch_size, max_staleness=self.max_staleness)
        return allowed + self.surplus

    def choose(self, chooser: Chooser, order: Callable[[GroupRecord], int]) -> tuple[int, ...] | None:
        return chooser(self.ledger, batch_size=self.batch_size, max_staleness=self.max_staleness, order=order)

    def play(self, rng: random.Random, num_moves: int, chooser: Chooser = choose_batch) -> None:
        """Make legal moves, checking the theorem after each.

        Raises:
            AssertionError: a group is, or will inevitably be, beyond the bound.
        """
        ledger = self.ledger
        rank: dict[int, int] = {}
        reluctant = rng.random() < 0.5  # the trainer lags, or some groups hang on to the end

        def order(group: GroupRecord) -> int:
            return rank.setdefault(group.group_id, rng.randrange(1000))

        for _ in range(num_moves):
            move = rng.choice(("open", "open", "start", "start", "finish", "drop", "publish", "consume"))
            if move == "open" and self.room > 0:
                for _ in range(rng.randint(1, self.room)):
                    self.open()
            elif move == "start" and ledger.waiting:
                self.start(rng.choice(list(ledger.waiting)))
            elif move == "finish" and ledger.running and not (reluctant and rng.random() < 0.5):
                self.finish(rng.choice(list(ledger.running)))
            elif move == "drop" and rng.random() < 0.1 and ledger.num_unconsumed:
                self.drop(rng.choice([g.group_id for g in ledger.unconsumed()]))
            elif move == "publish" and ledger.policy_version < ledger.next_step:
                self.publish()
            elif move == "consume" and (chosen := self.choose(chooser, order)) is not None:
                assert len(set(chosen)) == self.batch_size
                self.consume(chosen)
            assert_bounded(ledger, self.batch_size, self.max_staleness)
            self.assert_no_deadlock(chooser, order)

    def assert_no_deadlock(self, chooser: Chooser, order: Callable[[GroupRecord], int]) -> None:
        """With every started group ready, there is a batch as soon as there are enough of them."""
        unready = [g for g in self.ledger.open.values() if g.start_version is not None]
        if not unready and len(self.ledger.ready) >= self.batch_size:
            assert self.choose(chooser, order) is not None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rng=st.randoms(use_true_random=False),
    batch_size=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    num_moves=st.integers(1, 120),
)
def test_bound_holds_under_any_timing(rng: random.Random, batch_size: int, max_staleness: int, num_moves: int) -> None:
    World(batch_size, max_staleness).play(rng, num_moves)


def _violated(play: Callable[[random.Random], None]) -> bool:
    for seed in range(100):
        try:
            play(random.Random(seed))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("batch_size", "max_staleness"), [(1, 0), (2, 1), (3, 2)])
def test_one_group_beyond_the_headroom_breaks_the_bound(batch_size: int, max_staleness: int) -> None:
    assert not _violated(lambda rng: World(batch_size, max_staleness).play(rng, 100))
    assert _violated(lambda rng: World(batch_size, max_staleness, surplus=1).play(rng, 100))


@pytest.mark.parametrize(("batch_size", "max_staleness"), [(1, 1), (2, 1), (3, 2)])
def test_a_choice_blind_to_deadlines_breaks_the_bound(batch_size: int, max_staleness: int) -> None:
    def newest_first(ledger: Ledger, **_: object) -> tuple[int, ...] | None:
        ready = sorted(ledger.ready, reverse=True)[:batch_size]
        return tuple(ready) if len(ready) == batch_size else None

    assert _violated(lambda rng: World(batch_size, max_staleness).play(rng, 100, newest_first))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(rng=st.randoms(use_true_random=False), batch_size=st.integers(1, 4), max_staleness=st.integers(1, 3))
def test_preference_rules_where_no_deadline_presses(rng: random.Random, batch_size: int, max_staleness: int) -> None:
    """A group is preferred over a better one only if a deadline demands it."""
    world = World(batch_size, max_staleness)
    world.play(rng, 60)
    ledger = world.ledger
    chosen = world.choose(choose_batch, lambda g: -g.group_id)
    if chosen is None:
        return
    step = ledger.next_step
    demanded = max(
        (num_due(ledger, t, max_staleness) - batch_size * (t - step) for t in range(step, step + max_staleness + 1)),
        default=0,
    )
    best = sorted(ledger.ready, reverse=True)[:batch_size]
    assert len(set(best) - set(chosen)) <= max(0, demanded)


def test_headroom_is_the_gate_of_admission() -> None:
    world = World(batch_size=4, max_staleness=2)
    assert world.room == 12  # N (v + S + 1 - s)
    for _ in range(12):
        world.open()
    assert world.room == 0
    for i in range(4):
        world.start(SampleId(i, 0))
        world.finish(SampleId(i, 0))
    world.consume((0, 1, 2, 3))
    assert world.room == 0  # consuming alone lets nothing in ...
    world.publish()
    assert world.room == 4  # ... new weights do
    world.drop(4)
    assert world.room == 5


class SeveralVersions(World):
    """Groups start at the version of whichever member gets them: any from the oldest that is admitted to the newest."""

    def __init__(self, batch_size: int, max_staleness: int, *, laxness: int = 0) -> None:
        super().__init__(batch_size, max_staleness)
        self.laxness = laxness
        self.rng = random.Random(0)
        self.num_older = 0

    def start(self, sample_id: SampleId) -> None:
        bounds = {"batch_size": self.batch_size, "max_staleness": self.max_staleness}
        oldest = max(0, least_start_version(self.ledger, **bounds) - self.laxness)
        if oldest <= self.ledger.policy_version:
            version = self.rng.randint(oldest, self.ledger.policy_version)
            self.num_older += version < self.ledger.policy_version
            self.ledger.apply(started(sample_id, version))


@pytest.mark.parametrize(("batch_size", "max_staleness"), [(1, 1), (2, 1), (3, 2), (2, 4)])
def test_the_bound_holds_with_several_versions_and_not_with_an_older_one(batch_size: int, max_staleness: int) -> None:
    worlds: list[SeveralVersions] = []

    def play(rng: random.Random) -> None:
        worlds.append(SeveralVersions(batch_size, max_staleness))
        worlds[-1].play(rng, 150)

    assert not _violated(play)
    assert sum(world.num_older for world in worlds) >= 5, "older members did start groups"
    assert _violated(lambda rng: SeveralVersions(batch_size, max_staleness, laxness=1).play(rng, 150))
