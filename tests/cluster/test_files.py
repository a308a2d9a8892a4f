"""Answers of hosts and their errors, where ranks go, and how two machines tell that they see the same files."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollover.cluster import ranks
from rollover.cluster.calls import answers, lost
from rollover.cluster.config import ClusterConfig
from rollover.cluster.files import SharedFiles, listed, sampled_digest
from rollover.cluster.host import HostFacts, RankHost
from rollover.cluster.nodes import ClusterNode
from rollover.cluster.ranks import beside_each_other, described_ranks, rank_demand
from rollover.errors import ConfigError
from rollover.trainer.config import TrainerConfig
from rollover.trainer.leading import RankLost
from rollover.trainer.rank import interface_of
from rollover.trainer.rank_process import listening

HERE = Path("/models")  # no test looks there


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"Traceback of the actor\n{cause}")
        self.cause = cause


class GetTimeoutError(RayError):
    pass


class HereRay:
    """Stands in for Ray: whatever was asked is answered by then."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError)

    @staticmethod
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


def write_all(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 5, "a": b"x" * 100}
CONTENTS |= {"trainer/optimizer.safetensors": b""}


def test_a_node_with_other_files_at_the_path_is_named(tmp_path: Path) -> None:
    model = write_all(tmp_path / "model", CONTENTS)
    files = SharedFiles.of_model(model)
    assert RankHost().sees(files)
    (model / "a").write_bytes(b"y" * 100)
    assert not RankHost().sees(files)
    assert str(files.refusal("10.0.0.3", "share it")) == f"node 10.0.0.3 does not see the files of {model}: share it"
    lock = SharedFiles.of(write_all(tmp_path, {"lock": b""}) / "lock")
    assert lock.are_here() and f"the files of {tmp_path} (lock):" in str(lock.refusal("10.0.0.3", "share it"))


@pytest.mark.parametrize(("nodes", "size", "num_split"), [("abababab", 4, 0), ("abbbabba", 2, 1), ("aabbbccc", 4, 2)])
def test_ranks_that_share_rows_are_on_one_node_wherever_there_are_enough(nodes: str, size: int, num_split: int) -> None:
    order = beside_each_other(nodes, size)
    assert sorted(order) == [*range(len(nodes))]
    groups = [{nodes[host] for host in order[first : first + size]} for first in range(0, len(nodes), size)]
    assert sum(len(group) > 1 for group in groups) == num_split
    assert [nodes[host] for host in beside_each_other(nodes, 1)] == sorted(nodes)


def test_ranks_are_said_to_be_on_nodes_that_can_be_told_apart() -> None:
    def at(node: str, address: str) -> HostFacts:
        return HostFacts(node_id=node, address=address, folder=HERE, port=0, descriptor=None)

    hosts = [at("a" * 20, "10.0.0.1"), at("a" * 20, "10.0.0.1"), at("b" * 20, "10.0.0.1"), at("c" * 20, "10.0.0.2")]
    assert described_ranks(hosts, role="trainer") == (
        "trainer: ranks 0, 1 on node 10.0.0.1 (aaaaaaaa); rank 2 on node 10.0.0.1 (bbbbbbbb); rank 3 on node 10.0.0.2"
    )


def test_a_failed_host_and_a_silent_host_are_told_apart() -> None:
    failed = RayTaskError(OSError(errno.ENOSPC, "No space left on device"))
    gone = RayError("The actor died because its node has died.")
    for rank, (answer, said) in enumerate(
        (
            (failed, r"the host of rank 0 of 3 failed at the start: .*No space left"),
            (GetTimeoutError(), "the host of rank 1 of 3 did not answer within 7 s at the start"),
            (gone, r"^rank 2 of 3 was lost with its host at the start: that node is gone$"),
        )
    ):
        asked: list[Any] = [None, None, None]
        asked[rank] = answer
        with pytest.raises(RankLost, match=said):
            answers(HereRay, asked, timeout_s=7.0)
    assert answers(HereRay, ["a", "b"], timeout_s=7.0) == ["a", "b"]
    assert lost(RayError("first\nThe last line.")) == "The last line."


@pytest.mark.parametrize("size", [0, 10, 4096, 100_000])
def test_files_that_differ_differ_in_their_digests(tmp_path: Path, size: int) -> None:
    rng = np.random.default_rng(size)
    one, other = tmp_path / "one", tmp_path / "other"
    content = rng.bytes(size)
    one.write_bytes(content)
    other.write_bytes(content)
    assert sampled_digest(one) == sampled_digest(other) != ""
    other.write_bytes(content + b"!")
    assert sampled_digest(one) != sampled_digest(other)
    if size:
        other.write_bytes(rng.bytes(size))
        assert sampled_digest(one) != sampled_digest(other)
    assert sampled_digest(tmp_path / "gone") == ""


def test_rank_0_listens_at_one_address_alone() -> None:
    with listening("127.0.0.1") as socket:
        assert socket.getsockname()[0] == "127.0.0.1" and socket.getsockname()[1] > 0
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") is None


NODES = [
    ClusterNode(node_id="a", address="10.0.0.1", resources={"CPU": 4.0, "GPU": 2.0, "h100": 2.0}),
    ClusterNode(node_id="b", address="10.0.0.2", resources={"CPU": 8.0, "slow": 1.0}),
]


@pytest.mark.parametrize(
    ("device", "resources", "bundle"),
    [
        ("auto", {}, {"GPU": 1.0}),
        ("auto", {"slow": 1.0}, {"CPU": 1.0, "slow": 1.0}),  # no node that has it has a GPU
        ("cpu", {"CPU": 4.0}, {"CPU": 4.0}),
        ("cuda", {"h100": 1.0}, {"GPU": 1.0, "h100": 1.0}),
    ],
)
def test_a_rank_takes_a_gpu_where_there_are_any(
    device: str, resources: dict[str, float], bundle: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_can_use_gpus", lambda num_ranks: True)
    trainer = TrainerConfig(device=device, num_devices=2)
    demand = rank_demand(ClusterConfig(trainer_resources=resources), trainer, NODES)
    assert (demand.bundle, demand.count) == (bundle, 2)


@pytest.mark.parametrize(
    ("num_ranks", "cuda", "has_nccl", "refused"),
    [
        (1, "13.0", False, False),  # it exchanges nothing
        (2, "13.0", True, False),
        (2, "13.0", False, True),
        (1, None, False, True),
        (2, None, False, True),
    ],
)
def test_gpus_that_this_build_of_pytorch_cannot_use_are_refused(
    num_ranks: int, cuda: str | None, has_nccl: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    trainer = TrainerConfig(num_devices=num_ranks)
    if not refused:
        assert "GPU" in rank_demand(ClusterConfig(), trainer, NODES).bundle
        return
    with pytest.raises(ConfigError, match=r"'auto' takes GPUs .* without NCCL: install .* trainer\.device = 'cpu'"):
        rank_demand(ClusterConfig(), trainer, NODES)
    assert "CPU" in rank_demand(ClusterConfig(), replace(trainer, device="cpu"), NODES).bundle


def test_a_model_folder_is_listed_without_what_no_rank_reads(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "model", CONTENTS | {"pytorch_model.bin": b"", "original/x.safetensors": b""})
    (folder / "link.json").symlink_to(folder / "config.json")
    assert listed(folder) == sorted([*CONTENTS, "link.json"])
    assert os.sep not in "".join(name for name in listed(folder) if not name.startswith("trainer"))
