"""Find out whether what a run wants of a cluster fits on its nodes all together. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollover.cluster.nodes import written

Resources = Mapping[str, float]

_ROUNDING = 1e-6
"""Ray counts resources in ten-thousandths."""
_UNNAMED = ("node:", "object_store_memory", "memory", "accelerator_type:")
"""Prefixes of resources that Ray gives every node by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Something that takes a place on one node.

    Example: ``Wanted(name="engine-0", resources={"GPU": 2.0, "h20": 1.0})``.
    """

    name: str
    resources: Resources


def unplaced(wanted: Sequence[Wanted], nodes: Sequence[Resources]) -> list[Wanted]:
    """Return what finds no place on empty nodes, the largest placed first, each on the node that it leaves fullest.

    Example: two servers of 2 GPUs on nodes of 3 and 1: the first fits, the second is returned.
    """
    left = [dict(node) for node in nodes]
    failed = []
    for each in sorted(wanted, key=lambda w: -max(w.resources.values(), default=0.0)):
        fitting = [node for node in left if fits(each.resources, node)]
        if not fitting:
            failed.append(each)
            continue
        tightest = min(fitting, key=lambda node: sum(node.get(key, 0.0) for key in each.resources))
        for key, amount in each.resources.items():
            tightest[key] -= amount
    return failed


def fits(resources: Resources, node: Resources) -> bool:
    """Tell whether a node has room."""
    return all(node.get(key, 0.0) + _ROUNDING >= amount for key, amount in resources.items())


def refusal(wanted: Sequence[Wanted], nodes: Sequence[Resources]) -> str | None:
    """Say why something can never be placed on these nodes; ``None`` if all of it can.

    Example: ``"engine-0 needs GPU 2, h20 1 on one node, but no node of the cluster has that much; its nodes have: CPU
    8, GPU 1"``.
    """
    failed = unplaced(wanted, nodes)
    if not failed:
        return None
    has = "; ".join(dict.fromkeys(written(_own(node)) for node in nodes)) or "no node is alive"
    for each in failed:
        if not any(fits(each.resources, node) for node in nodes):
            return (
                f"{each.name} needs {written(each.resources)} on one node, but no node of the cluster has that much;"
                f" its nodes have: {has}"
            )
    names = ", ".join(each.name for each in failed)
    return (
        f"the nodes of the cluster have no room for {names} beside the others, {len(wanted)} in all"
        f" ({written(failed[0].resources)} for {failed[0].name}); its nodes have: {has}"
    )


def _own(node: Resources) -> dict[str, float]:
    """Return what a node has of its own, without what Ray gives every node."""
    return {key: amount for key, amount in node.items() if not key.startswith(_UNNAMED)}
