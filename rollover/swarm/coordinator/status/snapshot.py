"""The state of a swarm for people: who is connected, with which weights, at what speed, and who was sent away why.

The coordinator writes it to a file from time to time; ``rollover workers RUN`` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollover.errors import RunError
from rollover.privacy import redacted_text
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.members import SwarmMember
from rollover.swarm.publication.blobs import replace_file
from rollover.swarm.publication.publications import PublishedWeights

STATUS = "status.json"
_MAX_NOTE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as it is now."""

    name: str
    state: str
    """``ready``; ``full`` (it holds all the tokens that it may, and stands still until they are journaled); ``loading``
    (connected, without weights yet); ``checking`` (its log-probs under new weights are being compared, before it gets
    further calls); ``away`` or ``sent away``."""
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
    """The reason why it was sent away, or what is wrong with it."""
    drift: float | None = None
    """Mean distance of the log-probs that it reported from the trainer's, in nats, over its tokens in the last batch
    that had some of the weights in force."""
    prepare_s: float | None = None
    """Time that it took to fetch, verify and materialise weights, the last time."""
    pause_s: float | None = None
    """Time that its engine stood still for them."""
    wire_bytes: int = 0
    """Bytes that it fetched for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """A swarm as it is now. What has a default is unknown until it is measured."""

    url: str
    version: int
    num_waiting: int
    """Calls that no member has."""
    time_s: float
    """Seconds since 1970, when it was written."""
    workers: tuple[WorkerStatus, ...]
    run: str = ""
    mode: str = ""
    page: str = ""
    """The address of the live page."""
    convergence_s: float | None = None
    """Time from a publication until the last worker served it, among those of the last step that had any."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts of what the protocol absorbed."""
    publications: tuple[PublishedWeights, ...] = ()
    """The newest last."""
    step: int | None = None
    """The training step that ended last, and its metrics by their names in ``metrics.jsonl``."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def swarm_status(coordinator: Coordinator, url: str) -> SwarmStatus:
    return SwarmStatus(
        url=url,
        version=coordinator.head.version,
        num_waiting=coordinator.num_waiting,
        time_s=time.time(),
        workers=tuple(_workers(coordinator)),
        counters=dict(coordinator.counters),
    )


def _workers(coordinator: Coordinator) -> Iterable[WorkerStatus]:
    for name, member in sorted(coordinator.members.items()):
        serving = member.serves(checked=coordinator.checks)
        state = (
            "sent away" if member.distrust or member.is_revoked else
            "full" if serving is not None and member.is_full else
            "ready" if serving is not None else
            "checking" if member.is_connected and member.version is not None else
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
            prepare_s=member.prepare_s,
            pause_s=member.pause_s,
            wire_bytes=member.wire_bytes,
            note=shown(_note(member, state)),
        )


def _note(member: SwarmMember, state: str) -> str:
    if state == "full":
        return "holds as many tokens as it may (--max_held_tokens) and pauses until they are journaled"
    return member.distrust or member.last_error.removeprefix(f"{member.name}: ")


def shown(text: str) -> str:
    """Return a worker's text without secrets, on one line, and without characters that steer a terminal."""
    line = " ".join(redacted_text(text).split())
    return "".join(c if c.isprintable() else "?" for c in line)[:_MAX_NOTE]


def write_status(folder: Path, status: SwarmStatus) -> None:
    """Write the status into the swarm's folder of a run directory."""
    replace_file(folder / STATUS, msgspec.json.encode(status) + b"\n")


def read_status(folder: Path) -> SwarmStatus:
    """Read it, even while the run is at work. Raises ``RunError`` when there is none."""
    path = folder / STATUS
    try:
        return msgspec.json.decode(path.read_bytes(), type=SwarmStatus)
    except FileNotFoundError:
        raise RunError(
            f"{folder.parent} has no swarm yet: its engine.kind is not 'swarm', or it has not published its first"
            " weights, which follow a warm-up"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RunError(f"{path} cannot be read: {e}") from None
