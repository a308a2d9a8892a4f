"""Answers of the hosts of ranks: each has a deadline, and an error names the rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollover.trainer.leading import RankLost


def answers(ray: Any, asked: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Return what the hosts answer that were asked at the start, each within ``timeout_s``.

    Raises ``RankLost`` naming the first rank whose host does not answer in time, fails or was lost."""
    return [_answer(ray, each, f"rank {rank} of {len(asked)}", timeout_s) for rank, each in enumerate(asked)]


def _answer(ray: Any, asked: Any, name: str, timeout_s: float) -> Any:
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise RankLost(f"the host of {name} did not answer within {timeout_s:g} s at the start") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        raise RankLost(f"the host of {name} failed at the start: {_last_line(cause)}") from error
    except ray.exceptions.RayError as error:
        raise RankLost(f"{name} was lost with its host at the start: {lost(error)}") from error


_SIGNS = {
    "node has died": "that node is gone",
    "node was terminated": "that node is gone",
    "ray.kill": "it was ended with ray.kill",
    "worker process has died": "its process died; was the node out of memory?",
    "unavailable": "it cannot be reached: its node or its process is gone",
}
"""Parts of Ray's messages, and what they mean here."""


def lost(error: BaseException) -> str:
    """Say in a line why an actor cannot be called any more."""
    text = str(error)
    return next((meaning for sign, meaning in _SIGNS.items() if sign in text), _last_line(error))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
