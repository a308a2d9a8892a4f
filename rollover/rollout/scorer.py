"""Scores finished responses: the reward of each, or the reason why it has none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeGuard

from rollover.errors import RewardError, RolloverError
from rollover.types import Trajectory


class Scorer(Protocol):
    """Turns a finished trajectory into a reward, with deadlines and retries of its own.

    Example: ``await scorer.score(trajectory)`` returns 1.0 for a right answer, or a ``Score`` if the reward has
    components. It raises ``RewardError`` when it gives up on this trajectory (``NoReward`` when none applies to it),
    and another ``RolloverError`` when trying others would be futile.
    """

    async def score(self, trajectory: Trajectory) -> float: ...


class GroupScorer(Scorer, Protocol):
    """A scorer that scores the finished responses of a group together, if their source asks for that: once the last one
    has ended.

    Example: ``await scorer.score_group(siblings)`` returns ``[1.0, 0.0]``, the ranks of two responses, or the
    ``RewardError`` of each that has none.
    """

    def compares_siblings(self, source: str) -> bool: ...

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[float | RewardError]: ...


def compares_siblings(scorer: Scorer, source: str) -> TypeGuard[GroupScorer]:
    """Return whether the responses to a prompt of this source are scored together."""
    return hasattr(scorer, "compares_siblings") and scorer.compares_siblings(source)


async def scores_of(scorer: Scorer, trajectories: Sequence[Trajectory]) -> Sequence[float | RewardError]:
    """Return the reward of each trajectory, or its error. They are one, or siblings that are scored together.

    Raises:
        RolloverError: a mistake that would affect every other sample too.
    """
    try:
        if compares_siblings(scorer, trajectories[0].prompt.source):
            return await scorer.score_group(trajectories)
        return [await scorer.score(trajectory) for trajectory in trajectories]
    except RewardError as e:
        return [e] * len(trajectories)
    except RolloverError:
        raise
    except Exception as e:
        return [RewardError(f"{type(e).__name__}: {e}")] * len(trajectories)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return [RewardError("the scorer cancelled it")] * len(trajectories)  # a worker was shut down, say
