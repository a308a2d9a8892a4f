"""What a dry run says of memory: whose it is, whether it fits, and a change that makes it fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from rollover.errors import ConfigError
from rollover.run import memory
from rollover.run.building import build_config
from rollover.run.config import RunConfig
from rollover.run.memory import device_memory, memory_lines
from rollover.trainer import memory as trainer_memory

WIDE = (
    *("--model.scratch.hidden_size", "768", "--model.scratch.intermediate_size", "2304"),
    *("--model.scratch.num_layers", "6", "--trainer.device", "cpu", "--engine.device", "cpu"),
)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are functions of their arguments, and of what devices there are: each is made once for all tests."""
    real = trainer_memory.training_memory

    def traced(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items()), torch.cuda.is_available()))
        if key not in TRACED:
            TRACED[key] = real(*args, **kwargs)
        return TRACED[key]

    monkeypatch.setattr(trainer_memory, "training_memory", traced)


TRACED: dict[str, Any] = {}


def configured(*options: str) -> RunConfig:
    return build_config("quickstart", [*WIDE, *options])


def with_capacity(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "_capacity", lambda device: num_bytes)


def advice(lines: Sequence[str]) -> str:
    (warning,) = [line for line in lines if line.startswith("warning")]
    return warning.partition("out of memory: ")[2]


def test_trainer_and_engine_on_one_device_share_it() -> None:
    (found,) = device_memory(configured("--engine.kv_cache_bytes", str(300 * 2**20)))
    assert found.device == "cpu"
    assert found.parts["engines' cache"] == 300 * 2**20
    assert found.parts["engines' weights"] == found.parts["weights"] == found.parts["gradients"]
    assert found.parts["optimizer"] == 2 * found.parts["weights"]
    assert found.total == sum(found.parts.values())


def test_the_reference_of_an_algorithm_is_counted() -> None:
    plain, compared = (
        device_memory(configured("--algorithm.name", "grpo", "--algorithm.kl_coef", coef))[0] for coef in ("0", "0.1")
    )
    assert plain.parts["reference policy"] == 0
    assert compared.parts["reference policy"] == compared.parts["weights"]


def test_ranks_on_a_cpu_share_its_memory_and_each_has_its_rows() -> None:
    (one,), (two,) = (device_memory(configured("--trainer.num_devices", n)) for n in ("1", "2"))
    assert two.parts["weights"] == pytest.approx(one.parts["weights"], rel=1e-6)
    assert two.parts["activations"] == 2 * one.parts["activations"]
    assert one.parts["gathered weights"] == 0 < two.parts["gathered weights"]


def test_of_ranks_on_a_cluster_it_says_what_each_takes() -> None:
    (alone,) = device_memory(configured("--trainer.num_devices", "2"))
    here, there = reversed(device_memory(configured("--trainer.num_devices", "64", "--cluster.address", "auto")))
    assert {*here.parts} == {"engines' weights", "engines' cache"}
    assert there.capacity is None and there.fits and there.parts["activations"] == alone.parts["activations"] / 2
    assert str(there).startswith("memory of each rank on the cluster: needs up to ") and " (weights " in str(there)


def test_it_says_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capacity(monkeypatch, 64 * 2**30)
    (line,) = memory_lines(configured())
    assert line.startswith("memory of cpu: needs up to ")
    assert ", 64.0 GiB available: fits (weights " in line


def test_it_advises_what_makes_the_largest_part_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = device_memory(configured())[0]
    assert needed.parts["activations"] == max(needed.parts.values())
    with_capacity(monkeypatch, needed.total - 1)
    assert advice(memory_lines(configured())) == "set trainer.gradient_checkpointing = true"
    recomputed = configured("--trainer.gradient_checkpointing", "true", "--engine.kv_cache_bytes", str(100 * 2**20))
    with_capacity(monkeypatch, device_memory(recomputed)[0].total - 1)
    assert advice(memory_lines(recomputed)).startswith("lower trainer.micro_batch_tokens, down to 416 (")
    deep = configured("--model.scratch.num_layers", "40", "--trainer.gradient_checkpointing", "true")
    with_capacity(monkeypatch, device_memory(deep)[0].total - 1)
    assert advice(memory_lines(deep)) == "set trainer.optimizer = 'adamw_8bit', or train adapters, [trainer.lora]"
    with_capacity(monkeypatch, 2**20)
    assert advice(memory_lines(deep)) == "take a smaller model, or a device with more memory"


