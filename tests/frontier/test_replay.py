from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.batch import WasteCause
from rollover.errors import ConfigError, DataError, RunError
from rollover.frontier.replay import Recorded, _trainer_s, read_recorded
from rollover.frontier.settings import check_strategies, default_strategies, setting
from rollover.frontier.setup import Setup
from rollover.report.metrics import MetricRow, MetricsWriter
from rollover.report.record import read_timeline
from rollover.report.throughput import TRAINED
from rollover.report.timeline import Acting, DecodedSpan
from rollover.rollout.events import BatchConsumed, BatchTrained, CheckpointSaved, Event, GroupOpened, SampleScored
from rollover.rollout.journal import Journal
from rollover.rollout.strategies import RolloverConfig
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, Scenario, Turns
from rollover.types import FinishReason
from tests.frontier.kit import LAW, REPLICA, small

TRUE = replace(REPLICA, prefill_tokens_per_s=float("inf"))


def using(strategy: str = "sync", value: float | None = None, **scenario: Any) -> Setup:
    """The small setup in which this setting of a strategy is in use."""
    lengths = scenario.pop("lengths", LAW)
    setup = small(lengths=lengths, scenario=Scenario(**({"replicas": (TRUE,)} | scenario)))
    return replace(setup, rollout=setting(strategy, setup, value))


def again(found: Recorded, steps: int, *, warmup: int) -> float:
    """Tokens per second of a simulation of what was recorded."""
    strategy = found.rollout.build_strategy(found.scenario.capabilities)
    simulated = simulate(strategy, found.trace.workload(0), found.scenario, steps=steps)
    return simulated.after(warmup).tokens_per_s


def recorded_run(
    folder: Path, setup: Setup, steps: int, changed: Callable[[list[Event]], list[Event]] = lambda events: events
) -> Path:
    """A run directory as the real loop would have left it, had the engine been the model's."""
    folder.mkdir()
    config = {"rollout": asdict(setup.rollout), "engine": {"kv_on_update": "keep", "max_running": 64}, "meta": {}}
    (folder / "config.json").write_text(json.dumps(config))
    events: list[Event] = []
    run = simulate(
        setup.rollout.build_strategy(setup.scenario.capabilities),
        setup.lengths.workload(0),
        setup.scenario,
        steps=steps,
        observer=lambda event: events.append(_with_prompt(event)),
    )
    journal = Journal(folder / "journal.sqlite")
    journal.append(changed(events))
    journal.close()
    with MetricsWriter(folder) as metrics:
        consumed_s = {event.step: event.time_s for event in events if isinstance(event, BatchConsumed)}
        end_s = {event.step - 1: event.time_s for event in events if isinstance(event, CheckpointSaved)}
        for s in run.steps:
            train_s = end_s[s.step] - consumed_s[s.step]
            times = {"time/step_s": s.duration_s, "time/rollout_s": s.duration_s - train_s, "time/train_s": train_s}
            metrics.write("step", s.step, end_s[s.step], times | {TRAINED.name: 1.0})
    return folder


def _with_prompt(event: Event) -> Event:
    """Simulated prompts are but numbers."""
    if not isinstance(event, GroupOpened):
        return event
    return event._replace(prompt=replace(event.prompt, token_ids=(0,) * LAW.prompt_tokens))


def test_neither_evaluations_nor_new_weights_are_time_of_the_trainer() -> None:
    times = {"rollout_s": 4.0, "evaluate_s": 30.0, "publish_s": 0.5, "sleep_s": 0.25, "step_s": 36.75}
    row = MetricRow(kind="step", step=0, time_s=0.0, values={f"time/{name}": s for name, s in times.items()})
    assert _trainer_s([row, row]) == 4.0


@pytest.mark.parametrize("strategy", ["sync", "april"])
def test_a_run_tells_its_engine_and_trainer(tmp_path: Path, strategy: str) -> None:
    latencies = {"trainer": Latency(s_per_token=1e-4), "reward": Latency(base_s=0.5)}
    setup = using(strategy, 2.0, kv_on_update="keep", **latencies)
    found = read_recorded(recorded_run(tmp_path / "run", setup, 12))
    assert found.rollout == setup.rollout
    (replica,) = found.scenario.replicas
    assert replica.c0_s == pytest.approx(TRUE.c0_s, rel=0.1)
    assert replica.b0 == pytest.approx(TRUE.b0, rel=0.2)
    assert replica.max_running == 64
    assert found.scenario.trainer.s_per_token == pytest.approx(1e-4, rel=0.01)
    assert found.scenario.reward.base_s == pytest.approx(0.5, rel=0.01)
    assert found.scenario.kv_on_update == "keep"
    assert again(found, 12, warmup=4) == pytest.approx(found.tokens_per_s(4), rel=0.03)


