"""Rewards from verl's reward workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rollover.errors import RewardError
from rollover.integrations.verl.fields import reward_input
from rollover.integrations.verl.rows import Row
from rollover.types import Prompt, SampleId, Trajectory


class VerlScorer:
    """Implements ``Scorer`` with verl's reward workers, each used in turn.

    Args:
        workers: their Ray handles.
        row: returns the row of a prompt.
        timeout_s: longest wait for a reward.

    Example: ``await scorer.score(trajectory)`` is 1.0, and ``scorer.take(trajectory)`` is the worker's answer.
    """

    def __init__(self, workers: Sequence[Any], row: Callable[[Prompt], Row], *, timeout_s: float) -> None:
        self._workers = itertools.cycle(workers)
        self._row = row
        self._timeout_s = timeout_s
        self._said: dict[SampleId, dict[str, Any]] = {}

    async def score(self, trajectory: Trajectory) -> float:
        """Return the reward of a response. Raises ``RewardError`` when none comes in time."""
        asked = next(self._workers).compute_score.remote(reward_input(trajectory, self._row(trajectory.prompt)))
        try:
            async with asyncio.timeout(self._timeout_s):
                said = await asyncio.ensure_future(asked)
        except TimeoutError:
            raise RewardError(f"its reward took longer than {self._timeout_s:g} s (reward_timeout_s)") from None
        self._said[trajectory.sample_id] = said
        return float(said["reward_score"])

    def take(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the worker's answer about a scored trajectory, and stop keeping it."""
        return self._said.pop(trajectory.sample_id)

    def forget(self, group_id: int) -> None:
        """Delete the answers about a group that was dropped."""
        for sample_id in [i for i in self._said if i.group == group_id]:
            del self._said[sample_id]
