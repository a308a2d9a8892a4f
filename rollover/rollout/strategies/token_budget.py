"""Partial rollouts by token budget, after Kimi k1.5 (arXiv 2501.12599).

A round grants each response a fixed number of new tokens; a longer one is parked and continues in a later round, so
that no round is longer than its budget. Simplified: the repetition detector and the exclusion of earlier segments from
the loss are left out, as they do not concern scheduling. A round that completes too few groups to fill a batch is
followed by another under the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.strategies.config import OverSampling
from rollover.rollout.strategies.oversample import Oversample
from rollover.rollout.strategy import OnFull, Strategy
from rollover.types import FinishReason, SampleId

if TYPE_CHECKING:
    from rollover.rollout.state import View


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget(Oversample):
    """Keeps ``launched_groups`` groups in flight; each sample runs until it ends or its budget is spent, even after the
    batch is full."""

    round_budget: int
    """New tokens per sample and round."""

    on_full = OnFull.WAIT

    def samples_to_start(self, view: View) -> Iterator[SampleId]:
        """Return the samples with budget left under these weights. Once none is left and none runs, all get a new
        budget; otherwise nothing would ever move again."""
        in_order = Strategy.samples_to_start(self, view)
        if view.ledger.running:
            return (i for i in in_order if not self._has_spent(view, i))
        at_rest = list(in_order)
        with_budget = [i for i in at_rest if not self._has_spent(view, i)]
        return iter(with_budget or at_rest)

    def token_budget(self, view: View, sample_id: SampleId) -> int:
        return self.round_budget

    def _has_spent(self, view: View, sample_id: SampleId) -> bool:
        """Return whether its last call ended at its budget: it may also have failed or been stopped. A new turn of an
        episode has a budget of its own."""
        if sample_id not in view.ledger.parked:
            return False
        last = view.ledger.sample(sample_id).segments[-1]
        is_spent = last.finish_reason is FinishReason.ABORT and len(last.token_ids) >= self.round_budget
        return is_spent and last.policy_version == view.ledger.policy_version


@dataclass(frozen=True, kw_only=True)
class TokenBudgetConfig(OverSampling):
    """Grants each sample a number of new tokens per round."""

    builds = TokenBudget

    kind: Literal["token_budget"] = "token_budget"
    tokens_per_round: int | None = None
    """New tokens granted to a sample per round; a quarter of `max_new_tokens` when left out."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "tokens_per_round")

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        budget = self.tokens_per_round or -(-shared.max_new_tokens // 4)
        return {**super().arguments(shared, engine), "round_budget": budget}
