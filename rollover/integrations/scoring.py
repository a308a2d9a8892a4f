"""Rewards that a host computes, one response at a time; its answers are kept until their batch is handed out."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from rollover.errors import RewardError
from rollover.types import SampleId, Trajectory

T = TypeVar("T")


class HostScorer(ABC, Generic[T]):
    """Implements ``Scorer`` with a host's answers: its own sample, say, or a table.

    Args:
        timeout_s: longest wait for an answer.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._answers: dict[SampleId, T] = {}

    @abstractmethod
    async def ask(self, trajectory: Trajectory) -> T:
        """Return the host's answer."""

    @abstractmethod
    def reward(self, answer: T) -> float:
        """Return the reward in an answer."""

    async def score(self, trajectory: Trajectory) -> float:
        """Return the reward of a response. Raises ``RewardError`` when none comes in time."""
        answer = await self.asked(trajectory)
        self._answers[trajectory.sample_id] = answer
        return self.reward(answer)

    async def asked(self, trajectory: Trajectory) -> T:
        """Return the host's answer. Raises ``RewardError`` when none comes in time."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return await self.ask(trajectory)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RewardError(f"its reward took longer than {self._timeout_s:g} s (reward_timeout_s)") from None

    def kept(self, sample_id: SampleId) -> T | None:
        """Return the answer about a scored response, and stop keeping it."""
        return self._answers.pop(sample_id, None)

    def forget(self, group_id: int) -> None:
        """Delete the answers about a group that was dropped."""
        for sample_id in [i for i in self._answers if i.group == group_id]:
            del self._answers[sample_id]
