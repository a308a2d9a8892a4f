"""The feed: batches of rollouts for a trainer other than Rollover's own, from the same driver.

::

    thread of the host                                  thread of the feed, with an event loop
    ┌──────────────┐ ── batch(version) ──────────────▶ ┌────────────────┐ ──▶ engine
    │ TRL, slime,  │ ◀───────────────────── Batch ──── │ RolloutDriver  │ ──▶ scorer
    │ verl, yours  │ ── publish(version, load) ──────▶ │                │ ──▶ journal
    └──────────────┘ ── trained, saved, close ───────▶ └────────────────┘

=================  ===================================  ==============================  ===============================
call of the host   consumes                             waits for                       is unblocked by
=================  ===================================  ==============================  ===============================
``batch``          ready groups                         a full batch                    the driver, or its stall limit
``publish``        weights, through the host's ``load``  open calls to stop; ``load``   the engine; ``update_timeout_s``
``trained``        what became of a batch's tokens      the journal                     the disk
``saved``          the step of the oldest checkpoint    the journal                     the disk
``close``          nothing                              open calls to stop              ``close_timeout_s``
=================  ===================================  ==============================  ===============================

A *version* counts the batches that the host has trained: weights of version ``s`` are those before batch ``s`` is
trained, and batch ``s`` is the one that they train. A host that trains a batch in several optimizer steps still makes
one version from it.

Invariants: batches come in order, each once per life of the trainer, and after a restart those that the
trainer's checkpoint does not include come first, unchanged; no token is older than the bound allows, counted in these
versions; a host that loses count is refused and told which number was expected; no call waits without a deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rollover.batch import Batch, WasteCause
from rollover.clock import SystemClock
from rollover.engine.base import Engine
from rollover.errors import EngineError, EngineTimeout, RunError
from rollover.rollout.config import Limits, RolloutConfig
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import BatchTrained, Event
from rollover.rollout.journal import Journal, restart
from rollover.rollout.metrics import ledger_metrics
from rollover.rollout.scheduler import GroupRules, Source
from rollover.rollout.scorer import Scorer
from rollover.rollout.state import RolloutState
from rollover.types import Trajectory

T = TypeVar("T")

_LOOK_S = 5.0
"""Seconds between a waiting host's checks that the feed's thread is alive."""


class ScoredByHost:
    """A scorer for hosts that compute rewards themselves once they have a batch: every response scores 0 here. Rewards
    in the journal are then meaningless."""

    async def score(self, trajectory: Trajectory) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedParts:
    """The parts that a host brings, open on the event loop of the feed."""

    engine: Engine
    source: Source
    """The source of prompts. Its ``prompt`` is called on the feed's thread."""
    scorer: Scorer
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    rules: GroupRules | None = None
    """The rules for groups; rules about rewards need a scorer that knows rewards."""


OpenParts = Callable[[], AbstractAsyncContextManager[FeedParts]]
"""Opens the parts within the feed's event loop and closes them at the end. It is called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The longest waits of a host, in seconds; the stall limit of ``batch`` is ``rollout.stall_timeout_s`` and
    ``away_timeout_s`` together."""

    open_timeout_s: float = 1800.0
    """For opening the parts: an engine may read a large model from a slow disk."""
    update_timeout_s: float = 600.0
    """For loading new weights into the engine."""
    away_timeout_s: float = 0.0
    """For calls while no server of the engine is up."""
    close_timeout_s: float = 120.0
    """For stopping open calls and closing all parts."""


