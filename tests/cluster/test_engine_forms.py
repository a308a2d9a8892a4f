"""What engine servers take of a cluster's nodes, and whether all of it fits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.cluster.config import ClusterConfig, EngineGroup
from rollover.cluster.engines import described, engine_forms
from rollover.cluster.nodes import ClusterNode, Wanted, refusal, unplaced
from rollover.engine.servers.config import num_devices
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.errors import ConfigError
from rollover.run.building import build_config


@pytest.mark.parametrize(
    ("args", "devices"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["--tp-size=2", "--pp-size", "3"], 6),
        (["-tp", "2", "-dp", "2", "--max-model-len", "8192"], 4),
        (["--tp", "2", "--tensor-parallel-size", "8"], 8),
        (["--tp", "8", "--dp", "8", "--enable-dp-attention"], 8),
    ],
)
def test_the_devices_of_a_server_are_read_from_its_arguments(args: list[str], devices: int) -> None:
    assert num_devices(args) == devices


@pytest.mark.parametrize("args", [["--tp"], ["--tp", "two"], ["--tp=0"], ["--tp", "--pp"]])
def test_a_size_that_is_no_number_is_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.launch_args: --tensor-parallel-size \(or .* followed by a number"):
        num_devices(args)


def test_groups_differ_in_what_they_name_and_share_the_rest() -> None:
    cluster = ClusterConfig(
        engine_resources={"rack": 1.0},
        engines=(
            EngineGroup(count=2, max_running=256, resources={"h100": 2.0}, args=("--tensor-parallel-size", "2")),
            EngineGroup(devices=3),
        ),
    )
    engine = VLLMConfig(launch=True, max_running=64, launch_args=("--enforce-eager",))
    first, second, third = engine_forms(cluster, engine)
    assert first == second
    assert first.bundle("GPU") == {"GPU": 2.0, "rack": 1.0, "h100": 2.0}
    assert first.config(engine).max_running == 256
    assert first.config(engine).launch_args == ("--enforce-eager", "--tensor-parallel-size", "2")
    assert third.bundle("CPU") == {"CPU": 3.0, "rack": 1.0} and third.config(engine) == engine
    assert list(described((first, second, third), "GPU")) == [
        "engine-0 to engine-1: each GPU 2, h100 2, rack 1 of a node, up to 256 samples at a time",
        "engine-2: GPU 3, rack 1 of a node, up to 64 samples at a time",
    ]
    assert engine_forms(ClusterConfig(engines=0), engine) == ()


def wanted(*gpus: float) -> list[Wanted]:
    return [Wanted(name=f"engine-{i}", resources={"GPU": n}) for i, n in enumerate(gpus)]


@pytest.mark.parametrize(
    ("gpus", "nodes", "failed"),
    [((1, 1, 1, 1), (2, 1), ["engine-3"]), ((0.1,) * 10, (1,), []), ((4, 3, 3, 2, 2, 2), (8, 8), [])],
)
def test_as_little_as_possible_is_left(gpus: tuple[float, ...], nodes: tuple[float, ...], failed: list[str]) -> None:
    assert [each.name for each in unplaced(wanted(*gpus), [{"GPU": n} for n in nodes])] == failed


@pytest.mark.parametrize("order", [1, -1])
def test_who_can_go_anywhere_leaves_the_rare_node_to_who_needs_it(order: int) -> None:
    both = [Wanted(name="any", resources={"GPU": 1.0}), Wanted(name="rare", resources={"GPU": 1.0, "h100": 1.0})]
    nodes = [{"CPU": 16.0, "GPU": 1.0, "h100": 1.0}, {"CPU": 16.0, "GPU": 1.0}]
    assert unplaced(both[::order], nodes) == unplaced(both[::order], nodes[::-1]) == []
    assert [each.name for each in unplaced([*both, both[1]], nodes)] == ["rare"]


def test_types_of_nodes_that_share_nothing_do_not_multiply_the_ways() -> None:
    # The ways of all nodes together would take longer than a test may.
    kinds = [{"GPU": n, name: n} for name in ("h100", "l40s") for n in (1.0, 2.0)]
    some = [Wanted(name=f"{kind}", resources=kind) for kind in kinds for _ in range(16 + 16 * (kind["GPU"] == 1))]
    nodes = [{"GPU": 8.0, name: 8.0} for name in ("h100", "l40s") for _ in range(8)]
    assert unplaced(some, nodes) == []
    assert len(unplaced(some, nodes[1:])) == 4 and len(unplaced(some, nodes[:-2])) == 8


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["", "a", "b"])), max_size=4),
    nodes=st.lists(st.tuples(st.integers(1, 8), st.sampled_from(["", "a", "b"])), max_size=3),
)
def test_as_many_are_placed_as_in_any_assignment(sizes: list[tuple[int, str]], nodes: list[tuple[int, str]]) -> None:
    def placed(where: tuple[int, ...]) -> int:
        taken = [0] * len(nodes)
        for (size, name), n in zip(sizes, where, strict=True):
            if n < len(nodes):
                taken[n] += size if name in ("", nodes[n][1]) else 9
        return sum(n < len(nodes) for n in where) * all(t <= size for t, (size, _) in zip(taken, nodes, strict=True))

    most = max(map(placed, itertools.product(range(len(nodes) + 1), repeat=len(sizes))))
    resources = [
        [{"GPU": float(size)} | ({name: float(size)} if name else {}) for size, name in xs] for xs in (sizes, nodes)
    ]
    some = [Wanted(name=f"{n}", resources=each) for n, each in enumerate(resources[0])]
    assert len(some) - len(unplaced(some, resources[1])) == most


def test_the_refusal_names_what_is_missing_and_what_there_is() -> None:
    full = {"GPU": 2.0, "CPU": 8.0, "memory": 1e9, "node:10.0.0.1": 1.0}
    nodes = [
        ClusterNode(node_id=address, address=address, resources=resources)
        for address, resources in (("10.0.0.1", full), ("10.0.0.2", {"CPU": 4.0}))
    ]
    there = "node 10.0.0.1 has CPU 8, GPU 2; node 10.0.0.2 has CPU 4; add nodes, or lower these settings"
    assert refusal(wanted(1, 1), nodes) is None
    for gpus, failed in (((4,), "engine-0 needs GPU 4"), ((2, 1), "engine-1 needs GPU 1")):
        placed = f"{len(gpus) - 1} of {len(gpus)}"
        said = f"{failed}, but the nodes of the Ray cluster have room for {placed}: {there}"
        assert refusal(wanted(*gpus), nodes) == said


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("kind = 'embedded'", "cluster.engines starts servers, but engine.kind is 'embedded'"),
        ("kind = 'vllm'\nurls = ['http://10.0.0.1:8000']", "engine.urls names running ones"),
        ("kind = 'vllm'\nlaunch = true\nnum_servers = 2", "engine.num_servers is for servers on this machine"),
        ("kind = 'vllm'\nlaunch = true\nlaunch_devices = ['0']", "launch_devices is for servers on this machine"),
    ],
)
def test_an_engine_that_cannot_be_placed_is_refused(tmp_path: Path, engine: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[model]\npath = 'm'\n[cluster]\nengines = 2\n[engine]\n{engine}\n")
    with pytest.raises(ConfigError, match=message):
        build_config(file)
