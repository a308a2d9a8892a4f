"""An evaluation survives failing calls and, when the engine is gone, says so in one error."""

from __future__ import annotations

import asyncio
import math
import re
import resource
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.batch import Batch, TrainedStep, WasteCause
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.environments.pass_at_k import MeanEstimate
from rollover.environments.rewards import ExactConfig
from rollover.errors import ConfigError, DataError, EngineError, EnginesAway, RewardError
from rollover.report.metrics import SPEED, MetricRow
from rollover.report.throughput import TRAINED
from rollover.rollout.environment import Environment, NoEnvironment
from rollover.rollout.ledger import Ledger
from rollover.run.best import Scores
from rollover.run.config import RunConfig
from rollover.run.evaluation import Evaluator
from rollover.run.interrupt import Interrupt
from rollover.run.jobs import _estimate, _run, completed
from rollover.run.loop import _evaluate_when_due, train
from rollover.run.meter import StepMeter
from rollover.run.sections import EvalConfig, EvalSetConfig, ModelConfig
from rollover.run.signals import handled
from rollover.tasks.config import TasksConfig
from rollover.tasks.sources.jsonl import JsonlConfig
from rollover.types import Observation, Prompt, Score, Trajectory
from tests.engine.fake import FakeEngine
from tests.engine.servers.pool.kit import Flaky, pool_of
from tests.engine.test_complete import Failing
from tests.rollout.kit import lognormal, make_rig
from tests.rollout.test_episodes import Game
from tests.virtual_time import VirtualClock


@dataclass
class Source:
    name: str = "p"
    num_rows: int = 5
    prompt_ids: tuple[int, ...] = (5, 6)

    def prompt(self, index: int) -> Prompt:
        prompt_id = f"eval/{self.name}/{index}@0"
        return Prompt(prompt_id=prompt_id, token_ids=self.prompt_ids, text="?", source=f"eval/{self.name}")


class Scorer:
    weight, num_scored = 1.0, 0

    def costs(self, *, in_evaluations: bool) -> dict[str, float]:
        return {"reward/late": self.num_scored}

    async def score(self, trajectory: Any) -> Score:
        self.num_scored += 1
        is_right = trajectory.num_tokens == 9
        return Score(self.weight * is_right, solved=is_right)


