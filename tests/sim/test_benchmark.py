"""The benchmark of strategies over the embedded engine: samples end where the replayed lengths say, in every unit."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.rollout.actions import StartSample
from rollover.rollout.config import RolloutConfig
from rollover.rollout.generation import generation_request
from rollover.rollout.scheduler import EachSample
from rollover.rollout.strategies import RolloverConfig
from rollover.sim.replica import Replica
from rollover.sim.scenario import ReplicaModel
from rollover.types import SampleId, Trajectory
from tests.engine.fake import FakeEngine
from tests.rollout.kit import run
from tests.sim.test_replica import call, drain
from tests.speed import within
from tests.virtual_time import VirtualClock

ROOT = Path(__file__).parents[2]
MODEL = ReplicaModel(c0_s=0.001, b0=8.0, prefill_tokens_per_s=20_000.0, swap_pause_s=0.01)


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark(monkeypatch, "replayed")


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark(monkeypatch, "rollout")


def lengths_file(folder: Path, rows: list[list[int]]) -> Path:
    file = folder / "lengths.json"
    file.write_text(json.dumps(rows))
    return file


def test_long_rows_make_several_prompts_behind_all_first_ones(replayed: ModuleType, tmp_path: Path) -> None:
    file = lengths_file(tmp_path, [[10, 20, 30, 40, 50], [60, 70, 80, 90, 1]])
    trace = replayed.read_lengths(file, 2, 10.0, 7)
    assert [p.lengths for p in trace.prompts] == [(1, 2), (6, 7), (3, 4), (8, 9)]
    assert (trace.cap_tokens, trace.prompts[0].prompt_tokens) == (9, 7)


def test_mean_context_weighs_every_decoded_token_alike(replayed: ModuleType, tmp_path: Path) -> None:
    trace = replayed.read_lengths(lengths_file(tmp_path, [[3, 1], [5, 2]]), 2, 1.0, 7)
    positions = [7 + i for n in (3, 1, 5, 2) for i in range(1, n + 1)]
    assert replayed.mean_context(trace) == pytest.approx(sum(positions) / len(positions))


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_a_sample_ends_at_its_length_whatever_is_trained(replayed: ModuleType, tmp_path: Path, unit: Any) -> None:
    workload = replayed.read_lengths(lengths_file(tmp_path, [[3, 14, 9], [26, 5, 8]]), 3, 1.0, 4).workload()
    config = RolloutConfig(unit=unit, rollout_batch_size=1, group_size=3, max_new_tokens=40)
    engine = FakeEngine(lambda request: 1000, auto=True, clock=VirtualClock(), max_running=8)
    wrapped = replayed.Replayed(engine, workload, config)
    source = EachSample(replayed.RandomPrompts(workload), config.num_siblings)
    per_group = 1 if unit == "sample" else 3

    async def decoded() -> list[int]:
        found = []
        for number in range(6):
            sample_id = SampleId(*divmod(number, per_group))
            trajectory = Trajectory(sample_id=sample_id, prompt=source.prompt(sample_id.group))
            request = generation_request(trajectory, str(sample_id), config.sampling(), 0, StartSample(sample_id, None))
            found.append(sum([len(chunk.token_ids) async for chunk in wrapped.generate(request)]))
        return found

    assert run(decoded()) == [3, 14, 9, 26, 5, 8]


@pytest.mark.parametrize("caches", ["keep", "recompute"])
def test_no_target_within_the_lag_beats_the_one_found(replayed: ModuleType, rollout: ModuleType, caches: str) -> None:
    trace = replayed.read_lengths(ROOT / "benchmarks" / "lengths.json", 4, 10.0, 16)
    ours = replace(rollout.settings(5, 4, trace.cap_tokens)[-2], kv_on_update=caches)
    model = replace(MODEL, prefill_tokens_per_s=2000.0)  # slow: carrying much over does not pay where caches are lost
    workload, steps, warmup = trace.workload(), 40, 8

    def score_once(target: float) -> tuple[float, float]:
        setting = replace(ours, config=replace(ours.config, strategy=RolloverConfig(lag_target=target)))
        window = replayed.foretell(setting, workload, model, steps).after(warmup)
        return window.lag.batch, window.tokens_per_s

    chosen = replayed.target_for(1.2, ours, workload, model, steps, warmup).config.strategy.lag_target
    found = {target: score_once(target) for target in (0.3, 0.6, 0.9, 1.2)}
    lag, fastest = score_once(chosen)
    assert lag <= 1.2
    assert fastest >= max(speed for lag, speed in found.values() if lag <= 1.2)
    assert fastest > found[0.3][1]


TABLE = ((1, 2.0), (3, 3.0), (5, 7.0))


@pytest.mark.parametrize(
    ("num_running", "seconds"), [(0, 2.0), (1, 2.0), (2, 2.5), (3, 3.0), (4, 5.0), (5, 7.0), (6, 9.0), (8, 13.0)]
)
def test_iteration_times_are_linear_between_the_points(rollout: ModuleType, num_running: int, seconds: float) -> None:
    assert rollout.TimedReplica(c0_s=1.0, b0=4.0, iteration_table=TABLE).iteration_s(num_running) == pytest.approx(
        seconds
    )


def test_samples_run_at_the_times_of_the_table(rollout: ModuleType) -> None:
    # Three run for 10 iterations of 3 s, two for 10 more of 2.5 s, one for 20 more of 2 s.
    replica = Replica(rollout.TimedReplica(c0_s=1.0, b0=4.0, iteration_table=TABLE))
    for c in (call(0, 10), call(1, 20), call(2, 40)):
        replica.add(c)
    assert drain(replica) == pytest.approx({0: 30.0, 1: 55.0, 2: 95.0})


def test_gains_are_over_the_first_setting_of_the_same_repeat(rollout: ModuleType) -> None:
    def entry(measured: float, line: float, lag: float) -> dict[str, Any]:
        return {"measured": {"tokens_per_s": measured, "lag": lag}, "line": {"tokens_per_s": line, "lag": 0.0}}

    repeats = [
        {"sync": entry(100, 50, 0), "april": entry(150, 60, 1)},
        {"sync": entry(10, 10, 0), "april": entry(17, 14, 2)},
    ]
    found = rollout.summary(repeats)["april"]
    assert found["gains"] == pytest.approx([1.5, 1.7])
    assert found["gain"] == pytest.approx(1.6)
    assert found["foretold"] == {"line": pytest.approx(1.3)}
    assert found["measured_over_foretold"]["line"] == pytest.approx(1.6 / 1.3)
    assert found["mean"]["lag"] == pytest.approx(1.5)


def test_the_benchmark_decodes_what_was_foretold(tmp_path: Path) -> None:
    out = tmp_path / "rollout.json"
    subprocess.run(
        [sys.executable, "benchmarks/rollout.py", "--small", "--only", "april; april, recompute", "--out", str(out)],
        check=True,
        cwd=ROOT,
        capture_output=True,
        timeout=within(300),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    (found,) = json.loads(out.read_text())["repeats"]
    for entry in found.values():
        assert entry["measured"]["wasted_tokens"] == entry["table"]["wasted_tokens"] == 0
        assert entry["measured"]["seconds"] > 0
    sync = found["sync"]
    for key in ("lag", "length_drift", "reprefilled_tokens"):
        assert sync["measured"][key] == sync["line"][key] == 0
    assert sync["measured"]["decoded_tokens"] == sync["line"]["decoded_tokens"]
    assert (
        found["april"]["measured"]["reprefilled_tokens"] == 0 < found["april, recompute"]["line"]["reprefilled_tokens"]
    )
    assert found["april"]["measured"]["lag"] > 0
