"""The state of a swarm for people: who is connected, with which weights, at what speed, and who was sent away why.

The coordinator writes it to a file from time to time; ``rollover workers RUN`` reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rollover.errors import RunError
from rollover.swarm.coordinator.coordinator import Coordinator
from rollover.swarm.publication.blobs import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as it is now.

    Example: ``WorkerStatus(name="laptop", state="connected", version=7, lag=1, num_calls=4, max_running=16, ...)``
    """

    name: str
    state: str
    """``ready``, ``loading`` (connected, without weights that it may sample from), ``away`` or ``sent away``."""
    version: int | None
    lag: int | None
    """Versions that it is behind the newest publication."""
    num_calls: int
    max_running: int
    tokens_per_s: float
    num_decoded: int
    num_held: int
    """Tokens that it holds until they are journaled."""
    note: str
    """Why it was sent away, or what went wrong last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """A swarm as it is now.

    Example: ``SwarmStatus(url="ws://127.0.0.1:8790", version=8, num_waiting=0, time_s=1.76e9, workers=(...))``
    """

    url: str
    version: int
    num_waiting: int
    """Calls that no member has."""
    time_s: float
    """Seconds since 1970, when it was written."""
    workers: tuple[WorkerStatus, ...]


def swarm_status(coordinator: Coordinator, url: str) -> SwarmStatus:
    """Return the state of a swarm."""
    return SwarmStatus(
        url=url,
        version=coordinator.head.version,
        num_waiting=coordinator.num_waiting,
        time_s=time.time(),
        workers=tuple(_workers(coordinator)),
    )


def _workers(coordinator: Coordinator) -> Iterable[WorkerStatus]:
    for name, member in sorted(coordinator.members.items()):
        serving = member.serves(checked=coordinator.checks)
        state = (
            "sent away" if member.distrust or member.is_revoked else
            "ready" if serving is not None else
            "loading" if member.is_connected else
            "away"
        )  # fmt: skip
        yield WorkerStatus(
            name=name,
            state=state,
            version=member.version,
            lag=None if member.version is None else coordinator.head.version - member.version,
            num_calls=len(member.calls),
            max_running=0 if member.ready is None else member.ready.max_running,
            tokens_per_s=member.tokens_per_s if member.is_connected else 0.0,
            num_decoded=member.num_decoded,
            num_held=member.num_held,
            note=member.distrust or ("" if state == "ready" else member.last_error),
        )


class StatusFile:
    """The file through which other processes see the state of a swarm.

    Example: ``StatusFile(run / "swarm/status.json").read().workers`` while the run is at work.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, status: SwarmStatus) -> None:
        replace_file(self.path, json.dumps(asdict(status), indent=1).encode() + b"\n")

    def read(self) -> SwarmStatus:
        """Raises ``RunError`` when there is none."""
        try:
            found = json.loads(self.path.read_text())
            workers = tuple(WorkerStatus(**worker) for worker in found.pop("workers"))
            return SwarmStatus(**found, workers=workers)
        except FileNotFoundError:
            raise RunError(
                f"{self.path.parents[1]} has no swarm: its engine.kind is another, or it was never started"
            ) from None
        except (ValueError, TypeError, KeyError) as e:
            raise RunError(f"{self.path} cannot be read: {e}") from None
