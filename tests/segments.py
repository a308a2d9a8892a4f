"""Segments of responses, in which every token has the same log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
