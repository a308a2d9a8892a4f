"""Scores one response and reports the reward, or why there is none, in JSON, so that no reason and its kind get lost
between a reward process and the run."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Literal

from rollover.environments.reward_value import MisshapenReward, RefusedReward
from rollover.environments.rewards.base import Reward, RewardSample
from rollover.errors import DataError, RewardError

_LONGEST_REASON = 400
"""Maximum number of characters that are passed on from a message of the user's code."""

Failure = Literal["raised", "refused", "misshapen"]

_ERRORS: dict[Failure, type[RewardError]] = {
    "raised": RewardError,
    "refused": RefusedReward,
    "misshapen": MisshapenReward,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringResult:
    """Holds a reward, or the reason why there is none.

    Example: ``ScoringResult(failure="raised", reason="KeyError: 'answer' (mine.py, line 7)")``.
    """

    reward: float | None = None
    failure: Failure | None = None
    reason: str = ""

    def number(self) -> float:
        """Return the reward. Raises the ``RewardError`` that stands for the failure."""
        if self.failure is not None:
            raise _ERRORS[self.failure](self.reason)
        assert self.reward is not None
        return self.reward


async def score_once(reward: Reward, sample: RewardSample) -> ScoringResult:
    """Score ``sample`` on the event loop of the run. Any error that a reward raises fails its sample, never the run;
    only Ctrl-C and the cancellation or the closing of the caller are passed on."""

    async def score() -> float:
        score = reward.score(sample)
        return await score if isinstance(score, Awaitable) else score

    return await settled(score())


async def settled(score: Awaitable[float], *, own_process: bool = False) -> ScoringResult:
    """Await a score like ``score_once``. In a reward process (``own_process``), which Ctrl-C does not reach, an
    interrupt is an error of the reward too."""
    task = asyncio.current_task()
    try:
        return ScoringResult(reward=await score)
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        return failed(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not own_process:
            raise
        if isinstance(error, GeneratorExit) and not _runs(task):
            raise
        return failed(error)


def failed(error: BaseException) -> ScoringResult:
    """Return the result of a scoring that ended with ``error``."""
    if isinstance(error, RewardError):
        failure: Failure = next(name for name, kind in reversed(_ERRORS.items()) if isinstance(error, kind))
        return ScoringResult(failure=failure, reason=str(error))
    cancelled = isinstance(error, asyncio.CancelledError)
    return ScoringResult(failure="raised", reason="it cancelled itself" if cancelled else _reason(error))


def _runs(task: asyncio.Task[Any] | None) -> bool:
    """Return whether ``task`` runs now; a coroutine that is closed from outside does not."""
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


def _reason(error: BaseException) -> str:
    """Describe in one line why a scoring failed: our own errors by their message, others with type and place."""
    if isinstance(error, DataError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:  # a user's type may fail at this too
        text = ""
    text = " ".join(text[:_LONGEST_REASON].split()) + ("..." if len(text) > _LONGEST_REASON else "")
    return f"{type(error).__name__}{text and f': {text}'}{place}"