class Feed:
    """Provides batches to a host. Its methods may only be called by the thread that trains; each returns when it is
    done. It is a context manager.

    Example: a host's loop of two steps, from the beginning::

        with Feed(open_parts, rollout, journal=Path("out/journal.sqlite")) as feed:
            for version in range(2):
                feed.publish(version, load)          # ``await load()`` puts the host's weights into the engine
                batch = feed.batch(version)          # Batch(step=version, groups=(...)), on disk already
                ...                                  # train it; samples may continue decoding meanwhile
            feed.saved(2)                            # the oldest checkpoint that is kept has seen two batches

    Args:
        open_parts: see ``OpenParts``.
        rollout: batch size, strategy, bound, sampling.
        journal: the file of the run's events. It is created for a new run; if it exists, the run is resumed from it.
        step: how many batches the host's checkpoint includes; 0 for a new run.
        seed: of the sampling noise.
        observer: called on the feed's thread after each event.

    Raises:
        RunError: the journal and ``step`` do not belong together.
        EngineTimeout: the parts were not open in time.
        RolloverError: any that ``open_parts`` raises.
    """

    def __init__(
        self,
        open_parts: OpenParts,
        rollout: RolloutConfig,
        *,
        journal: Path,
        step: int = 0,
        seed: int = 0,
        deadlines: Deadlines | None = None,
        observer: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._open_parts = open_parts
        self._rollout = rollout
        self._journal_path = journal
        self._first_step = step
        self._seed = seed
        self._deadlines = deadlines or Deadlines()
        self._observer = observer
        self._published: int | None = None
        """The version that this process has published last; an engine that was just opened has none yet."""
        self._is_closed = False
        self._opened: Future[_OpenFeed] = Future()
        self._ended: Future[None] = Future()
        """Done when the thread has ended."""
        self._last_answer_s = time.monotonic()
        """Time at which the event loop was last seen running."""
        self._thread = threading.Thread(target=self._serve, name="rollover-feed", daemon=True)
        self._thread.start()
        try:
            self._open = self._wait(self._opened, self._deadlines.open_timeout_s, "open the engine and its parts")
        except BaseException:
            self._stop_thread()
            raise

    # -- what the host calls ---------------------------------------------------------------------------------

    @property
    def parts(self) -> FeedParts:
        """Return the parts as ``open_parts`` returned them; they may only be used on the feed's event loop."""
        return self._open.parts

    @property
    def next_version(self) -> int:
        """Return the version whose batch comes next: ``step`` at first, one more after each ``batch``."""
        return self._open.driver.ledger.next_step

    @property
    def replayed(self) -> frozenset[int]:
        """Return the steps whose batches an earlier process was handed, and which will be handed out again,
        unchanged."""
        return self._open.replayed

    @property
    def is_decoding(self) -> bool:
        """Return whether samples are running. May be asked from any thread."""
        return bool(self._open.driver.ledger.running)

    def now_s(self) -> float:
        """Return the seconds since the run began, over all its processes, on the journal's clock."""
        return self._open.clock.now_s()

    def batch(self, version: int) -> Batch:
        """Return the batch that weights ``version`` train. It is in the journal when this returns.

        Raises:
            RunError: another batch is next, or the engine's weights are too old, too new or not published yet.
            EngineTimeout: nothing was decoded for the stall limit of ``Deadlines``; names the samples.
            EngineError: the engine does not answer any call.
            DataError: every sample fails.
        """
        return self.run(self._next_batch(version), None, f"collect batch {version}")

    def publish(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Let the engine sample from weights ``version`` from now on.

        Args:
            load: called once, on the feed's event loop: puts the weights into the engine, and returns when they sample
                every later token. Running samples continue during it if the engine supports that; otherwise they are
                stopped before and resumed after it.

        Raises:
            RunError: ``version`` goes back, or is ahead of the batches that the host has received.
            EngineTimeout: ``load`` took longer than ``update_timeout_s``.
            EngineError: any that ``load`` raises.
        """
        self.run(self._publish(version, load), None, f"publish version {version}")

    def trained(self, step: int, untrained: Mapping[WasteCause, int] | None = None) -> None:
        """Record that the host has trained the batch of ``step``. Raises ``RunError`` if this batch was not handed out,
        is already trained or is no longer on record.

        Args:
            untrained: tokens of the batch that had no gradient, by cause. The others count as trained.
        """
        self.run(self._trained(step, untrained or {}), self._deadlines.close_timeout_s, f"record step {step}")

    def saved(self, step: int) -> None:
        """Record that no restart will return to a checkpoint before ``step``. Batches of earlier steps are then
        forgotten, and those of ``step`` and later are kept for such a restart. Raises ``RunError`` if it is more
        batches than were handed out.

        Args:
            step: how many batches the *oldest* checkpoint that the host keeps includes.
        """
        self.run(self._saved(step), self._deadlines.close_timeout_s, f"record the checkpoint at step {step}")

    def account(self) -> dict[str, float]:
        """Return the tokens decoded, trained, live and wasted so far, and the work in flight, by metric name."""
        return self.run(self._account(), self._deadlines.close_timeout_s, "read the account")

    def close(self) -> None:
        """Stop running samples, journal their tokens and close all parts. The run can be resumed from its journal. Does
        nothing when called again.

        Raises:
            EngineTimeout: a part did not close in time; all decoded tokens are in the journal.
            RolloverError: any that the closing parts raise.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_thread()
        timeout_s = self._deadlines.close_timeout_s
        self._thread.join(timeout_s)
        if not self._ended.done():
            raise EngineTimeout(
                f"the feed did not close within {timeout_s:.0f} s: it waits for"
                f" {self._open.parts.engine!r} to stop {len(self._open.driver.ledger.running)} samples, or to close"
            )
        self._ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # the host's own failure takes precedence
            with suppress(Exception):
                self.close()

    # -- on the event loop -----------------------------------------------------------------------------------

    async def _next_batch(self, version: int) -> Batch:
        driver, bound = self._open.driver, self._rollout.staleness_bound
        if version != (expected := driver.ledger.next_step):
            raise RunError(
                f"the trainer asks for batch {version}, but batch {expected} is next: each batch is trained once and in"
                f" order, so resume from a checkpoint that has seen {expected} batches"
            )
        if self._published is None:
            raise RunError(f"batch {version} is asked for before any weights were published: publish them first")
        if not version - bound <= self._published <= version:
            raise RunError(
                f"the engine samples from weights of version {self._published}, but tokens of batch {version} must come"
                f" from versions {max(0, version - bound)} to {version} (rollout.max_staleness is {bound}): publish"
                " newer weights first"
            )
        return await driver.next_batch()

    async def _publish(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        driver, timeout_s = self._open.driver, self._deadlines.update_timeout_s
        oldest, newest = driver.ledger.policy_version, driver.ledger.next_step
        if not oldest <= version <= newest:
            raise RunError(
                f"the trainer publishes weights of version {version}, but the next version must be between {oldest},"
                f" which the engine samples from, and {newest}, the number of batches handed out"
            )

        async def load_in_time() -> None:
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    await load()
            except TimeoutError as error:
                if isinstance(error, EngineError) or not deadline.expired():
                    raise
                raise EngineTimeout(
                    f"{self._open.parts.engine!r} did not take the weights of version {version} within"
                    f" {timeout_s:.0f} s: see what the engine's log says"
                ) from None

        await driver.update_weights(version, load_in_time)
        self._published = version

    async def _trained(self, step: int, untrained: Mapping[WasteCause, int]) -> None:
        driver, ledger = self._open.driver, self._open.driver.ledger
        if step >= ledger.next_step or step not in ledger.batches or step in ledger.untrained:
            why = "is recorded as trained already" if step in ledger.untrained else "is not on record"
            raise RunError(f"batch {step} cannot be recorded as trained: it {why}")
        driver.record(BatchTrained(time_s=self._open.clock.now_s(), step=step, untrained=dict(untrained)))

    async def _saved(self, step: int) -> None:
        driver = self._open.driver
        if not 0 <= step <= driver.ledger.next_step:
            raise RunError(
                f"a checkpoint that has seen {step} batches cannot be recorded: only {driver.ledger.next_step} batches"
                " were handed out"
            )
        driver.saved(step)

    async def _account(self) -> dict[str, float]:
        return ledger_metrics(self._open.driver.ledger)

    # -- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Run the event loop until ``close``."""
        error: BaseException | None = None
        try:
            asyncio.run(self._live())
        except BaseException as e:
            error = e
        if not self._opened.done():
            self._opened.set_exception(error or EngineError("the feed was closed before it was open"))
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(self._open_parts())
            is_new = not self._journal_path.exists()
            if is_new and self._first_step:
                raise RunError(
                    f"{self._journal_path} does not exist, and a checkpoint that has seen {self._first_step} batches"
                    " cannot be resumed without it: put it back, or start a new run from the checkpoint's model"
                )
            journal = Journal(self._journal_path)
            stack.callback(journal.close)
            state = RolloutState() if is_new else restart(journal, step=self._first_step, redo_round=False)
            clock = SystemClock(journal.last_time_s)
            driver = RolloutDriver(
                engine=parts.engine,
                strategy=self._rollout.build_strategy(parts.engine.capabilities),
                source=parts.source,
                scorer=parts.scorer,
                sampling=self._rollout.sampling(parts.stop_token_ids),
                seed=self._seed,
                clock=clock,
                state=state,
                journal=journal,
                limits=Limits.from_config(self._rollout, away_s=self._deadlines.away_timeout_s),
                rules=parts.rules,
                observer=self._observer,
            )
            stack.push_async_callback(driver.stop)
            replayed = frozenset(state.ledger.replay)
            self._opened.set_result(_OpenFeed(parts=parts, driver=driver, clock=clock, replayed=replayed))
            await self._closing.wait()

    def _stop_thread(self) -> None:
        with suppress(AttributeError, RuntimeError):  # it has not started, or has ended
            self._loop.call_soon_threadsafe(self._closing.set)

    # -- waiting ---------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None, what: str) -> T:
        """Run ``work`` on the feed's event loop and return its result. Without ``timeout_s`` it has deadlines of its
        own. Raises ``EngineTimeout``, saying ``what`` it was to do, if it has not ended in time."""
        if self._is_closed or self._ended.done():
            work.close()
            raise RunError(f"the feed is closed: it cannot {what}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self._wait(future, timeout_s, what)
        except BaseException:
            future.cancel()  # Ctrl-C must not leave it running beside the next call
            raise

    def _wait(self, future: Future[T], timeout_s: float | None, what: str) -> T:
        began_s = self._last_answer_s = time.monotonic()
        awaited: tuple[Future[Any], ...] = (future, self._ended)
        while not future.done():
            wait(awaited, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            if future.done():
                break
            if self._ended.done():
                raise EngineError(f"the feed's event loop has ended: it cannot {what}") from self._ended.exception()
            now_s = time.monotonic()
            if timeout_s is not None and now_s - began_s >= timeout_s:
                raise EngineTimeout(f"the feed did not {what} within {timeout_s:.0f} s: see what the engine's log says")
            if self._opened.done():
                self._look(now_s, what)
        return future.result()

    def _look(self, now_s: float, what: str) -> None:
        """Check that the event loop runs: its own deadlines do not work while something blocks it."""
        silent_s = now_s - self._last_answer_s
        if silent_s >= self._rollout.stall_timeout_s + _LOOK_S:
            raise EngineTimeout(
                f"the feed's event loop has been blocked for {silent_s:.0f} s (rollout.stall_timeout_s) and cannot"
                f" {what}: the source of prompts, the scorer or the weight update blocks it"
            )
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._last_answer_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenFeed:
    """The parts and the driver over them."""

    parts: FeedParts
    driver: RolloutDriver
    clock: SystemClock
    replayed: frozenset[int]
