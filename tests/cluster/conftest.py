"""Lends a Ray cluster to the tests of this folder: several nodes on one machine, made once.

The driver is on a node of its own with no CPU to give away; ``one`` and ``two`` are what a test's ranks and servers
run on. A test that adds or removes nodes leaves the cluster as it found it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.nodes import alive_nodes
from tests.speed import within

ROOT = Path(__file__).parent.parent.parent
NODE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
"""What every node is started with."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A ``ray.cluster_utils.Cluster`` of a head, which has no CPU, and two nodes with 4 CPUs each, of which the first
    has 4 of the resource ``one`` and the second 4 of ``two``; of ``rank`` each has 1, for ranks that shall lie apart.
    ``cluster.address`` goes into ``[cluster]``."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        import ray
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
        try:
            for name in ("one", "two"):
                add_node(made, {name: 4, "rank": 1})
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's 15, ranks beside two busy processes take minutes to start
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": str(ROOT),
    # A node that is removed is missed after three seconds, not fifteen; one that answers late still has ten.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def add_node(cluster: Any, resources: dict[str, float]) -> Any:
    """Add a node with 4 CPUs and these custom resources, and return it once the cluster knows of it."""
    return cluster.add_node(**NODE, num_cpus=4, resources=resources)


def remove_nodes(cluster: Any, nodes: Iterable[Any]) -> None:
    """Remove nodes that a test has added, and wait until the cluster lists them no more."""
    for node in nodes:
        cluster.remove_node(node)
    until(lambda: len(alive_nodes(connect(ClusterConfig(address=cluster.address)))) == 3, "the nodes are gone")


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for something in another process, and fail where it has not come within two minutes."""
    deadline_s = time.monotonic() + within(120.0)
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within 120 s"
        time.sleep(0.05)


def cluster_has(cluster: Any, **resources: float) -> bool:
    """Say whether so much is free on the cluster."""
    free = connect(ClusterConfig(address=cluster.address)).available_resources()
    return {name: free.get(name, 0.0) for name in resources} == resources
