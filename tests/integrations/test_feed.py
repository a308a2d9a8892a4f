"""The feed hands the driver's batches to a host that counts for itself, and refuses a host that loses count."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.batch import Batch, WasteCause
from rollover.errors import EngineError, EngineTimeout, RunError
from rollover.integrations import feed as feed_module
from rollover.integrations.feed import Deadlines, Feed, FeedParts, ScoredByHost
from rollover.rollout.config import RolloutConfig
from rollover.rollout.events import BatchConsumed, BatchTrained, CheckpointSaved
from rollover.rollout.journal import read_events
from rollover.rollout.ledger import Ledger
from rollover.rollout.strategies import AprilConfig, BoundedAsyncConfig
from tests.engine.fake import FakeEngine
from tests.rollout.kit import Prompts, lognormal
from tests.speed import within
from tests.weights.kit import FakeWeights

SEED = 5
ROLLOUT = RolloutConfig(
    rollout_batch_size=3,
    group_size=2,
    max_new_tokens=40,
    strategy=AprilConfig(over_sampling_batch_size=6),
    stall_timeout_s=60.0,
)


def parts(engine: FakeEngine) -> FeedParts:
    return FeedParts(engine=engine, source=Prompts(), scorer=ScoredByHost())


class Host:
    """A trainer of somebody else's: it publishes, asks for a batch and counts. ``changes`` are of ``ROLLOUT``."""

    def __init__(
        self,
        folder: Path,
        *,
        step: int = 0,
        deadlines: Deadlines | None = None,
        engine: FakeEngine | None = None,
        **changes: Any,
    ) -> None:
        self.engine = engine or FakeEngine(lognormal(8, 1.0, cap=40), auto=True, max_running=64)
        self.journal = folder / "journal.sqlite"
        self.closed = threading.Event()
        rollout = replace(ROLLOUT, **changes)
        self.feed = Feed(self._open, rollout, journal=self.journal, step=step, seed=SEED, deadlines=deadlines)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[FeedParts]:
        try:
            yield parts(self.engine)
        finally:
            await self.engine.close()
            self.closed.set()

    def publish(self, version: int) -> None:
        self.feed.publish(version, lambda: self.engine.load(version, FakeWeights(version)))

    def train(self, *versions: int) -> list[Batch]:
        batches = []
        for version in versions:
            self.publish(version)
            batches.append(self.feed.batch(version))
            self.feed.trained(version)
        return batches

    def ledger(self) -> Ledger:
        """Folded from the file, and proved."""
        ledger = Ledger(event for _, event in read_events(self.journal))
        ledger.check()
        return ledger


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    """Makes hosts over one journal; each is closed at the end."""
    made: list[Host] = []

    def make(**options: Any) -> Host:
        made.append(Host(tmp_path, **options))
        return made[-1]

    yield make
    for host in made:
        with suppress(Exception):
            host.feed.close()
        assert not host.feed._thread.is_alive(), "its thread is left over"


def test_batches_come_in_order_on_disk_and_within_the_bound(hosts: Any) -> None:
    host = hosts()
    batches = host.train(*range(8))
    assert [batch.step for batch in batches] == [*range(8)]
    consumed = [e.group_ids for _, e in read_events(host.journal) if isinstance(e, BatchConsumed)]
    assert consumed == [tuple(g.group_id for g in batch.groups) for batch in batches]
    assert len({i for ids in consumed for i in ids}) == 8 * 3
    ages = {batch.step - group.oldest_version for batch in batches for group in batch.groups}
    assert max(ages) > 0, "nothing rolled over, and the test shows nothing"
    assert max(ages) <= 4
    host.ledger()


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_after_a_restart_batches_beyond_the_checkpoint_come_again(hosts: Any, kept: int) -> None:
    first = hosts()
    before = first.train(*range(5))
    first.feed.saved(kept)
    first.feed.close()
    second = hosts(step=kept)
    assert second.feed.replayed == frozenset(range(kept, 5))
    again = second.train(*range(kept, 5))
    assert again == before[kept:]
    assert not second.engine.requests, "a batch that is on record was decoded again"
    new = second.train(5, 6)
    seen = {g.group_id for batch in before for g in batch.groups}
    assert not seen & {g.group_id for batch in new for g in batch.groups}
    second.ledger()


