"""Reads the numbers that a reward function returned, and says why anything else is refused.

A function returns a list of one number per response in the widest sense: a list, tuple, array or tensor of integers,
floats or booleans, from Python, numpy, torch or any library whose arrays have ``tolist``. None of these libraries is
imported for this. In place of a number there may be a dict of named numbers, the components of the reward, or ``None``,
which says that the reward does not apply to the response.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from rollover.errors import RewardError
from rollover.types import MAX_REWARD

RewardValue = float | dict[str, float] | None
"""A number, numbers by the names of components, or ``None`` for a response that the reward does not apply to."""

COMPONENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MOST_COMPONENTS = 32
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


class RefusedReward(RewardError):
    """Raised for a reward that was returned but cannot be used. Scoring the response again would return the same."""


class MisshapenReward(RefusedReward):
    """Raised when the returned value is not a list of one number per response. A function whose first value is that is
    wrong and ends the run."""


def read_rewards(returned: Any, whose: str, num: int = 1, *, wanted: str = "") -> list[RewardValue]:
    """Read what a function returned for ``num`` responses; for a single one, a dict need not be in a list. ``wanted``:
    what the function must return, if it is no list.

    Example: ``read_rewards([{"exact": 1, "style": None}], "f")`` is ``[{"exact": 1.0}]``.

    Raises:
        MisshapenReward: the value is not a list of one number (or dict of numbers, or ``None``) per response.
        RefusedReward: a number cannot be trained on.
    """
    a_list = "" if wanted else "a list of "
    wanted = f"{whose} must return {wanted or f'a list of {num} number' + 's' * (num > 1)}"
    values = [returned] if num == 1 and isinstance(returned, Mapping) else _plain(returned, "tolist")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)) or len(values) != num:
        raise MisshapenReward(f"{wanted}, got {_described(returned)}")

    def number(value: Any, place: str = a_list) -> float | None:
        plain = _plain(value, "item")
        if plain is None:
            return None
        if not isinstance(plain, (Real, Decimal)):
            raise MisshapenReward(f"{wanted}, got {place}{_described(value)}")
        return usable_reward(plain, whose)

    def components(value: Mapping[Any, Any]) -> dict[str, float]:
        names = list(value)[: _MOST_COMPONENTS + 1]
        if not 1 <= len(names) <= _MOST_COMPONENTS:
            raise MisshapenReward(
                f"{wanted}, got {_described(value)}; a dict must have 1 to {_MOST_COMPONENTS} entries"
            )
        if bad := [name for name in names if not (isinstance(name, str) and COMPONENT_NAME.fullmatch(name))]:
            raise MisshapenReward(
                f"{whose} returned a component named {_described(bad[0])}; name it with up to 64 letters, digits, '_', "
                "'-' and '.'"
            )
        found = {name: number(value[name], f"a dict whose {name!r} is ") for name in names}
        return {name: one for name, one in found.items() if one is not None}

    return [(components(one) or None) if isinstance(one, Mapping) else number(one) for one in values]


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
