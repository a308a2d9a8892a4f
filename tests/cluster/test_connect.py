"""Connecting to a cluster, and what is said at once when that cannot work."""

from __future__ import annotations

import importlib.util
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollover.cluster import nodes as cluster_nodes
from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.nodes import ClusterNode, NodeDemand, alive_nodes, check_placeable, check_versions, written
from rollover.errors import ConfigError, MissingExtra

NODES = [
    ClusterNode(
        node_id="a", address="10.0.0.1", resources={"CPU": 16.0, "GPU": 8.0, "h100": 8.0, "node:10.0.0.1": 1.0}
    ),
    ClusterNode(node_id="b", address="10.0.0.2", resources={"CPU": 3.0, "memory": 1e9}),
]


@pytest.mark.parametrize(
    ("bundle", "room"),
    [
        ({"GPU": 1.0}, 8),
        ({"CPU": 1.0}, 19),
        ({"CPU": 2.0}, 9),
        ({"GPU": 1.0, "CPU": 4.0}, 4),
        ({"h100": 0.1, "GPU": 1.0}, 8),
        ({"a10": 1.0}, 0),
    ],
)
def test_what_could_ever_be_placed_is_counted_by_node(bundle: dict[str, float], room: int) -> None:
    demand = NodeDemand(what="the trainer", keys="trainer.num_devices", bundle=bundle, count=room)
    check_placeable(demand, NODES)
    with pytest.raises(ConfigError) as raised:
        check_placeable(replace(demand, count=room + 1), NODES)
    assert f"the nodes of the Ray cluster have room for {room} of {room + 1}: node 10.0.0.1 has" in str(raised.value)


@pytest.mark.parametrize("resources", [{"CPU": 1.0, "a100": 0.5, "t": 1.0}, {"t": 1.0, "a100": 0.5, "CPU": 1.0}])
def test_resources_are_written_in_one_order(resources: dict[str, float]) -> None:
    assert written(resources) == "CPU 1, a100 0.5, t 1"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "ray" else find(name, *args))
    with pytest.raises(MissingExtra, match=r"needs ray, which is not installed: pip install 'rollover\[ray\]'"):
        connect(ClusterConfig())


def test_an_address_where_nothing_answers_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have connected this process
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections and says nothing
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^no Ray cluster answers at '{address}' \(cluster\.address\) within"):
            connect(ClusterConfig(address=address, placement_timeout_s=2.0))


def test_an_address_that_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ConfigError, match=rf"^no Ray cluster at '{address}' \(cluster\.address\): .*refused"):
        connect(ClusterConfig(address=address, placement_timeout_s=600.0))


def test_connecting_keeps_signal_handlers_and_refuses_a_second_cluster(cluster: Any) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    ray = connect(ClusterConfig(address=cluster.address))
    assert [signal.getsignal(number) for number in numbers] == before
    assert connect(ClusterConfig(address=cluster.address)) is ray
    local = ClusterConfig(address=f"127.0.0.1:{cluster.address.rpartition(':')[2]}")
    assert connect(local) is ray, "another name of the same cluster"
    refusal = (
        r"cluster\.address is 127\.0\.0\.1:1, but this process is connected to .*: a process can use one cluster only"
    )
    with pytest.raises(ConfigError, match=refusal):
        connect(ClusterConfig(address="127.0.0.1:1", placement_timeout_s=2.0))
    nodes = alive_nodes(ray)
    assert sorted(node.resources.get("CPU", 0.0) for node in nodes) == [0.0, 4.0, 4.0]
    assert [max(node.resources.get(name, 0.0) for node in nodes) for name in ("one", "two", "three")] == [4.0, 4.0, 0.0]


def test_nodes_of_another_version_are_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = connect(ClusterConfig(address=cluster.address))
    nodes = alive_nodes(ray)
    check_versions(ray, nodes, timeout_s=60.0)
    real, other = cluster_nodes.__version__, "99.0"
    monkeypatch.setattr(cluster_nodes, "__version__", other)
    with pytest.raises(ConfigError, match=rf"^node \S+ of the Ray cluster has Rollover {real}, this process {other}"):
        check_versions(ray, nodes, timeout_s=60.0)


def test_a_node_that_left_after_it_was_listed_stops_no_run(cluster: Any) -> None:
    ray = connect(ClusterConfig(address=cluster.address))
    gone = ClusterNode(node_id="ab" * 28, address="10.0.0.9", resources={"CPU": 4.0})
    check_versions(ray, [*alive_nodes(ray), gone], timeout_s=60.0)
    here = alive_nodes(ray)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_nodes, "alive_nodes", lambda ray: [gone])
        with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.9 of the Ray cluster cannot run a task: "):
            check_versions(ray, [here, gone], timeout_s=60.0)