def test_what_was_decoded_before_a_restart_is_not_decoded_again(hosts: Any) -> None:
    first = hosts()
    first.train(0, 1)
    first.feed.close()
    parked = {i: first.ledger().sample(i).num_tokens for i in first.ledger().parked}
    assert parked
    second = hosts(step=2)
    second.train(2)
    resumed = {r.sample_key: len(r.response_ids) for r in second.engine.requests if r.response_ids}
    assert resumed == {f"{i}.": n for i, n in parked.items()}


def test_a_checkpoint_older_than_the_oldest_that_was_kept_is_refused(hosts: Any) -> None:
    first = hosts()
    first.train(*range(4))
    first.feed.saved(3)
    first.feed.close()
    with pytest.raises(RunError, match="does not fit a checkpoint at step 1"):
        hosts(step=1)


def test_a_checkpoint_without_its_journal_is_refused(hosts: Any) -> None:
    with pytest.raises(RunError, match=r"journal\.sqlite does not exist, and a checkpoint that has seen 7 batches"):
        hosts(step=7)


def test_a_host_that_skips_a_batch_or_asks_for_one_twice_is_refused(hosts: Any) -> None:
    host = hosts()
    host.train(0)
    host.publish(1)
    with pytest.raises(RunError, match="asks for batch 2, but batch 1 is next"):
        host.feed.batch(2)
    host.feed.batch(1)
    with pytest.raises(RunError, match="asks for batch 1, but batch 2 is next"):
        host.feed.batch(1)
    assert host.feed.next_version == 2


def test_a_batch_before_the_first_weights_is_refused(hosts: Any) -> None:
    with pytest.raises(RunError, match="before any weights were published"):
        hosts().feed.batch(0)


def test_weights_may_lag_as_far_as_the_bound_and_no_further(hosts: Any) -> None:
    host = hosts(max_staleness=2)
    host.publish(0)
    for version in range(3):
        host.feed.batch(version)
    with pytest.raises(RunError, match=r"samples from weights of version 0, .* must come from versions 1 to 3"):
        host.feed.batch(3)
    host.publish(3)
    batch = host.feed.batch(3)
    assert min(group.oldest_version for group in batch.groups) >= 1


def test_weights_that_go_back_or_run_ahead_are_refused(hosts: Any) -> None:
    host = hosts()
    host.train(0, 1, 2)
    with pytest.raises(RunError, match=r"publishes weights of version 4, but .* between 2, .* and 3"):
        host.publish(4)
    with pytest.raises(RunError, match=r"publishes weights of version 1, but .* between 2, .* and 3"):
        host.publish(1)
    assert host.engine.version == 2


def test_what_was_not_trained_is_entered_once(hosts: Any) -> None:
    host = hosts()
    host.publish(0)
    batch = host.feed.batch(0)
    host.feed.trained(0, {WasteCause.ZERO_ADVANTAGE: 5})
    account = host.feed.account()
    assert account["rollout/wasted_tokens/zero_advantage"] == 5
    assert account["rollout/trained_tokens"] == batch.num_tokens - 5
    with pytest.raises(RunError, match="batch 0 cannot be recorded as trained: it is recorded as trained already"):
        host.feed.trained(0)
    with pytest.raises(RunError, match="batch 1 cannot be recorded as trained: it is not on record"):
        host.feed.trained(1)
    with pytest.raises(RunError, match="has seen 2 batches cannot be recorded: only 1 batches"):
        host.feed.saved(2)
    host.feed.saved(1)
    kinds = [type(e) for _, e in read_events(host.journal) if isinstance(e, BatchTrained | CheckpointSaved)]
    assert kinds == [BatchTrained, CheckpointSaved]


def test_an_overlapping_strategy_decodes_while_the_host_trains(hosts: Any) -> None:
    engine = FakeEngine(lambda request: 40, auto=True, max_running=64)
    host = hosts(strategy=BoundedAsyncConfig(), max_staleness=4, engine=engine)
    host.publish(0)
    batch, give_up_s = host.feed.batch(0), time.monotonic() + within(60)
    while engine.decoded_tokens < 4 * batch.num_tokens:  # of this batch, and of three to come at least
        assert time.monotonic() < give_up_s, "the engine stands still while the host trains"
        time.sleep(0.005)


# -- deadlines ----------------------------------------------------------------------------------------------------