class Refusing(Scorer):
    """Cannot score the samples of one prompt."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def score(self, trajectory: Any) -> Score:
        if trajectory.prompt.prompt_id == "eval/p/0@0":
            raise self.error
        return await super().score(trajectory)


def config(*names: str, **changes: Any) -> RunConfig:
    sources = tuple(JsonlConfig(name=name, path="p.jsonl", reward=ExactConfig()) for name in names)
    evaluation = {"samples_per_prompt": 2, "max_new_tokens": 9, **changes}
    return RunConfig(model=ModelConfig(path="model"), tasks=TasksConfig(eval=sources), eval=EvalConfig(**evaluation))


def evaluator(
    engine: FakeEngine,
    scorer: Scorer | None = None,
    settings: RunConfig | None = None,
    environment: Environment | None = None,
    prompt_ids: tuple[int, ...] = (5, 6),
    **process: Any,
) -> Evaluator:
    settings = settings or config("p")
    return Evaluator(
        settings,
        engine=engine,
        sources=[Source(source.name, prompt_ids=prompt_ids) for source in settings.tasks.eval],  # type: ignore[misc]
        scorer=scorer or Scorer(),  # type: ignore[arg-type]
        environment=environment or NoEnvironment(),
        stops=(),
        clock=VirtualClock(),
        on_progress=lambda done, total: None,
        **process,
    )


async def test_responses_go_on_after_failures() -> None:
    result = await evaluator(Failing(after=4, failures=7)).run()
    assert result.lengths == (9,) * 10
    assert result.rows[-1].reward.mean == 1.0


async def test_an_evaluation_waits_for_servers_that_are_all_out_as_long_as_their_config_says() -> None:
    one = Flaky("one")
    async with pool_of(one, all_down_timeout_s=1500.0) as pool:
        one.failing = "power cut"
        await asyncio.sleep(30.0)
        settings = replace(config("p"), engine=VLLMConfig(urls=("http://one:1",), all_down_timeout_s=1500.0))
        with pytest.raises(EnginesAway, match="no engine has been up for 1500 s"):
            await evaluator(pool, settings=settings).run()  # type: ignore[arg-type]


async def test_a_sample_that_cannot_be_scored_counts_as_0_and_is_told() -> None:
    scorer = Refusing(RewardError("late"))
    scorer.weight = 0.5
    result = await evaluator(Failing(after=10**6, failures=0), scorer).run()
    assert (result.failures, result.rows[-1].reward.mean) == (("late", "late"), 0.4)
    assert result.metrics()["accuracy"] == 0.8
    assert [result.metrics()[f"eval/{name}"] for name in ("scored", "samples", "late")] == [8, 10, 8]


class Open(Game):
    most = 0

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        self.open.add(trajectory.sample_id)
        self.most = max(self.most, len(self.open))
        return await super().act(trajectory, now_s)


async def test_no_more_episodes_are_open_than_samples_decode() -> None:
    """Each may hold a program, even before its first token and between its turns."""
    game, engine = Open(), FakeEngine(lambda request: 4, auto=True, max_running=2)
    settings = config("p", max_new_tokens=60)
    result = await evaluator(engine, settings=settings, environment=game, prompt_ids=()).run()
    assert result.metrics()["eval/scored"] == 10
    assert (game.most, game.open) == (2, set())


def test_a_run_raises_its_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 65_536
    for before, after in [((256, 4096), 4096), ((256, 2**30), most), ((256, -1), most), ((2**20, -1), 2**20)]:
        limits = [before]
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limit, limits=limits: limits.append(limit))
        _run(asyncio.sleep(0))
        assert limits[-1] == (after, before[1])


async def test_a_wrong_reward_function_ends_the_evaluation_with_one_error() -> None:
    with pytest.raises(DataError, match="returns text"):
        await evaluator(Failing(after=10**6, failures=0), Refusing(DataError("returns text"))).run()


async def test_an_engine_that_is_gone_is_one_error() -> None:
    with pytest.raises(EngineError, match="dead on arrival"):
        await evaluator(Failing(after=0, failures=10**6)).run()


async def test_each_source_is_sampled_as_its_own_table_says() -> None:
    own = EvalSetConfig(samples_per_prompt=4, k=(1, 4), temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=7)
    engine = FakeEngine(lambda request: 50, auto=True)
    result = await evaluator(engine, settings=config("p", "q", k=(1, 2), sets={"q": own})).run()
    asked = Counter(
        (each.params.temperature, each.params.top_p, each.params.top_k, each.params.max_new_tokens)
        for each in engine.requests
    )
    assert asked == {(1.0, 1.0, 0, 9): 10, (0.6, 0.95, 20, 7): 20}
    assert [(row.source, row.num_samples, *row.pass_at) for row in result.rows] == [
        ("eval/p", 10, 1, 2),
        ("eval/q", 20, 1, 4),
        ("all", 30, 1),
    ]


def test_a_single_source_may_be_named_in_the_metric() -> None:
    assert config("p", keep_best=True, metric="accuracy/p").best_metric == "accuracy"
    assert config("p", "q", keep_best=True, metric="accuracy/p").best_metric == "accuracy/p"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets": {"q": EvalSetConfig()}}, "eval.sets.q is about no source of tasks.eval, which names p"),
        ({"keep_best": True, "metric": "pass@8"}, "eval.metric is 'pass@8', which no evaluation measures: use one of"),
        ({"metric": "accuracy/q"}, "eval.metric is 'accuracy/q', which no evaluation measures: use one of accuracy"),
        ({"patience": 2}, "set eval.every_steps too"),
        ({"sets": {"p": EvalSetConfig(k=(4,))}}, "eval.sets.p: with this table, eval.k must list numbers from 1 to"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config("p", **changes)


def test_sources_with_several_rewards_do_not_stand_in_for_an_evaluation() -> None:
    source = JsonlConfig(name="p", path="p.jsonl", rewards=(ExactConfig(), ExactConfig(name="again")))
    asked = RunConfig(model=ModelConfig(path="model"), tasks=TasksConfig(train=(source,)))
    with pytest.raises(ConfigError, match=r"tasks.eval names no source, and those of tasks.train cannot be .*'p'"):
        completed(asked, "evaluate")


async def test_an_evaluation_beside_training_measures_weights_near_its_own_in_an_engine_that_is_full() -> None:
    ended: list[tuple[int, int]] = []
    rig = make_rig(
        "bounded_async",
        max_running=16,
        rollout_batch_size=4,
        group_size=4,
        max_new_tokens=200,
        length=lognormal(30, 0.8, 200),
    )
    settings = replace(config("p", every_steps=10, max_new_tokens=200), steps=30)
    beside = evaluator(rig.engine, settings=settings, beside_training=True)
    for version in range(30):
        await rig.publish(version)
        start_s = asyncio.get_running_loop().time()
        for due, result in await beside.run_when_due(version) if version else ():
            assert due <= result.versions[0], "no older weights are measured"
            ended.append((due, result.versions[1]))
        assert asyncio.get_running_loop().time() == start_s, "training does not wait"
        assert (await rig.driver.next_batch()).step == version
    await rig.driver.stop()
    assert [due for due, _ in ended] == [10, 20]
    assert all(newest < due + 5 for due, newest in ended), ended


@pytest.mark.parametrize("placement", [None, SimpleNamespace(room=lambda: 4)])
async def test_an_evaluation_that_goes_on_when_the_run_ends_early_is_waited_for(placement: Any) -> None:
    engine = FakeEngine(lambda request: 50, auto=True, max_running=256 if placement else 4)
    settings = config("p", every_steps=1)
    beside = evaluator(engine, beside_training=True, settings=settings, placement=placement)
    assert await beside.run_when_due(1) == []
    beside.ends_at(1)
    [(version, result)] = await beside.run_when_due(1)
    assert (version, len(result.lengths)) == (1, 10)
    assert engine.num_ticks == 10 / 2 * 9, "half of the room there is now is left to the rollouts"


async def test_an_evaluation_that_a_stop_cut_off_is_made_up_for_by_the_weights_that_the_run_goes_on_from() -> None:
    settings, engine = config("p", every_steps=10), FakeEngine(lambda request: 50, auto=True)
    late, done = (
        evaluator(engine, settings=settings, beside_training=True, version=23, done_version=version)
        for version in (10, 20)
    )
    assert (late.is_due(23), done.is_due(23)) == (True, False)
    assert await late.run_when_due(23) == []
    late.ends_at(24)
    assert [version for _ in range(2) for version, _ in await late.run_when_due(24)] == [23, 24]


def test_best_and_patience_count_evaluations() -> None:
    rows = [MetricRow(kind="eval", step=s, time_s=0.0, values={"accuracy": v}) for s, v in ((0, 0.3), (20, 0.5))]
    scores = Scores("accuracy", [*rows, MetricRow(kind="step", step=30, time_s=0.0, values={"accuracy": 0.9})])
    for version, value in ((40, 0.5), (60, math.nan), (80, 0.4)):
        scores.add(version, value)
    assert (scores.best, scores.num_since_best) == (20, 2)
    assert (Scores("pass@8", rows).best, Scores("pass@8", rows).num_since_best) == (None, 0)


def test_the_best_checkpoint_is_the_best_of_those_that_are_kept(tmp_path: Path) -> None:
    values = ((0, 0.3), (20, 0.9), (40, 0.4), (60, 0.5), (80, 0.5))
    scores = Scores("accuracy", [MetricRow(kind="eval", step=s, time_s=0.0, values={"accuracy": v}) for s, v in values])
    for step in (40, 60, 80):
        (tmp_path / f"step_{step}").mkdir()
    assert (scores.best, scores.best_kept(tmp_path)) == (20, 60)
    (tmp_path / "step_20").mkdir()
    assert (scores.best_kept(tmp_path), scores.best_kept(tmp_path / "none")) == (20, 0)


@pytest.mark.parametrize(("strategy", "counted_s"), [("sync", 0.0), ("bounded_async", 5.0)])
async def test_the_time_of_an_evaluation_counts_where_rollouts_go_on(strategy: str, counted_s: float) -> None:
    rig = make_rig(strategy, rollout_batch_size=2, group_size=2, length=lognormal(30, 0.8, 200))
    clock = VirtualClock()
    scorer: Any = SimpleNamespace(costs=dict)
    meter = StepMeter(rig.ledger, scorer, None, clock, overlaps_training=True)
    await rig.publish(0)
    with meter.paused():
        await asyncio.sleep(3.0)
    began_s = clock.now_s()
    batch = await rig.driver.next_batch()
    collected_s = clock.now_s() - began_s
    with meter.paused():
        await asyncio.sleep(5.0)
    metrics = meter.step_ended(batch, TrainedStep(metrics={})).metrics
    await rig.driver.stop()
    assert metrics["time/step_s"] == pytest.approx(collected_s + counted_s)
    assert metrics.get("time/evaluate_s", 0.0) == pytest.approx(counted_s), "it is no time of the trainer"
    rig.ledger.replay.append(0)  # as in the process after a kill, which measures nothing of its speed
    meter = StepMeter(rig.ledger, scorer, None, clock, overlaps_training=True)
    await asyncio.sleep(1.0)
    again = meter.step_ended(batch, TrainedStep(metrics={"time/step_s": 1.0, "loss": 0.5})).metrics
    assert again["loss"] == 0.5 and not any(name.startswith(SPEED) for name in again)
    rig.ledger.replay.clear()  # as after a kill before the batch was whole
    meter = StepMeter(rig.ledger, scorer, None, clock, overlaps_training=True)
    for has_speed in (False, True):
        await asyncio.sleep(1.0)
        again = meter.step_ended(batch, TrainedStep(metrics={})).metrics
        assert ("time/step_s" in again, TRAINED.name in again) == (True, has_speed)


async def test_ctrl_c_lets_the_checkpoint_before_an_evaluation_be_written_and_begins_none() -> None:
    """Otherwise the run's last checkpoint would be written beside it, to the same place."""
    happened = list[str]()

    async def save() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60.0)
        happened.append("saved")

    async def measure(version: int) -> list[Any]:
        happened.append("measured")
        return []

    interrupt = Interrupt(SimpleNamespace(message=happened.append), resume="")  # type: ignore[arg-type]
    session: Any = SimpleNamespace(
        config=SimpleNamespace(eval=SimpleNamespace(keep_best=True)),
        evaluator=SimpleNamespace(is_due=lambda version: True, run_when_due=measure),
        version=4,
        checkpoints=SimpleNamespace(save=save),
        meter=SimpleNamespace(paused=nullcontext),
    )
    with handled(interrupt.on_signal), interrupt.deferred():
        await _evaluate_when_due(session, interrupt)
    assert [each[:14] for each in happened] == ["stopping after", "saved"]


