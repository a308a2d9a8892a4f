"""A record of what new weights take on their way to the members: a line for each publication, one for each change.

``swarm/weights.jsonl`` in the run directory holds the lines; the metrics of each training step hold their sums.

What it keeps true: a record that cannot be written costs the run nothing but the record.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollover.errors import RunError
from rollover.swarm.publication.publisher import PublishedWeights
from rollover.swarm.wire.messages import Serving

logger = logging.getLogger(__name__)

FILE_NAME = "weights.jsonl"
"""In the swarm's folder of a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """The making of one publication.

    Example: ``PublishedVersion(version=8, kind="delta", wire_bytes=81_264, full_bytes=9_437_184, elapsed_s=0.4,
    time_s=12.5)`` says that 81 kB bring a member from version 7 to version 8.
    """

    version: int
    kind: str
    """``full`` or ``delta``."""
    wire_bytes: int
    """Number of bytes fetched by a member that has the previous version."""
    full_bytes: int
    """The size of all tensors, uncompressed."""
    elapsed_s: float
    """Time that encoding and writing it took."""
    time_s: float
    """Seconds since 1970, when it could be fetched."""
    changed_fraction: float = math.nan
    """Share of all elements that are others than in the version before; NaN where there was none to compare with."""


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
    after_s: float
    """Time from the publication to the change; NaN for a publication of an earlier process."""
    time_s: float
    """Seconds since 1970."""


Record = PublishedVersion | MemberChange


class WeightLog:
    """Takes note of publications, from any thread, and of members' changes.

    Example: ``WeightLog(run / "swarm" / FILE_NAME).changed("laptop", serving)`` appends a line; ``take_metrics()`` then
    has ``swarm/pause_s``.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._published_s: dict[int, float] = {}
        """On the monotonic clock, which is never set."""
        self._untold: list[Record] = []
        """Records that no metrics have been made of."""
        self._has_failed = False

    def published(self, weights: PublishedWeights) -> None:
        """Take note of a publication that can be fetched from now on."""
        self._published_s[weights.head.version] = time.monotonic()
        self._append(
            PublishedVersion(
                version=weights.head.version,
                kind=weights.kind,
                wire_bytes=weights.wire_bytes,
                full_bytes=weights.full_bytes,
                elapsed_s=weights.elapsed_s,
                time_s=time.time(),
                changed_fraction=math.nan if weights.changed_fraction is None else weights.changed_fraction,
            )
        )

    def changed(self, member: str, serving: Serving) -> None:
        """Record that a member now decodes from a version which it did not have before."""
        after_s = time.monotonic() - self._published_s.get(serving.version, math.nan)
        self._append(
            MemberChange(
                member=member,
                version=serving.version,
                prepare_s=serving.prepare_s,
                pause_s=serving.pause_s,
                wire_bytes=serving.wire_bytes,
                after_s=after_s,
                time_s=time.time(),
            )
        )

    def take_metrics(self) -> dict[str, float]:
        """Return what came since the last call, by metric name; bytes are sums, seconds are means."""
        with self._lock:
            records, self._untold = self._untold, []
        changes = [record for record in records if isinstance(record, MemberChange)]
        publications = [record for record in records if isinstance(record, PublishedVersion)]
        metrics = {"swarm/published_bytes": float(sum(p.wire_bytes for p in publications))} if publications else {}
        if fractions := [p.changed_fraction for p in publications if not math.isnan(p.changed_fraction)]:
            metrics["swarm/changed_fraction"] = statistics.fmean(fractions)
        if not changes:
            return metrics
        after_s = [change.after_s for change in changes if not math.isnan(change.after_s)]
        return metrics | {
            "swarm/changes": float(len(changes)),
            "swarm/wire_bytes": float(sum(change.wire_bytes for change in changes)),
            "swarm/prepare_s": statistics.fmean(change.prepare_s for change in changes),
            "swarm/pause_s": statistics.fmean(change.pause_s for change in changes),
            "swarm/pause_s_max": max(change.pause_s for change in changes),
            **({"swarm/convergence_s": max(after_s)} if after_s else {}),
        }

    def _append(self, record: Record) -> None:
        fields = {name: None if value != value else value for name, value in asdict(record).items()}
        with self._lock:
            self._untold.append(record)
            if self._path is None:
                return
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"record": _KINDS[type(record)], **fields}) + "\n")
            except OSError as e:
                if not self._has_failed:
                    logger.warning("%s cannot be written; the run continues without it: %s", self._path, e)
                self._has_failed = True


_KINDS: dict[type[Record], str] = {PublishedVersion: "publication", MemberChange: "change"}


def read_weight_log(path: Path) -> tuple[Record, ...]:
    """Return the records in the order in which they were made; none where there is no file. A torn last line is left
    out. Raises ``RunError`` for a line that is no record."""
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return tuple(_decoded(lines, path))


def _decoded(lines: Sequence[str], path: Path) -> Iterator[Record]:
    kinds: dict[str, type[Record]] = {name: kind for kind, name in _KINDS.items()}
    for number, line in enumerate(lines, start=1):
        try:
            fields: dict[str, Any] = json.loads(line)
            kind = kinds[fields.pop("record")]
            told: dict[str, Any] = {name: math.nan if value is None else value for name, value in fields.items()}
            yield kind(**told)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise RunError(
                f"{path}:{number} is not a record of weights ({e!r}); remove that line to read the rest"
            ) from e
