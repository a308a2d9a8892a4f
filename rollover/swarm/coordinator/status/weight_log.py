"""A record of what new weights take on their way to the members: a line for each publication, one for each change.

``swarm/weights.jsonl`` in the run directory holds the lines; the metrics of each training step hold their sums.

Invariants: a record that cannot be written costs the run nothing but the record.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollover.swarm.publication.publications import PublishedWeights
from rollover.swarm.wire.messages import Serving

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChange:
    """The change of one member to one version.

    Example: ``MemberChange(member="laptop", version=8, prepare_s=3.1, pause_s=0.02, wire_bytes=81_264, after_s=4.0,
    time_s=16.5)`` is a laptop that decoded from version 8 four seconds after it could be fetched.
    """

    member: str
    version: int
    prepare_s: float
    """Time to fetch and verify the weights, while it decoded on."""
    pause_s: float
    """Time that its engine stood still."""
    wire_bytes: int
    """Bytes that it fetched."""
    after_s: float | None
    """Time from the publication to the change; ``None`` for a publication of an earlier process."""
    time_s: float
    """Seconds since 1970."""


class WeightLog:
    """Records publications, from any thread, and members' changes, in ``weights.jsonl`` if there is a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._path = None if folder is None else folder / "weights.jsonl"
        self._lock = threading.Lock()
        self._published_s: dict[int, float] = {}
        """On the monotonic clock, which is never set."""
        self._untold: list[PublishedWeights | MemberChange] = []
        """Records that no metrics have been made of."""
        self._has_failed = False

    def published(self, weights: PublishedWeights) -> None:
        self._published_s[weights.version] = time.monotonic()
        self._append(weights)

    def changed(self, member: str, serving: Serving) -> None:
        """Record that a member now decodes from a version which it did not have before."""
        published_s = self._published_s.get(serving.version)
        self._append(
            MemberChange(
                member=member,
                version=serving.version,
                prepare_s=serving.prepare_s,
                pause_s=serving.pause_s,
                wire_bytes=serving.wire_bytes,
                after_s=None if published_s is None else time.monotonic() - published_s,
                time_s=time.time(),
            )
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what came since the last call, by metric name; bytes are sums, seconds are means."""
        with self._lock:
            records, self._untold = self._untold, []
        changes = [record for record in records if isinstance(record, MemberChange)]
        publications = [record for record in records if isinstance(record, PublishedWeights)]
        metrics = {"swarm/published_bytes": float(sum(p.wire_bytes for p in publications))} if publications else {}
        if fractions := [p.changed_fraction for p in publications if p.changed_fraction is not None]:
            metrics["swarm/changed_fraction"] = statistics.fmean(fractions)
        if not changes:
            return metrics
        after_s = [change.after_s for change in changes if change.after_s is not None]
        return metrics | {
            "swarm/changes": float(len(changes)),
            "swarm/wire_bytes": float(sum(change.wire_bytes for change in changes)),
            "swarm/prepare_s": statistics.fmean(change.prepare_s for change in changes),
            "swarm/pause_s": statistics.fmean(change.pause_s for change in changes),
            "swarm/pause_s_max": max(change.pause_s for change in changes),
            **({"swarm/convergence_s": max(after_s)} if after_s else {}),
        }

    def _append(self, record: PublishedWeights | MemberChange) -> None:
        kind = "change" if isinstance(record, MemberChange) else "publication"
        with self._lock:
            self._untold.append(record)
            if self._path is None:
                return
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"record": kind, **asdict(record)}) + "\n")
            except OSError as e:
                if not self._has_failed:
                    logger.warning("%s cannot be written; the run continues without it: %s", self._path, e)
                self._has_failed = True
