"""One way to train for which memory does not suffice takes nothing from the others of the benchmark of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch

from tests.trainer.builders import make_folder

ROOT = Path(__file__).parents[2]


def test_a_way_without_memory_is_recorded_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_training import TrainingBench, show_training

    calls = 0

    def seconds(call: Callable[[], object]) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the second way, plain bfloat16
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        start_s = perf_counter()
        call()
        return perf_counter() - start_s

    bench = TrainingBench(
        device="cpu", folder=make_folder(tmp_path / "model", vocab_size=512), samples=2, tokens=8, steps=1
    )
    found = bench.measure(seconds)
    ways, lost = {**found["ways"]}, "plain bfloat16"
    assert ways.pop(lost) == {"out_of_memory": "CUDA out of memory. Tried to allocate 9 GiB."}
    assert {way: row["grad_norm_off_by"] < 1e-5 for way, row in ways.items()} == {
        **{"plain float32": True, "FSDP2 float32": True, "FSDP2 bfloat16": False}
    }
    assert all(row["grad_norm_off_by"] < 0.05 and row["tokens_per_s"] > 0 for row in ways.values())
    assert ways["plain float32"]["estimated_bytes"] > 16 * ways["plain float32"]["num_parameters"]
    assert found["fsdp2_overhead"].keys() == {"float32"} and found["head"]["chunked"]["loss"] > 0
    show_training(found)
    assert f"{lost}  ran out of memory: CUDA out of memory." in capsys.readouterr().out