def test_a_colocated_run_needs_the_larger_side_and_what_is_kept() -> None:
    for cache, turn in ((2**20 * 100, "while it trains"), (2**40, "while it generates")):
        options = ("--engine.kv_cache_bytes", str(cache))
        (apart,) = device_memory(configured(*options))
        (turns,) = device_memory(configured(*options, "--engine.colocated", "true"))
        kept = sum(apart.parts[name] for name in ("weights", "reference policy", "optimizer"))
        of_engine = apart.parts["engines' weights"] + cache
        in_step = apart.total - kept - of_engine
        assert turns.total == kept + max(of_engine, in_step) < apart.total
        assert turns.turn == turn and f" {turn}, " in str(turns)


def test_servers_that_take_turns_with_the_trainer_are_told_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capacity(monkeypatch, 4 * 2**30)
    lines = memory_lines(with_servers("vllm", "--engine.colocated", "true"))
    needed = device_memory(with_servers("vllm"))[0]
    share = 1 - 3 * needed.parts["weights"] / 2**32
    may_take = f"servers there may take at most {share:.2f} of the device (--gpu-memory-utilization)"
    assert sum(may_take in line for line in lines) == 1
    assert not any("may take" in line for line in memory_lines(with_servers("vllm")))


def with_servers(kind: str, *options: str) -> RunConfig:
    return build_config("quickstart", [*WIDE[:-2], "--engine.kind", kind, "--engine.launch", "true", *options])