async def test_an_evaluation_keeps_to_the_room_of_workers_while_they_are_checked() -> None:
    engine, open_calls = FakeEngine(lambda request: 50, auto=True, max_running=256), list[int]()

    class Checked(Scorer):
        async def score(self, trajectory: Any) -> Score:
            open_calls.append(engine.stats().num_running)
            placement.room = lambda: 0
            return await super().score(trajectory)

    placement = SimpleNamespace(room=lambda: 4)
    beside = evaluator(engine, Checked(), beside_training=True, placement=placement)
    assert len((await beside.run(beside=True)).lengths) == 10
    assert max(open_calls) <= 2 and engine.num_ticks == 10 / 2 * 9


async def test_an_evaluation_that_has_ended_is_on_record_before_the_last_one_begins() -> None:
    engine = FakeEngine(lambda request: 50, auto=True)
    settings, shown = replace(config("p", every_steps=1), steps=2), list[int]()
    scores = SimpleNamespace(metric="accuracy", add=lambda version, value: shown.append(version))
    interrupt = Interrupt(SimpleNamespace(message=lambda text: None), resume="")  # type: ignore[arg-type]
    session: Any = SimpleNamespace(
        config=settings,
        evaluator=evaluator(engine, settings=settings, version=1, beside_training=True),
        version=1,
        scores=scores,
        clock=VirtualClock(),
        observe=lambda event: signal.raise_signal(signal.SIGINT),
        meter=SimpleNamespace(paused=nullcontext),
    )
    with handled(interrupt.on_signal), interrupt.deferred():
        await _evaluate_when_due(session, interrupt)
        session.version = 2
        await _evaluate_when_due(session, interrupt)
    assert (shown, session.evaluator.is_complete(2)) == ([1], False)


