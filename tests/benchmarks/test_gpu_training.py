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
        if calls == 1:  # of the first way, plain float32
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        start_s = perf_counter()
        call()
        return perf_counter() - start_s

    bench = TrainingBench(
        device="cpu", folder=make_folder(tmp_path / "model", vocab_size=512), samples=2, tokens=8, steps=1
    )
    found = bench.measure(seconds)
    first, *others = found["ways"].values()
    assert first == {"out_of_memory": "CUDA out of memory. Tried to allocate 9 GiB."}
    assert len(others) == 3 and all(row["step_s"] > 0 for row in others)
    assert found["fsdp2_overhead"].keys() == {"bfloat16"} and found["head"]["chunked"]["step_s"] > 0
    show_training(found)
    assert "plain float32   ran out of memory: CUDA out of memory." in capsys.readouterr().out
