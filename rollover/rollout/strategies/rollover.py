"""Rollover's own strategy: the user sets a lag, and it finds the rounds that reach it with the fewest decode
iterations.

What determines the curve of throughput against lag, and how this strategy uses it (``docs/theory.md``):

* Several batches from one round share its tail. ``best_rounds`` weighs that against stopping early and carrying
  the rest over, as APRIL (arXiv 2509.18521) does, with recent lengths: if many responses reach the cap, it waits for
  all and trains more batches at a time; if a few stragglers hold up the rest, it carries them over, unless prefilling
  them again under new weights takes longer than waiting.
* Rounds of two kinds take turns, so that the mean lag of batches is the target, whatever it is.
* Each batch of a round has the same mix of lengths, so that no batch is biased and rewards do not follow the lengths.
* Single samples (``rollout.unit = "sample"``). Whole groups wait for their longest sibling, which is 40-48 % of the lag
  of their tokens. It needs an advantage that compares no siblings (``algorithm.advantage = "history"``).

Nothing is discarded, carried-over work goes first, and the staleness bound is a theorem as for ``april``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout import staleness
from rollover.rollout.overlap import Machine, best_overlapped_rounds
from rollover.rollout.round import Round, best_rounds, stratified
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies.config import Knob, StrategyConfig
from rollover.rollout.strategy import OnFull, Strategy
from rollover.settings.changes import Inexact
from rollover.types import UNBOUNDED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollover.rollout.records import GroupRecord
    from rollover.rollout.state import View

_RAMP_STEPS = 5
"""Lag grows over this many steps at first: a sudden surplus would fill the first batches with short responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollover(Strategy):
    """Sizes its rounds so that batches are ``target_lag`` versions old on average.

    Example: ``Rollover(batch_size=32, group_size=8, max_staleness=4, target_lag=1.0, num_running=256,
    prefill_tokens_per_iteration=150.0)`` collects the first batch synchronously, since no lengths are known, and later
    ones at a mean lag of about 1 version.
    """

    target_lag: float
    """Mean lag of batches, in versions: the mean over batches of the mean age of their tokens."""
    num_running: int
    """Samples that the engine decodes at the same time."""
    prefill_tokens_per_iteration: float
    """Tokens that the engine prefills in the time of a decode iteration; infinite when nothing is prefilled again."""

    on_full = OnFull.PARK

    def groups_to_open(self, view: View) -> int:
        if _is_collected(view, self.batch_size):
            return 0
        found = self.round(view)
        launched = math.ceil(self.batch_size * found.num_batches * found.ratio)
        return max(0, min(launched - view.ledger.num_unconsumed, self.headroom(view)))

    def select_batch(self, view: View) -> tuple[int, ...] | None:
        wanted = self.batch_size * self.round(view).num_batches
        if not _is_collected(view, self.batch_size) and len(view.ledger.ready) < wanted:
            return None
        return self._stratified(view, list(view.ledger.ready.values()))

    def _stratified(self, view: View, groups: Sequence[GroupRecord]) -> tuple[int, ...] | None:
        chosen = {group.group_id for group in stratified(groups, self.batch_size)}
        return staleness.choose_batch(
            view.ledger,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            order=lambda group: group.group_id not in chosen,
        )

    def round(self, view: View) -> Round:
        """Return the round that is being collected. It changes when a batch is consumed, and with ``overlap``
        also when weights are published, since these measure the pace."""
        younger, older = self._best(view, self.target_lag * min(1.0, view.ledger.next_step / _RAMP_STEPS))
        return older if view.statistics.lag.mean <= self.target_lag else younger

    def _best(self, view: View, target_lag: float) -> tuple[Round, Round]:
        return best_rounds(
            view.statistics.lengths,
            target_lag=target_lag,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            num_running=self.num_running,
            prefill_tokens_per_iteration=self.prefill_tokens_per_iteration,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedRollover(Rollover):
    """Begins a round while the last batches of the one before are trained, and loads each version under running
    samples. A batch is trained as soon as enough groups are whole.

    Example: with rounds of two batches of which one may be untrained when the next round begins, 64 groups are opened
    at a time, once all earlier ones are whole and all but 32 of them are trained.
    """

    on_full = OnFull.KEEP

    def groups_to_open(self, view: View) -> int:
        ledger, size, found = view.ledger, self.batch_size, self.round(view)
        launched = math.ceil(size * found.num_batches * found.ratio)
        is_collected = len(ledger.open) <= launched - size * found.num_batches
        collected, left_over = divmod(len(ledger.ready), size)
        if not is_collected or collected + ledger.next_step - ledger.policy_version > found.num_untrained:
            return 0
        return max(0, min(launched - len(ledger.open) - left_over, self.headroom(view)))

    def select_batch(self, view: View) -> tuple[int, ...] | None:
        """Take groups that started under old weights first, so that none waits behind the groups of a later round."""
        in_order = sorted(view.ledger.ready.values(), key=lambda group: group.start_version or 0)
        if len(in_order) < self.batch_size:
            return None
        newest = in_order[self.batch_size - 1].start_version
        return self._stratified(view, [g for g in in_order if (g.start_version or 0) <= (newest or 0)])

    def _best(self, view: View, target_lag: float) -> tuple[Round, Round]:
        statistics = view.statistics
        return best_overlapped_rounds(
            statistics.lengths,
            target_lag=target_lag,
            max_staleness=self.max_staleness,
            batch_size=self.batch_size,
            machine=Machine(
                training=statistics.training_iterations,
                b0=statistics.pace.b0,
                num_running=self.num_running,
                prefill_tokens_per_iteration=self.prefill_tokens_per_iteration,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RolloverConfig(StrategyConfig):
    """Collects as many batches at a time, and over-samples as much, as a target for the mean lag allows."""

    builds = Rollover
    knob = Knob(key="lag_target", symbol="lag", scale="plain", values=(0.25, 0.5, 1.0, 1.5, 2.0, 3.0))

    kind: Literal["rollover"] = "rollover"
    lag_target: float = 1.0
    """Target for the mean lag of batches, in versions."""
    overlap: bool = False
    """Go on decoding while a batch is trained, for a trainer with devices of its own: the next round begins while the
    last batches are trained, if that shortens a step enough for its lag. New weights are loaded under running
    samples."""
    prefill_tokens_per_iteration: Inexact[Annotated[float | None, UNBOUNDED]] = None
    """Weighs the cost of recomputing KV caches: response tokens that the engine, or all servers together, can prefill
    in the time of a decode iteration with few samples. When left out: 20 for the embedded engine on a CPU, 150 for it
    on a GPU and for each server, and `inf`, which means no cost at all, when `engine.kv_on_update` is `keep`."""

    def __post_init__(self) -> None:
        self.require_at_least(0, "lag_target")
        prefilled = self.prefill_tokens_per_iteration
        if prefilled is not None and not prefilled > 0:
            raise ValueError(f"rollout.strategy.prefill_tokens_per_iteration must be above 0, got {prefilled}")

    @property
    def overlaps_training(self) -> bool:
        return self.overlap

    def build(self, shared: SharedConfig, engine: Capabilities) -> Strategy:
        return (OverlappedRollover if self.overlap else Rollover)(**self.arguments(shared, engine))

    def describe(self, shared: SharedConfig) -> str:
        return f"a mean lag of {self.lag_target:g}"

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        prefilled = self.prefill_tokens_per_iteration
        return {
            **super().arguments(shared, engine),
            "target_lag": self.lag_target,
            "num_running": engine.max_running,
            "prefill_tokens_per_iteration": engine.prefill_tokens_per_iteration if prefilled is None else prefilled,
        }


def _is_collected(view: View, batch_size: int) -> bool:
    """Return whether a round has been collected: there is a batch, and either all groups are whole or batches of the
    round have been trained. While a sample acts, awaits its reward or can start, its group may need to be in the mix
    of the first batch."""
    ledger = view.ledger
    return len(ledger.ready) >= batch_size and not (ledger.open and ledger.has_started)