def test_a_step_whose_batch_was_skipped_trained_no_tokens(tmp_path: Path) -> None:
    def skipped(events: list[Event]) -> list[Event]:
        at = next(i for i, e in enumerate(events) if isinstance(e, BatchConsumed) and e.step == 5)
        return [*events[: at + 1], BatchTrained(events[at].time_s, 5, {WasteCause.SKIPPED: 1}), *events[at + 1 :]]

    setup = using(trainer=Latency(s_per_token=1e-4))
    found, whole = (
        read_recorded(recorded_run(tmp_path / str(n), setup, 12, changed)) for n, changed in enumerate([skipped, list])
    )
    assert len(found.step_tokens_per_s) == len(whole.step_tokens_per_s) - 1
    assert found.scenario.trainer.s_per_token == pytest.approx(1e-4, rel=0.01)
    file = tmp_path / "1" / "metrics.jsonl"
    file.write_text(file.read_text().replace(TRAINED.name, "x", 1))
    begun = read_recorded(tmp_path / "1").step_tokens_per_s
    assert begun == whole.step_tokens_per_s[1:], "a step whose batch was decoded by an earlier process has no speed"


def _scored_together(events: list[Event]) -> list[Event]:
    """Each sample gets its reward with the last of its siblings."""
    last = {event.sample_id.group: event.time_s for event in events if isinstance(event, SampleScored)}
    moved = [e._replace(time_s=last[e.sample_id.group]) if isinstance(e, SampleScored) else e for e in events]
    return sorted(moved, key=lambda event: event.time_s)


@pytest.mark.parametrize("key", ["reward", "rewards"])
def test_a_reward_that_compares_siblings_takes_time_after_the_last_of_them(tmp_path: Path, key: str) -> None:
    setup = using(reward=Latency(base_s=0.5))
    run = recorded_run(tmp_path / "run", setup, 12, changed=_scored_together)
    comparing: Any = {"kind": "function", "group": True}
    source = {"name": "", "reward": {"kind": "exact"}} | {key: [comparing] if key == "rewards" else comparing}
    assert rewritten(run, tasks={"train": [source]}).scenario.reward.base_s == pytest.approx(0.5, rel=0.01)
    assert read_recorded(run).scenario.reward.base_s == pytest.approx(0.5, rel=0.01)
    other = source | {"name": "other"}
    assert rewritten(run, tasks={"train": [other]}).scenario.reward.base_s > 0.6


def test_the_turns_of_episodes_are_measured_and_simulated_again(tmp_path: Path) -> None:
    turns = Turns(tokens=8, answer_s=0.4, answer_sigma=0.3, observed_tokens=5)
    law = replace(LAW, sigma=0.5, loop_probability=0.0)  # no episode ends at the limit of its tokens
    setup = using("april", 2.0, lengths=law, turns=turns, reward=Latency(base_s=0.5))
    run = recorded_run(tmp_path / "run", setup, 12)
    found, timeline = read_recorded(run), read_timeline(run)
    opening = Acting(start_s=0.0, end_s=9.0, num_tokens=100)
    asks = DecodedSpan(start_s=0.0, end_s=0.0, policy_version=0, num_tokens=0, finish_reason=FinishReason.TURN)
    opened = (replace(s, spans=(asks, *s.spans), acting=(opening, *s.acting)) for s in timeline.samples)
    with_openings = read_recorded(run, replace(timeline, samples=tuple(opened)))
    assert with_openings.scenario.turns == found.scenario.turns, "an opening answers no turn"
    assert found.scenario.reward.base_s == pytest.approx(0.5, rel=0.01)
    measured = found.scenario.turns
    assert measured is not None and measured.observed_tokens == 5
    assert measured.tokens == pytest.approx(8, abs=1)
    assert measured.answer_s == pytest.approx(0.4, rel=0.1) and measured.answer_sigma == pytest.approx(0.3, rel=0.2)
    assert found.notes[-1].startswith(f"Episodes: each turn has {measured.tokens} tokens, an answer 5 and takes")
    assert again(found, 12, warmup=4) == pytest.approx(found.tokens_per_s(4), rel=0.1)


def test_a_run_tells_how_much_its_filter_dropped(tmp_path: Path) -> None:
    """At an accuracy of 0.1, 0.9^4 + 0.1^4 = 66% of groups of 4 have equal rewards."""
    setup = using(accuracy=0.1, filter_zero_signal=True)
    found = read_recorded(recorded_run(tmp_path / "run", setup, 30))
    assert found.scenario.filter_zero_signal
    assert found.scenario.accuracy == pytest.approx(0.1, rel=0.15)
    assert "filter dropped 6" in found.notes[-1]