def on_gpus(monkeypatch: pytest.MonkeyPatch, num: int, num_bytes: int, visible: str | None = None) -> None:
    """Have this process see some GPUs, each with so much memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=num_bytes, device=device)
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


GPU_TRAINER = ("--trainer.device", "cuda", "--trainer.num_devices")


def test_embedded_servers_on_a_cpu_share_memory_with_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = 8 * 2**30
    servers = ("--engine.num_servers", "2", "--engine.kv_cache_bytes", str(cache))
    (found,) = device_memory(with_servers("embedded_server", *servers))
    assert found.parts["engines' cache"] == 2 * cache
    assert found.parts["engines' weights"] == 2 * found.parts["weights"]  # both are float32 here
    with_capacity(monkeypatch, 16 * 2**30)
    said = advice(lines := memory_lines(with_servers("embedded_server", *servers)))
    assert "16.0 GiB available: does not fit" in lines[0]
    assert said == "lower engine.kv_cache_bytes"


def test_servers_are_counted_on_the_gpus_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 80 * 2**30)
    servers = ("--engine.num_servers", "4", "--engine.launch_devices", '["0", "1", "2", "3"]')
    found = device_memory(with_servers("embedded_server", *GPU_TRAINER, "4", *servers))
    assert [memory.device for memory in found] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert all(memory.parts["engines' cache"] == 512 * 2**20 and memory.parts["optimizer"] for memory in found)
    assert all(memory.parts["engines' weights"] == 2 * memory.parts["weights"] for memory in found), "bfloat16 by a 4th"
    on_gpus(monkeypatch, 4, 80 * 2**30, visible="0,1,2,3")
    servers = ("--engine.num_servers", "4", "--engine.launch_devices", '["4", "5", "2", "3"]')
    found = device_memory(with_servers("embedded_server", *GPU_TRAINER, "4", *servers))
    engines = {memory.device: memory.capacity for memory in found if "engines' cache" in memory.parts}
    assert engines == {"cuda:2": 80 * 2**30, "cuda:3": 80 * 2**30, "GPU 4": None, "GPU 5": None}


def test_servers_that_are_given_no_gpu_share_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 80 * 2**30, visible="0,1,2,3")
    found = device_memory(with_servers("embedded_server", *GPU_TRAINER, "2", "--engine.num_servers", "3"))
    caches = {memory.device: memory.parts.get("engines' cache") for memory in found}
    assert caches == {"cuda:0": 3 * 512 * 2**20, "cuda:1": None}


def test_the_embedded_engine_shares_the_first_gpu_with_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 2, 80 * 2**30)
    first, second = device_memory(build_config("quickstart", [*WIDE[:-4], *GPU_TRAINER, "2"]))
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert "engines' cache" in first.parts and "engines' cache" not in second.parts


def test_offloaded_weights_are_counted_in_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 2, 80 * 2**30)
    options = [*WIDE[:-4], *GPU_TRAINER, "2", "--trainer.gradient_checkpointing", "true"]
    options += ["--model.scratch.num_layers", "40", "--trainer.micro_batch_tokens", "416", "--engine.device", "cpu"]
    on_gpu = device_memory(build_config("quickstart", options))[0]
    *gpus, machine = device_memory(build_config("quickstart", [*options, "--trainer.offload", "true"]))
    assert [one.device for one in (*gpus, machine)] == ["cuda:0", "cuda:1", "cpu"]
    kept = ("weights", "gradients", "optimizer")
    assert not any(one.parts[name] for one in gpus for name in kept)
    assert machine.parts[memory._OFFLOADED] == 2 * sum(on_gpu.parts[name] for name in kept)
    on_gpus(monkeypatch, 2, on_gpu.total - 1)
    assert advice(memory_lines(build_config("quickstart", options))).startswith("set trainer.offload = true, or")


@pytest.mark.parametrize(
    ("kind", "args", "devices"),
    [
        ("vllm", ("--gpu-memory-utilization", "0.6", "--tensor-parallel-size", "2"), ["cuda:0", "cuda:1"]),
        ("vllm", ("--gpu_memory_utilization=0.6",), ["cuda:0"]),
        ("sglang", ("--mem-fraction-static", "0.6"), ["cuda:0"]),
    ],
)
def test_servers_that_are_told_their_share_of_a_gpu_take_so_much(
    monkeypatch: pytest.MonkeyPatch, kind: str, args: tuple[str, ...], devices: list[str]
) -> None:
    on_gpus(monkeypatch, 2, 10 * 2**30)
    options = (*GPU_TRAINER, "2", "--engine.launch_args", json.dumps(args))
    found = device_memory(with_servers(kind, *options))
    shares = {memory.device: memory.parts["engines' share"] for memory in found if "engines' share" in memory.parts}
    assert shares == dict.fromkeys(devices, int(0.6 * 10 * 2**30))
    turns = device_memory(with_servers(kind, *options, "--engine.colocated", "true"))[0]
    kept = turns.parts["weights"] + turns.parts["optimizer"]
    assert (turns.turn, turns.total) == ("while it generates", kept + int(0.6 * 10 * 2**30))


def test_it_says_which_servers_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(config: RunConfig) -> list[str]:
        return [line for line in memory_lines(config) if "not included" in line]

    running = build_config(
        "quickstart", [*WIDE[:-2], "--engine.kind", "vllm", "--engine.urls", '["http://10.0.0.5:8000"]']
    )
    for config in (
        running,
        with_servers("vllm"),
        with_servers("vllm", "--cluster.address", "auto", "--cluster.engines", "64"),
    ):
        assert said(config) == ["memory: engines of engine.kind 'vllm' are not included"]
    assert said(with_servers("embedded_server")) == []
    on_gpus(monkeypatch, 2, 10 * 2**30)
    assert said(with_servers("sglang", "--engine.num_servers", "2")) == [
        "memory: engines of engine.kind 'sglang' are not included: name their share of a GPU in engine.launch_args, as"
        " in --mem-fraction-static 0.6"
    ]


def test_arguments_of_a_server_overrule_the_config() -> None:
    args = ("--kv_cache_bytes", str(300 * 2**20), "--dtype", "bfloat16")
    (found,) = device_memory(with_servers("embedded_server", "--engine.launch_args", json.dumps(args)))
    assert found.parts["engines' cache"] == 300 * 2**20
    assert 2 * found.parts["engines' weights"] == found.parts["weights"]
    with pytest.raises(ConfigError, match=r"^engine\.launch_args: dtype must be one of "):
        device_memory(with_servers("embedded_server", "--engine.launch_args", '["--dtype", "float8"]'))


def test_of_engine_servers_on_a_cluster_it_says_what_each_takes() -> None:
    found = device_memory(with_servers("embedded_server", "--cluster.address", "auto", "--cluster.engines", "64"))
    (each,) = (memory for memory in found if memory.device == "each engine server on the cluster")
    assert each.capacity is None and each.parts["engines' cache"] == 512 * 2**20
