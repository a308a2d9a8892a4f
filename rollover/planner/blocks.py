"""Blocks: devices of a pipeline or of its stage that stay in one node.

Their sizes are powers of two, so a block takes exactly the room of a whole number of smaller ones. Blocks therefore fit
into nodes of any sizes if and only if, for each size, blocks of at least this size need no more devices than the nodes
have in whole blocks of it.
"""

from __future__ import annotations

from functools import cache

from rollover.devices.costs.records import ReplicaKind, TrainingPart


def powers(largest: int) -> list[int]:
    """List the powers of two up to ``largest``."""
    return [1 << i for i in range(largest.bit_length())]


def block_size(tp: int, pp: int, node_size: int) -> int:
    """Return the number of devices that stay in one node: a whole pipeline if a node holds one, else a stage."""
    return tp * pp if tp * pp <= node_size else tp


def block(shape: TrainingPart | ReplicaKind, node_size: int) -> int:
    return block_size(shape.tp, shape.pp, node_size)


@cache
def in_blocks(size: int, node_sizes: tuple[int, ...]) -> int:
    """Return the number of devices that nodes have in whole blocks."""
    return sum(n - n % size for n in node_sizes)