def test_options_do_not_change_the_accuracy_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path / "run", using(), 8)
    said = []
    for options in ((), ("--batch-size", "2")):
        assert cli.main(["simulate", "--from", str(run), "--strategies", "sync", "--seeds", "1", *options]) == 0
        said.append(re.search(r"The run trained [^:]*", " ".join(capsys.readouterr().out.split())))
    assert said[0] is not None and said[1] is not None and said[0][0] == said[1][0]


def rewritten(run: Path, **changes: Any) -> Recorded:
    """Read a run again with these tables in its config."""
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | changes))
    return read_recorded(run)


def test_several_servers_are_simulated_with_the_room_of_all(tmp_path: Path) -> None:
    setup = using("april", 2.0, replicas=4 * (replace(TRUE, max_running=6),), trainer=Latency(s_per_token=1e-4))
    run = recorded_run(tmp_path / "run", setup, 16)
    servers = {"kind": "vllm", "urls": [f"http://h{i}" for i in range(4)]}
    for each in (6, [6, 6, 6, 6]):
        assert rewritten(run, engine={**servers, "max_running": each}).scenario.max_running == 24
    for told, expected in ((24, 24), (40, 40), (6, max(n for _, n in read_timeline(run).active))):
        found = rewritten(run, engine={"kind": "vllm", "launch": True, "max_running": 6}, meta={"max_running": told})
        assert found.scenario.max_running == expected >= 18
    swarm = rewritten(run, engine={"kind": "swarm", "max_running": 256}, meta={"max_running": 256})
    assert swarm.scenario.max_running == max(n for _, n in read_timeline(run).active)
    assert again(found, 16, warmup=5) == pytest.approx(found.tokens_per_s(5), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "trainer", "meta", "expected"),
    [
        pytest.param("embedded", {"device": "cpu"}, {}, True, id="one device"),
        pytest.param("embedded", {"device": "cuda:1"}, {}, False, id="two devices"),
        pytest.param("embedded", {}, {}, True, id="an older run inside another trainer"),
        pytest.param("embedded", {}, {"takes_turns": False}, False, id="the host has devices of its own"),
        pytest.param("sglang", {}, {"takes_turns": True}, True, id="the host lets neither work beside the other"),
    ],
)
def test_what_decodes_during_training_is_left_out_if_they_take_turns(
    tmp_path: Path, kind: str, trainer: dict[str, str], meta: dict[str, bool], expected: bool
) -> None:
    setup = using()
    run = recorded_run(tmp_path / "run", setup, 6)
    found = rewritten(run, engine={"kind": kind, "device": "cpu", "max_running": 64}, trainer=trainer, meta=meta)
    setup = replace(setup, takes_turns=found.takes_turns)
    assert ("bounded_async" not in default_strategies(setup)) is expected
    if expected:
        with pytest.raises(ConfigError, match="trainer and engine took turns: remove it"):
            check_strategies(["bounded_async"], setup)


@pytest.mark.parametrize(("said", "simulated"), [(None, 20.0), (70.0, 70.0)])
def test_a_replay_tells_rollover_the_same_of_its_engine(tmp_path: Path, said: float | None, simulated: float) -> None:
    setup = small(unit="c0")
    strategy = RolloverConfig(prefill_tokens_per_iteration=said)
    setup = replace(setup, rollout=replace(setting("rollover", setup, 1.0), strategy=strategy))
    found = rewritten(recorded_run(tmp_path / "run", setup, 12), meta={"prefill_tokens_per_iteration": 20.0})
    assert found.rollout.strategy == RolloverConfig(prefill_tokens_per_iteration=simulated)


def test_the_lengths_of_a_run_are_those_it_decoded(tmp_path: Path) -> None:
    setup = using()
    trace = read_recorded(recorded_run(tmp_path / "run", setup, 6)).trace
    workload = setup.lengths.workload(0)
    assert [p.lengths for p in trace.prompts] == [workload.group_lengths(i, 4) for i in range(len(trace.prompts))]
    assert len(trace.prompts) == 36


def test_runs_too_short_to_learn_from_are_refused(tmp_path: Path) -> None:
    setup = using()
    run = recorded_run(tmp_path / "run", setup, 6)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(RunError, match="3 steps whose time is known; at least 4 are needed"):
        read_recorded(run)
    with pytest.raises(RunError, match="not a run directory"):
        read_recorded(tmp_path)
    (run / "journal.sqlite").unlink()
    with pytest.raises(DataError, match="the trace is empty"):
        read_recorded(run)
