"""Files between the machine of the run and the nodes of a cluster, in parts through Ray's object store.

No file system has to be shared. A folder that a node has at the same path, with the same files in it, is read there;
any other is sent to the node, once for all ranks on it. What ranks write is always brought to the machine of the run,
so only its disk has to last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollover.cluster.calls import HostCalls
from rollover.cluster.host import HostFacts
from rollover.cluster.parts import AHEAD, PART_BYTES, digests_of


def placed(
    calls: HostCalls, hosts: Sequence[HostFacts], folders: Sequence[Path], doing: str
) -> dict[Path, dict[str, Path]]:
    """Return where each node has the files of each of ``folders``, by its id, having sent missing ones.

    Raises ``RankLost`` naming the rank whose host does not answer.

    Example: two folders named ``step_20`` that no node has are sent to ``sent-0/step_20`` and ``sent-1/step_20``.
    """
    return {
        folder: _placed(calls, hosts, folder, Path(f"sent-{number}") / folder.name, doing)
        for number, folder in enumerate(folders)
    }


def _placed(calls: HostCalls, hosts: Sequence[HostFacts], folder: Path, sent: Path, doing: str) -> dict[str, Path]:
    digests = digests_of(folder)
    first = {host.node_id: rank for rank, host in reversed([*enumerate(hosts)])}
    own = folder.resolve()
    seen = dict(zip(first, _seen(calls, [*first.values()], own, digests, doing), strict=True))
    there = {node: own if seen[node] else hosts[rank].staging / sent for node, rank in first.items()}
    lacking = [rank for node, rank in first.items() if not seen[node]]
    if lacking:
        for name in digests:
            sending = _sending(calls, [(rank, there[hosts[rank].node_id] / name) for rank in lacking], own / name)
            for _ in calls.ordered(doing, sending, ahead=AHEAD):
                pass
    return there


def _seen(
    calls: HostCalls, ranks: Sequence[int], folder: Path, digests: Mapping[str, str], doing: str
) -> Sequence[bool]:
    """Say for the node of each rank whether it has these files at the same place."""
    return calls.all(doing, [(rank, calls.actors[rank].sees.remote(folder, digests)) for rank in ranks])


def _sending(calls: HostCalls, targets: Sequence[tuple[int, Path]], path: Path) -> Iterator[tuple[int, Any]]:
    """Read a file part by part, and have each target write it."""
    size = path.stat().st_size
    for offset in range(0, max(size, 1), PART_BYTES):
        part = calls.ray.put(np.fromfile(path, dtype=np.uint8, count=PART_BYTES, offset=offset))
        for rank, target in targets:
            yield rank, calls.actors[rank].write.remote(target, size, offset, part)


def brought(calls: HostCalls, folders: Mapping[int, Path], target: Path, doing: str) -> int:
    """Bring the files in ``folders``, one of each rank, into the folder ``target`` here, and return their bytes.

    Raises ``RankLost`` naming the rank whose host does not answer.
    """
    asked = [(rank, calls.actors[rank].written.remote(folder)) for rank, folder in folders.items()]
    listings = dict(zip(folders, calls.all(doing, asked), strict=True))
    parts = [
        (rank, name, offset)
        for rank, listing in listings.items()
        for name, size in listing.items()
        for offset in range(0, max(size, 1), PART_BYTES)
    ]
    reading = (
        (rank, calls.actors[rank].read.remote(folders[rank] / name, offset, PART_BYTES)) for rank, name, offset in parts
    )
    total = 0
    for (_, name, offset), part in zip(parts, calls.ordered(doing, reading, ahead=AHEAD), strict=True):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(part.data)
        total += part.nbytes
    calls.all(doing, [(rank, calls.actors[rank].discard.remote(folder)) for rank, folder in folders.items()])
    return total