@pytest.mark.parametrize(
    ("stops", "patience", "beside"), [(False, 0, False), (True, 0, False), (True, 1, False), (True, 1, True)]
)
async def test_workers_are_not_sent_home_before_the_last_evaluation(stops: bool, patience: int, beside: bool) -> None:
    happened = list[str]()

    async def nothing() -> None: ...

    class Slow(Scorer):
        async def score(self, trajectory: Any) -> Score:
            if stops and not interrupt.requested:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60.0)
            return await super().score(trajectory)

    scores = Scores("accuracy", [])
    scores.add(0, 0.5)
    scores.add(3, 0.5)
    settings = replace(config("p", every_steps=3, patience=patience), steps=8 if patience else 4)
    interrupt = Interrupt(SimpleNamespace(message=lambda text: None), resume="")  # type: ignore[arg-type]
    costless: Any = SimpleNamespace(costs=dict)
    meter = StepMeter(Ledger(), costless, None, VirtualClock(), overlaps_training=True)
    session: Any = SimpleNamespace(
        config=settings,
        evaluator=evaluator(
            FakeEngine(lambda request: 50, auto=True),
            Slow(),
            settings,
            version=4,
            done_version=0 if beside else 3,
            beside_training=beside,
        ),
        scores=scores,
        version=4,
        weights=SimpleNamespace(publish=lambda: asyncio.sleep(30.0)),
        driver=SimpleNamespace(stop=nothing, run_ended=lambda: happened.append("ended")),
        checkpoints=SimpleNamespace(save=nothing),
        meter=meter,
        clock=VirtualClock(),
        resume_command="",
        observe=lambda event: happened.append(type(event).__name__),
    )
    with handled(interrupt.on_signal):
        await train(session, interrupt)
    assert [each for each in happened if each != "Notice"] == ([] if stops else ["Evaluated", "ended"])
    await asyncio.sleep(1.0)
    ended = meter.step_ended(Batch(step=4, groups=()), TrainedStep(metrics={}, untrained={WasteCause.SKIPPED: 0}))
    assert ended.metrics["time/step_s"] == 1.0, "neither the evaluation nor the weights that a process begins with"


def test_the_table_of_an_evaluation_shows_a_standard_error_of_0() -> None:
    assert [_estimate(MeanEstimate(1.0, error)) for error in (0.0, None)] == ["1.000±0.000", "1.000"]
