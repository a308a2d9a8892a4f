"""What a dry run says of memory: whose it is, whether it fits, and a change that makes it fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollover.run import memory
from rollover.run.config import RunConfig
from rollover.run.memory import device_memory, memory_lines
from tests.run.test_config import load

WIDE = (
    *("--model.scratch.hidden_size", "768", "--model.scratch.intermediate_size", "2304"),
    *("--model.scratch.num_layers", "6", "--trainer.device", "cpu", "--engine.device", "cpu"),
)


def configured(*options: str) -> RunConfig:
    return load("quickstart", [*WIDE, *options])


def with_capacity(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "_capacity", lambda device: num_bytes)


def advice(lines: Sequence[str]) -> str:
    (warning,) = [line for line in lines if line.startswith("warning")]
    return warning.partition("out of memory: ")[2]


def test_trainer_and_engine_on_one_device_share_it() -> None:
    (found,) = device_memory(configured("--engine.kv_cache_bytes", str(300 * 2**20)))
    assert found.device == "cpu"
    assert found.parts["engine's cache"] == 300 * 2**20
    assert found.parts["engine's weights"] == found.parts["weights"] == found.parts["gradients"]
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
    assert {*here.parts} == {"engine's weights", "engine's cache"}
    assert there.capacity is None and there.fits and there.parts["activations"] == alone.parts["activations"] / 2
    assert str(there).startswith("memory of each rank on the cluster: ") and " at most: weights " in str(there)


def test_it_says_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capacity(monkeypatch, 64 * 2**30)
    (line,) = memory_lines(configured())
    assert line.startswith("memory of cpu: ")
    assert " of 64.0 GiB at most, fits: weights " in line


def test_what_it_advises_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = device_memory(configured())[0]
    recomputed = device_memory(configured("--trainer.gradient_checkpointing", "true"))[0]
    halved = device_memory(
        configured("--trainer.gradient_checkpointing", "true", "--trainer.micro_batch_tokens", "4096")
    )[0]
    assert needed.total > recomputed.total > halved.total
    with_capacity(monkeypatch, recomputed.total)
    assert advice(memory_lines(configured())) == "set trainer.gradient_checkpointing = true"
    with_capacity(monkeypatch, halved.total)
    said = advice(memory_lines(configured()))
    assert said == "set trainer.gradient_checkpointing = true and lower trainer.micro_batch_tokens to 4096"


def test_adapters_are_advised_where_the_optimizer_alone_is_too_much_and_another_device_where_nothing_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--model.scratch.num_layers", "40", "--engine.kv_cache_bytes", str(100 * 2**20))
    config = configured(*options)
    needed = device_memory(config)[0]
    with_capacity(monkeypatch, needed.parts["weights"] * 3 + 2**30)
    assert advice(memory_lines(config)).startswith("train adapters, [trainer.lora]")
    with_capacity(monkeypatch, 2**20)
    assert advice(memory_lines(config)) == "take a smaller model, or a device with more memory"


def test_engine_and_trainer_that_take_turns_need_the_larger_of_both_beside_what_the_trainer_keeps() -> None:
    for cache, turn in ((2**20 * 100, "while it trains"), (2**40, "while it generates")):
        options = ("--engine.kv_cache_bytes", str(cache))
        (apart,) = device_memory(configured(*options))
        (turns,) = device_memory(configured(*options, "--engine.colocated", "true"))
        kept = sum(apart.parts[name] for name in ("weights", "reference policy", "optimizer"))
        of_engine = apart.parts["engine's weights"] + cache
        in_step = apart.total - kept - of_engine
        assert turns.total == kept + max(of_engine, in_step) < apart.total
        assert turns.turn == turn and f" at most {turn}, " in str(turns)


def test_servers_that_take_turns_with_the_trainer_are_told_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capacity(monkeypatch, 4 * 2**30)
    servers = ("--engine.kind", "vllm", "--engine.launch", "true")
    lines = memory_lines(load("quickstart", [*WIDE[:-2], *servers, "--engine.colocated", "true"]))
    needed = device_memory(load("quickstart", [*WIDE[:-2], *servers]))[0]
    share = 1 - 3 * needed.parts["weights"] / 2**32
    assert sum(f"servers there may take at most {share:.2f} of it" in line for line in lines) == 1
    assert not any("servers" in line for line in memory_lines(load("quickstart", [*WIDE[:-2], *servers])))
