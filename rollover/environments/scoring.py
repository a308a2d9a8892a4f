"""Scores responses with one reward and reports the values, or why there are none, in JSON, so that no reason and its
kind get lost between a reward process and the run."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollover.environments.reward_value import MisshapenReward, RefusedReward, RewardValue
from rollover.environments.rewards.base import GroupReward, Reward, RewardSample
from rollover.errors import DataError, RewardError, printable

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
    """Holds the values of one or several responses, or the reason why there are none."""

    values: Sequence[RewardValue] = ()
    failure: Failure | None = None
    reason: str = ""

    def rewards(self) -> Sequence[RewardValue]:
        """Return the values, one per response. Raises the ``RewardError`` that stands for the failure."""
        if self.failure is not None:
            raise _ERRORS[self.failure](self.reason)
        return self.values


Values = RewardValue | Sequence[RewardValue]
"""The value of one response, or the values of a group, as a reward returns them."""


def begin_score(reward: Reward | GroupReward, samples: Sequence[RewardSample]) -> Values | Awaitable[Values]:
    """Call the reward with one response, or with all of a group if it compares them."""
    if hasattr(reward, "score_group"):
        return reward.score_group(samples)
    (sample,) = samples
    return reward.score(sample)


def scored(values: Values) -> ScoringResult:
    return ScoringResult(values=values if isinstance(values, list) else [values])  # type: ignore[list-item]


async def score_once(reward: Reward | GroupReward, samples: Sequence[RewardSample]) -> ScoringResult:
    """Score ``samples`` on the event loop of the run. Any error that a reward raises fails its samples, never the run;
    only Ctrl-C and the cancellation or the closing of the caller are passed on."""

    async def score() -> Values:
        values = begin_score(reward, samples)
        return await values if isinstance(values, Awaitable) else values

    return await settled(score())


async def settled(values: Awaitable[Values], *, own_process: bool = False) -> ScoringResult:
    """Await a score like ``score_once``. In a reward process (``own_process``), which Ctrl-C does not reach, an
    interrupt is an error of the reward too."""
    task = asyncio.current_task()
    try:
        return scored(await values)
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
    text = " ".join(printable(text[:_LONGEST_REASON]).split()) + ("..." if len(text) > _LONGEST_REASON else "")
    return f"{type(error).__name__}{text and f': {text}'}{place}"
