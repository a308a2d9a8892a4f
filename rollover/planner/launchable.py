"""Tell which plans ``rollover launch`` can run with the trainer and the engine servers of this version.

Training is data parallel and sharded, on devices of one type; a replica is a server on one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollover.devices.costs.records import ReplicaKind, TrainingPart
from rollover.devices.records import Device


def can_train(part: TrainingPart) -> bool:
    """Tell whether the trainer divides its work like this.

    Example: ``dp=8, tp=1, pp=1, sharded=True`` it does; with ``tp=2``, or with all of the model on each of several
    devices, it does not.
    """
    return part.tp == part.pp == 1 and (part.sharded or part.dp == 1)


def can_serve(kind: ReplicaKind, device: Device) -> bool:
    """Tell whether a node holds the whole replica."""
    return kind.num_devices <= device.node_size


def obstacles(parts: Sequence[TrainingPart], replica_nodes: Sequence[int]) -> Iterator[str]:
    """Say which parts of a plan cannot be run; yield nothing if all of it can.

    Args:
        replica_nodes: the number of nodes of each replica.

    Example: ``"it trains on 2 types of device (h100-sxm and l4), but the trainer supports only one"``
    """
    if len(parts) > 1:
        names = " and ".join(part.device for part in parts)
        yield f"it trains on {len(parts)} types of device ({names}), but the trainer supports only one"
    for part in parts:
        if can_train(part):
            continue
        if part.tp > 1 or part.pp > 1:
            ways = " and ".join(
                f"{name} parallel {n}" for name, n in (("tensor", part.tp), ("pipeline", part.pp)) if n > 1
            )
            yield f"it trains {ways} on {part.device}, but the trainer supports only data parallelism"
        else:
            yield f"it keeps the whole optimizer state on each of {part.dp} {part.device}, but the trainer shards it"
    if several := sum(count > 1 for count in replica_nodes):
        yield f"{several} of its replicas span several nodes, but a server runs on one"