def test_weights_that_are_late_are_named(hosts: Any) -> None:
    host = hosts(deadlines=Deadlines(update_timeout_s=0.05))
    with pytest.raises(EngineTimeout, match=r"did not take the weights of version 0 within 0 s: see what"):
        host.feed.publish(0, lambda: asyncio.sleep(3600))
    host.publish(0)
    assert host.feed.batch(0).step == 0


def test_an_error_of_the_hosts_own_load_is_the_hosts(hosts: Any) -> None:
    host = hosts()

    async def broken() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        host.feed.publish(0, broken)


def test_an_engine_that_decodes_nothing_is_named_with_its_samples(hosts: Any) -> None:
    host = hosts(stall_timeout_s=0.05, engine=FakeEngine(lambda request: 5, auto=False))
    host.publish(0)
    with pytest.raises(EngineTimeout, match=r"no token and no reward for .* 12 samples decoding: g0\.0"):
        host.feed.batch(0)


def test_parts_that_do_not_open_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LOOK_S", 0.02)
    cancelled = threading.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[FeedParts]:
        while not cancelled.is_set():  # wakes up, so that the test can let it go
            await asyncio.sleep(0.01)
        raise EngineError("let go")
        yield

    try:
        with pytest.raises(EngineTimeout, match=r"did not open the engine and its parts within 0 s: see what"):
            Feed(never, RolloutConfig(), journal=tmp_path / "journal.sqlite", deadlines=Deadlines(open_timeout_s=0.05))
    finally:
        cancelled.set()


def test_what_opening_fails_with_reaches_the_host(tmp_path: Path) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[FeedParts]:
        raise EngineError("no such device")
        yield

    with pytest.raises(EngineError, match="no such device"):
        Feed(broken, RolloutConfig(), journal=tmp_path / "journal.sqlite")
    assert not (tmp_path / "journal.sqlite").exists()


def test_an_event_loop_that_is_blocked_is_noticed(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LOOK_S", 0.02)
    host, let_go = hosts(stall_timeout_s=0.1), threading.Event()

    async def blocks() -> None:
        let_go.wait(within(60))

    try:
        with pytest.raises(EngineTimeout, match=r"event loop has been blocked .* cannot publish version 0"):
            host.feed.publish(0, blocks)
    finally:
        let_go.set()


def test_a_parts_close_that_hangs_is_named(tmp_path: Path) -> None:
    let_go = threading.Event()

    @asynccontextmanager
    async def opened() -> AsyncIterator[FeedParts]:
        yield parts(FakeEngine(lambda request: 5))
        while not let_go.is_set():
            await asyncio.sleep(0.01)

    feed = Feed(opened, RolloutConfig(), journal=tmp_path / "journal.sqlite", deadlines=Deadlines(close_timeout_s=0.05))
    try:
        with pytest.raises(EngineTimeout, match=r"did not close within 0 s: it waits"):
            feed.close()
    finally:
        let_go.set()
        feed._thread.join(within(60))


def test_a_closed_feed_says_so_and_closes_once(hosts: Any) -> None:
    host = hosts()
    host.train(0)
    host.feed.close()
    host.feed.close()
    assert host.closed.is_set()
    with pytest.raises(RunError, match="the feed is closed: it cannot collect batch 1"):
        host.feed.batch(1)
    assert not host.ledger().running


def test_what_the_host_fails_with_comes_before_trouble_in_closing(tmp_path: Path) -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[FeedParts]:
        yield parts(FakeEngine(lambda request: 5))
        raise EngineError("trouble in closing")

    with pytest.raises(ZeroDivisionError), Feed(opened, RolloutConfig(), journal=tmp_path / "a.sqlite") as feed:
        assert feed.next_version == 0
        raise ZeroDivisionError
    with (
        pytest.raises(EngineError, match="trouble in closing"),
        Feed(opened, RolloutConfig(), journal=tmp_path / "b.sqlite"),
    ):
        pass


def test_a_wait_that_is_interrupted_leaves_the_feed_usable(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in a notebook, where the next cell may ask again."""
    host = hosts()
    host.publish(0)
    waited: Callable[..., Any] = feed_module.wait

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(feed_module, "wait", waited)
        raise KeyboardInterrupt

    monkeypatch.setattr(feed_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.feed.batch(host.feed.next_version)
    host.feed.account()  # by its answer, the batch is either cancelled or handed out
    assert host.feed.batch(host.feed.next_version).num_tokens > 0
    host.feed.close()
    host.ledger()
