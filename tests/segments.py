"""Segments of responses, in which every token has the same log-prob, and the batches of a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollover.batch import Batch
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, Segment


def segment(
    tokens: int | Sequence[int],
    reason: FinishReason | None = FinishReason.STOP,
    *,
    version: int = 0,
    start_s: float = 0.0,
    end_s: float = 1.0,
    **more: Any,
) -> Segment:
    """``tokens`` are ids or their number."""
    ids = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    return Segment(version, ids, (-1.0,) * len(ids), reason, version, start_s, end_s, **more)


def batch_of(state: RolloutState, step: int) -> Batch:
    """The batch that was consumed at a step, which is newer than the last checkpoint."""
    return Batch(step=step, groups=state.view.groups(state.ledger.batches[step]))
