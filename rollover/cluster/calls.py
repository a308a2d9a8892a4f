"""Calls of the actors on a cluster, each with a deadline that names whom it waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollover.trainer.leading import RankLost


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Calls the hosts of ranks.

    Args:
        ray: the module.
        actors: of each rank.
        timeout_s: how long each answer is waited for.

    Example: ``HostCalls(ray, actors, 600.0).all("loading", [(actor.end, ()) for actor in actors])``
    """

    ray: Any
    actors: Sequence[Any]
    timeout_s: float

    def all(self, doing: str, calls: Iterable[tuple[int, Any]], *, timeout_s: float | None = None) -> list[Any]:
        """Return the answers to ``calls`` that were made, each with the rank whose host was called.

        Raises ``RankLost`` naming the first that does not answer in time or was lost.
        """
        return [self.one(doing, rank, answer, timeout_s=timeout_s) for rank, answer in calls]

    def one(self, doing: str, rank: int, answer: Any, *, timeout_s: float | None = None) -> Any:
        """Return one answer. Raises as ``all`` does."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return self.ray.get(answer, timeout=limit_s)
        except self.ray.exceptions.GetTimeoutError as error:
            message = f"the host of {self._name(rank)} did not answer within {limit_s:g} s during {doing}"
            raise RankLost(message) from error
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise RankLost(f"the host of {self._name(rank)} failed during {doing}: {_last_line(cause)}") from error
        except self.ray.exceptions.RayError as error:
            raise RankLost(f"{self._name(rank)} was lost with its host during {doing}: {lost(error)}") from error

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.actors)}"


_SIGNS = {
    "node has died": "that node is gone",
    "node was terminated": "that node is gone",
    "ray.kill": "it was ended with ray.kill",
    "worker process has died": "its process died; was the node out of memory?",
    "unavailable": "it cannot be reached: its node or its process is gone",
}
"""Parts of Ray's messages, and what they mean here."""


def lost(error: BaseException) -> str:
    """Say in a line why an actor cannot be called any more.

    Example: "that node is gone"
    """
    text = str(error)
    return next((meaning for sign, meaning in _SIGNS.items() if sign in text), _last_line(error))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
