"""Weights over NCCL: what a dry run refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from rollover.errors import ConfigError
from rollover.run.building import build_config
from rollover.run.engine import check_engine, sending_device
from tests.run.test_memory import on_gpus

KINDS = ("vllm", "sglang", "embedded_server")


def checked(kind: str, *options: str) -> list[str]:
    transfer = ("--engine.kind", kind, "--engine.launch", "true", "--engine.weight_transfer", "nccl")
    return check_engine(build_config("quickstart", [*transfer, *options]))


@pytest.mark.parametrize("kind", KINDS)
def test_nccl_that_is_not_there_is_found_before_the_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"engine\.weight_transfer 'nccl' needs a GPU in this machine: set it to"):
            checked(kind)
    on_gpus(monkeypatch, 2, 2**36)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"engine\.weight_transfer 'nccl' needs a PyTorch with NCCL"):
        checked(kind)


def test_this_process_sends_from_the_gpu_on_which_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = ("--engine.kind", "sglang", "--engine.launch", "true", "--engine.weight_transfer", "nccl")
    monkeypatch.setattr("rollover.trainer.models.pick_device", torch.device)
    assert sending_device(build_config("quickstart", [*nccl, "--trainer.device", "cuda:1"])) == "cuda:1"
    assert sending_device(build_config("quickstart", [*nccl, "--trainer.device", "cuda"])) == "cuda:0"
    assert sending_device(build_config("quickstart", [*nccl, "--trainer.device", "cpu"])) == "cuda:0"
    assert sending_device(build_config("quickstart", [*nccl, "--trainer.num_devices", "2"])) == "cuda:0"
    assert sending_device(build_config("quickstart", ["--trainer.device", "cuda:1"])) is None
    monkeypatch.setattr("rollover.trainer.models.pick_device", None)  # the trainer's GPU is on a node of the cluster
    on_cluster = ("--cluster.address", "auto", "--trainer.device", "cuda")
    assert sending_device(build_config("quickstart", [*nccl, *on_cluster])) == "cuda:0"


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_on_the_gpu_that_sends_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 2**36)
    refused = r"server {} is started on cuda:0, from which the trainer sends: .*engine\.launch_devices"
    with pytest.raises(ConfigError, match=refused.format(0)):
        checked(kind)
    ranks = ("--trainer.num_devices", "2", "--engine.num_servers", "2")
    with pytest.raises(ConfigError, match=refused.format(1)):
        checked(kind, *ranks, "--engine.launch_devices", '["1", "0"]')
    assert checked(kind, *ranks, "--engine.launch_devices", '["2", "1"]') == []


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_are_compared_as_the_machine_numbers_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 2, 2**36, visible="2,3")
    assert checked(kind, "--engine.launch_devices", '["0"]') == []
    with pytest.raises(ConfigError, match="server 0 is started on cuda:0"):
        checked(kind, "--engine.launch_devices", '["2"]')


def test_a_server_takes_all_gpus_that_its_arguments_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 2**36)
    two = ("--engine.launch_args", '["--tensor-parallel-size", "2"]', "--engine.launch_devices")
    with pytest.raises(ConfigError, match="server 0 is started on cuda:0"):
        checked("vllm", *two, '["1,0"]')
    assert checked("vllm", *two, '["1,2"]') == []


@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_take_turns_get_weights_from_folders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 2**36)
    with pytest.raises(ConfigError, match=r"engine\.colocated = true servers and trainer have the same ones"):
        checked(kind, "--engine.colocated", "true")
