"""Reads the number that a reward function returned, and says why anything else is refused.

A function returns a list of one number in the widest sense: a list, tuple, array or tensor with an integer, float or
boolean, from Python, numpy, torch or any library whose arrays have ``tolist``. None of these libraries is imported for
this.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from rollover.errors import RewardError
from rollover.types import MAX_REWARD

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


class RefusedReward(RewardError):
    """Raised for a reward that was returned but cannot be used. Scoring the response again would return the same."""


class MisshapenReward(RefusedReward):
    """Raised when the returned value is not a list of one number."""


def single_reward(returned: Any, whose: str) -> float:
    """Read the number that a function returned for one response.

    Raises:
        MisshapenReward: the value is not a list of one number. RefusedReward: the number is ``None`` or cannot be
            trained on.
    """
    values = _plain(returned, "tolist")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or len(values) != 1:
        raise MisshapenReward(f"{whose} must return a list of 1 number, got {_described(returned)}")
    value = _plain(values[0], "item")
    if value is None:
        raise RefusedReward(f"{whose} returned None (does not apply), and there is no other reward; return a number")
    if not isinstance(value, (Real, Decimal)):
        raise MisshapenReward(f"{whose} must return a list of 1 number, got a list of {_described(values[0])}")
    return usable_reward(value, whose)


def usable_reward(value: Any, whose: str) -> float:
    """Convert ``value`` to a float. Raises ``RefusedReward`` when it is not finite, or too large to be trained on."""
    try:
        reward = float(value)
    except OverflowError:  # integers and fractions are unbounded
        raise _too_large(_described(value), whose) from None
    if not math.isfinite(reward):
        raise RefusedReward(f"{whose} returned {reward}, which is not finite")
    if abs(reward) > MAX_REWARD:
        raise _too_large(f"{reward:g}", whose)
    return reward


def _too_large(shown: str, whose: str) -> RefusedReward:
    return RefusedReward(
        f"{whose} returned {shown}, which the trainer's float32 cannot square and sum; stay within {MAX_REWARD:g}"
    )


def _plain(value: Any, method: str) -> Any:
    """Convert ``value`` to Python's own types if it is an array, a tensor or a scalar of some library."""
    convert = getattr(value, method, None)
    if not callable(convert):
        return value
    try:
        return convert()
    except Exception:  # an array of several items, say, which is then described as such
        return value


def _described(value: Any) -> str:
    try:
        shown = " ".join(_SHOWN.repr(value).split())[:80]
    except Exception:  # a user's type may fail at this too
        shown = ""
    return f"{type(value).__name__} {shown}".strip()
