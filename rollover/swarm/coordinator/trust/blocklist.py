"""The workers that were sent away for good, in a file beside the tokens.

Invariants: a worker that was found to lie stays out, even if the trainer is restarted, until the user readmits it with
``rollover workers RUN --trust NAME``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollover.errors import ConfigError, RolloverError
from rollover.swarm.coordinator.trust.shared_table import SharedTable

logger = logging.getLogger(__name__)

FILE_NAME = "sent_away.json"
"""In the swarm's folder of a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedWorker:
    """A worker that was sent away.

    Example: ``BlockedWorker(reason="token 70000, where the vocabulary has 50257", time_s=1.76e9)``
    """

    reason: str
    time_s: float
    """Seconds since 1970, when it was sent away."""


class Blocklist:
    """The blocked workers of a run by name, in ``file``.

    Example: after ``Blocklist(run / "swarm" / FILE_NAME).add("laptop", "its log-probs are 0.2 nats off")`` the laptop
    is in ``listed()``, even in later starts of the run.
    """

    def __init__(self, file: Path) -> None:
        remedy = "delete it, and workers that were sent away may join again"
        self._table = SharedTable(file, BlockedWorker, remedy=remedy)
        self._known = {*self.listed()}

    def listed(self) -> Mapping[str, BlockedWorker]:
        """Return the blocked workers, as the file has them now."""
        return self._table.rows()

    def add(self, name: str, reason: str) -> None:
        """Block a worker from now on. Raises ``ResourceError`` on a full disk, and ``RunError`` for a
        file that cannot be read."""
        with self._table.changing() as rows:
            rows[name] = BlockedWorker(reason=reason, time_s=time.time())
        self._known.add(name)

    def remember(self, name: str, reason: str) -> None:
        """Block a worker from now on; if that cannot be recorded, warn that a restart forgets it."""
        try:
            self.add(name, reason)
        except (RolloverError, OSError) as e:
            logger.warning("%s may join again when the run is restarted: %s", name, e)

    def readmit(self, name: str) -> None:
        """Let a worker come back. Raises ``ConfigError`` when it was not sent away."""
        with self._table.changing() as rows:
            if rows.pop(name, None) is None:
                raise ConfigError(f"{name!r} was not sent away; those that were: {', '.join(sorted(rows)) or 'none'}")

    def readmitted(self) -> set[str]:
        """Return the workers that were in the file at the last call, or were blocked since, and have been removed from
        it."""
        before, self._known = self._known, {*self.listed()}
        return before - self._known
