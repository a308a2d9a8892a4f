"""The nodes of a cluster: what they have, whether what is asked of them can ever be placed, and taking places there.

That a node is there is what it answers itself; the tables of the cluster are asked for its name and resources alone.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rollover.errors import ConfigError
from rollover.version import __version__

Resources = Mapping[str, float]

_PACKAGES = {"Ray": "ray", "PyTorch": "torch"}
_ROUNDING = 1e-6
"""Ray counts resources in ten-thousandths."""
_UNNAMED = ("node:", "object_store_memory", "memory", "accelerator_type:")
"""Prefixes of resources that Ray gives every node by itself."""


class NotPlaced(ConfigError):
    """Bundles for which the cluster has had no room in time; the message names what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node of the cluster with all that it has, be it free or not."""

    node_id: str
    """Ray's own name."""
    address: str
    """IP address."""
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDemand:
    """Equal bundles of resources, each of which has to lie on one node."""

    what: str
    """The part of the run that needs them, for messages."""
    keys: str
    """The settings that determine it."""
    bundle: Mapping[str, float]
    count: int

    def __str__(self) -> str:
        """Return it as a message says it: "the trainer needs 8 bundles of GPU 1, h100 1"."""
        return f"{self.what} needs {self.count} bundle{'s' * (self.count != 1)} of {written(self.bundle)}"


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that takes ``bundle`` of its node."""
    own = dict(bundle)
    options: dict[str, Any] = {"num_cpus": own.pop("CPU", 0.0), "num_gpus": own.pop("GPU", 0.0)}
    if (memory := own.pop("memory", None)) is not None:
        options["memory"] = memory
    return {**options, "resources": own}


def alive_nodes(ray: Any) -> list[ClusterNode]:
    """Return the nodes that the cluster knows of and takes for alive."""
    listed = (node for node in ray.nodes() if node["Alive"])
    return [ClusterNode(node_id=n["NodeID"], address=n["NodeManagerAddress"], resources=n["Resources"]) for n in listed]


def check_placeable(demand: NodeDemand, nodes: Sequence[ClusterNode]) -> None:
    """Raise ``ConfigError`` when the nodes could not take all bundles even with nothing else on them."""
    if (room := room_for(demand, nodes)) < demand.count:
        raise ConfigError(f"{demand} ({demand.keys}), {_no_room(room, demand.count, nodes)}")


def room_for(demand: NodeDemand, nodes: Sequence[ClusterNode]) -> int:
    """Return how many of the bundles the nodes could take with nothing else on them."""
    each = Wanted(name=demand.what, resources=demand.bundle)
    return demand.count - len(unplaced([each] * demand.count, [node.resources for node in nodes]))


def check_versions(ray: Any, nodes: Sequence[ClusterNode], *, timeout_s: float) -> None:
    """Raise ``ConfigError`` naming the first node where Python, Ray, PyTorch or Rollover is another than here, or one
    that does not answer within ``timeout_s``. Nodes that have gone meanwhile are passed over."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def asked() -> dict[str, str]:  # sent by value, as all that is defined in functions is: a node may lack Rollover
        try:
            from rollover.cluster.nodes import versions_here as there
        except ImportError as error:
            return {"Rollover": f"that is missing or older ({error})"}
        return there()

    own = versions_here()
    answers = [
        ray.remote(num_cpus=0, max_retries=0)(asked)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False))
        .remote()
        for node in nodes
    ]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=timeout_s)
    for node, answer in zip(nodes, answers, strict=True):
        if answer not in ready:
            raise ConfigError(
                f"node {node.address} of the Ray cluster does not answer within {timeout_s:g} s"
                " (cluster.placement_timeout_s)"
            )
        try:
            theirs = ray.get(answer, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            if all(other.node_id != node.node_id for other in alive_nodes(ray)):
                continue  # it has gone since the nodes were listed
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ConfigError(f"node {node.address} of the Ray cluster cannot run a task: {reason}") from error
        for name, version in theirs.items():
            if own.get(name) != version:
                raise ConfigError(
                    f"node {node.address} of the Ray cluster has {name} {version}, this process {own.get(name)}:"
                    " install the same version on every node"
                )


def versions_here() -> dict[str, str]:
    """Return the versions that must agree between the nodes of a cluster."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "Rollover": __version__}
    for name, package in _PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def written(resources: Mapping[str, float]) -> str:
    """Return resources as a message names them: Ray's own first, in one order.

    Example: ``{"GPU": 1.0, "h100": 0.5}`` gives "GPU 1, h100 0.5".
    """
    names = sorted(resources, key=lambda name: (name not in ("CPU", "GPU", "memory"), name))
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"


def described(nodes: Sequence[ClusterNode]) -> str:
    """Return what the nodes have, as a message says it."""
    return "; ".join(f"node {node.address} has {written(_own(node.resources))}" for node in nodes) or "it has no nodes"


def _own(node: Resources) -> Resources:
    """Return what a node has of its own, without what Ray gives every node."""
    return {key: amount for key, amount in node.items() if not key.startswith(_UNNAMED)}


# -- fitting: pure arithmetic ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Something that takes a place on one node."""

    name: str
    resources: Resources


def unplaced(wanted: Sequence[Wanted], nodes: Sequence[Resources]) -> list[Wanted]:
    """Return what finds no place on empty nodes, as little as is possible. Unless the largest first leave room for all,
    every way is followed to fill one node after the other; a way ends where another leaves less to be placed."""
    equal: dict[tuple[tuple[str, float], ...], list[Wanted]] = {}
    for each in wanted:
        equal.setdefault(tuple(sorted(each.resources.items())), []).append(each)
    kinds = sorted(equal.values(), key=len)
    if _have_room(kinds, nodes):
        return []
    bundles = [kind[0].resources for kind in kinds]
    nodes = sorted(nodes, key=lambda node: [fits(bundle, node) for bundle in bundles])
    last = [max((n for n, node in enumerate(nodes) if fits(bundle, node)), default=-1) for bundle in bundles]
    left = [tuple(map(len, kinds))]
    for n, node in enumerate(nodes):
        ways = {rest for counts in left for rest in _filled(counts, bundles, node)}
        left, least = [], list[tuple[int, ...]]()
        for rest in sorted(ways, key=lambda counts: (sum(counts), counts)):
            lost = sum(count for count, end in zip(rest, last, strict=True) if end <= n)  # no later node takes these
            counts = (lost, *(count for count, end in zip(rest, last, strict=True) if end > n))
            if not any(all(map(operator.le, other, counts)) for other in least):
                left.append(rest)
                least.append(counts)
    fewest = min(left, key=lambda counts: (sum(counts), counts))
    return [each for kind, count in zip(kinds, fewest, strict=True) for each in kind[len(kind) - count :]]


def _have_room(kinds: Sequence[Sequence[Wanted]], nodes: Sequence[Resources]) -> bool:
    """Return whether nodes have room for all if each takes as many as fit, beginning with the largest kind."""
    free = list(nodes)
    for kind in sorted(kinds, key=lambda kind: -sum(kind[0].resources.values())):
        left = len(kind)
        for n, node in enumerate(free):
            while left and fits(kind[0].resources, node):
                node = _without(node, kind[0].resources)
                left -= 1
            free[n] = node
        if left:
            return False
    return True


def _without(node: Resources, bundle: Resources) -> Resources:
    return {key: amount - bundle.get(key, 0.0) for key, amount in node.items()}


def _filled(counts: tuple[int, ...], bundles: Sequence[Resources], node: Resources) -> Iterator[tuple[int, ...]]:
    """Yield what is left of ``counts`` of bundles, one count for each, after each way of filling a node."""
    if not counts:
        yield ()
        return
    for count in range(counts[0], -1, -1):
        has_room = count > 0 and fits(bundles[0], node)
        if len(counts) > 1 or not has_room:  # of the last kind, as many as fit
            yield from ((count, *rest) for rest in _filled(counts[1:], bundles[1:], node))
        if not has_room:
            return
        node = _without(node, bundles[0])


def fits(resources: Resources, node: Resources) -> bool:
    return all(node.get(key, 0.0) + _ROUNDING >= amount for key, amount in resources.items())


def refusal(wanted: Sequence[Wanted], nodes: Sequence[ClusterNode]) -> str | None:
    """Say what can never be placed on these nodes; ``None`` if all of it can."""
    failed = unplaced(wanted, [node.resources for node in nodes])
    needs = ", ".join(f"{each.name} needs {written(each.resources)}" for each in failed)
    return f"{needs}, {_no_room(len(wanted) - len(failed), len(wanted), nodes)}" if failed else None


def _no_room(num_placed: int, num_wanted: int, nodes: Sequence[ClusterNode]) -> str:
    room = f"the nodes of the Ray cluster have room for {num_placed} of {num_wanted}"
    return f"but {room}: {described(nodes)}; add nodes, or lower these settings"


# -- taking ----------------------------------------------------------------------------------------------------


def place(ray: Any, demand: NodeDemand, *, timeout_s: float, strategy: str = "PACK") -> Any:
    """Return a placement group with the bundles of ``demand``, once all of them are reserved.

    Raises ``NotPlaced`` when they are not within ``timeout_s``; nothing is reserved then.
    """
    from ray.util.placement_group import placement_group

    group = placement_group([dict(demand.bundle)] * demand.count, strategy=strategy)
    try:
        if group.wait(timeout_s):
            return group
        raise NotPlaced(_missing(ray, demand, timeout_s))
    except BaseException:
        remove(group)
        raise


def remove(group: Any) -> None:
    """Give back what a placement group has reserved; the actors in it end."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _missing(ray: Any, demand: NodeDemand, timeout_s: float) -> str:
    nodes = alive_nodes(ray)
    free = ray.available_resources()
    lacking = room_for(demand, nodes) < demand.count
    names = {name: float(free.get(name, 0.0)) for name in demand.bundle}
    remedy = "add nodes" if lacking else "end other jobs there"
    return (
        f"{demand} ({demand.keys}), for which the Ray cluster had no room within {timeout_s:g} s"
        f" (cluster.placement_timeout_s): {described(nodes)}; free on all nodes together: {written(names)}; {remedy},"
        " or lower these settings"
    )
