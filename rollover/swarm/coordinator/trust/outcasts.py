"""The workers that were sent away for good: a file beside the tokens, so that no restart of the run forgets them.

What it keeps true: a worker that was found to lie stays out, even if the trainer is restarted, until the user decides
otherwise with ``rollover workers RUN --trust NAME``.
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
class Outcast:
    """A worker that was sent away.

    Example: ``Outcast(reason="token 70000, where the vocabulary has 50257", time_s=1.76e9)``
    """

    reason: str
    time_s: float
    """Seconds since 1970, when it was sent away."""


class Outcasts:
    """The outcasts of a run by name, in ``file``.

    Example: after ``Outcasts(run / "swarm" / FILE_NAME).add("laptop", "its log-probs are 0.2 nats off")`` the laptop is
    in ``listed()``, even in later starts of the run.
    """

    def __init__(self, file: Path) -> None:
        remedy = "delete it, and workers that were sent away may join again"
        self._table = SharedTable(file, Outcast, remedy=remedy)
        self._known = {*self.listed()}

    def listed(self) -> Mapping[str, Outcast]:
        """Return the outcasts, as the file has them now."""
        return self._table.rows()

    def add(self, name: str, reason: str) -> None:
        """Write down that a worker is sent away now. Raises ``ResourceError`` on a full disk, and ``RunError`` for a
        file that cannot be read."""
        with self._table.changing() as rows:
            rows[name] = Outcast(reason=reason, time_s=time.time())
        self._known.add(name)

    def remember(self, name: str, reason: str) -> None:
        """Write down that a worker is sent away now; if that cannot be done, warn that a restart forgets it."""
        try:
            self.add(name, reason)
        except (RolloverError, OSError) as e:
            logger.warning("%s may join again when the run is restarted: %s", name, e)

    def pardon(self, name: str) -> None:
        """Let a worker come back. Raises ``ConfigError`` when it was not sent away."""
        with self._table.changing() as rows:
            if rows.pop(name, None) is None:
                raise ConfigError(f"{name!r} was not sent away; those that were: {', '.join(sorted(rows)) or 'none'}")

    def pardoned(self) -> set[str]:
        """Return those that were in the file when this was asked last, or that we have written since, and that are not
        there any more."""
        before, self._known = self._known, {*self.listed()}
        return before - self._known
