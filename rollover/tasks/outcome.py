"""What came of one scoring, as JSON: between a reward process and the run, a reason and its kind must not get lost."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rollover.errors import DataError, RewardError
from rollover.tasks.returns import MisshapenReward, RefusedReward
from rollover.tasks.rewards import Reward, RewardSample

_LONGEST_REASON = 400
"""Characters of a message of the user's code that are passed on."""

Failure = Literal["raised", "refused", "misshapen"]

_ERRORS: dict[Failure, type[RewardError]] = {
    "raised": RewardError,
    "refused": RefusedReward,
    "misshapen": MisshapenReward,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A reward, or why there is none."""

    reward: float | None = None
    failure: Failure | None = None
    reason: str = ""

    def number(self) -> float:
        """The reward. Raises the ``RewardError`` that stands for the failure."""
        if self.failure is not None:
            raise _ERRORS[self.failure](self.reason)
        assert self.reward is not None
        return self.reward

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        return cls(reward=value["reward"], failure=value["failure"], reason=value["reason"])


async def outcome(reward: Reward, sample: RewardSample) -> Outcome:
    """Score ``sample``. Only Ctrl-C and the cancellation of the caller come through."""
    try:
        return Outcome(reward=await reward.score(sample))
    except RewardError as error:
        failure: Failure = next(name for name, kind in reversed(_ERRORS.items()) if isinstance(error, kind))
        return Outcome(failure=failure, reason=str(error))
    except (Exception, SystemExit) as error:  # whatever a reward raises fails its sample, never the run
        return Outcome(failure="raised", reason=_reason(error))
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return Outcome(failure="raised", reason="it cancelled itself")


def _reason(error: BaseException) -> str:
    """Why a scoring failed, in one line: our own errors speak for themselves, others with type and place."""
    if isinstance(error, DataError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    text = str(error)
    text = " ".join(text[:_LONGEST_REASON].split()) + ("..." if len(text) > _LONGEST_REASON else "")
    return f"{type(error).__name__}: {text}{place}"
