from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rollover.environments.pool import WorkerPool
from rollover.environments.rater import Rater
from rollover.environments.rewards import EnvironmentRewardConfig, FunctionConfig, MathVerifyConfig, VerifierConfig
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.scorer import RewardScorer
from rollover.environments.scoring import score_once
from rollover.errors import DataError, RewardError
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import train_source
from rollover.tasks.sources import ReasoningGymConfig
from rollover.types import Prompt, SampleId, Trajectory
from tests.environments.words import char_tokenizer, ids
from tests.segments import segment
from tests.speed import within

FUNCTIONS = "tests.environments.functions"
PATIENCE_S = within(120.0)

pytestmark = pytest.mark.real_time


def trajectory(prompt: Prompt, text: str) -> Trajectory:
    return Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=(segment((*ids(text), 1)),))


def prompt(source: str = "s", **columns: Any) -> Prompt:
    return Prompt(prompt_id=f"{source}/0@0", token_ids=(0,), text="p", source=source, columns=columns)


def spec(name: str, source: str = "s", columns: tuple[str, ...] = (), **fields: Any) -> RewardSpec:
    config = FunctionConfig(function=f"{FUNCTIONS}:{name}", **({"workers": 1} | fields))
    return RewardSpec(source=source, config=config, columns=columns)


@asynccontextmanager
async def scoring(specs: Sequence[RewardSpec]) -> AsyncIterator[RewardScorer]:
    scorer = RewardScorer(specs, char_tokenizer())
    async with asyncio.timeout(PATIENCE_S):
        try:
            yield scorer
        finally:
            await scorer.close()


async def test_what_evaluations_cost_is_no_part_of_a_step() -> None:
    config = MathVerifyConfig(workers=1, retries=0)
    sources = ("s", "eval/s")
    async with scoring([RewardSpec(source=s, config=config, answer_column="answer") for s in sources]) as scorer:
        assert await scorer.score(trajectory(prompt("eval/s", answer="4"), "4")) == 1.0
        assert scorer.costs() == {"reward/work_s": 0.0, "reward/late": 0.0}
        assert scorer.costs(in_evaluations=True)["reward/work_s"] > 0


async def test_inline_and_in_a_process_the_verifier_gives_the_same_reward() -> None:
    for workers in (0, 1):
        config = ReasoningGymConfig(name="chain_sum", reward=VerifierConfig(extract="hashes", workers=workers))
        source = train_source(TasksConfig(train=(config,)), char_tokenizer(), seed=0)
        asked = source.prompt(5)
        answer = asked.columns["answer"]
        async with scoring(source.reward_specs) as scorer:
            for text, reward in ((f"#### {answer}", 1.0), ("#### x", 0.0), ("", 0.0)):
                assert await scorer.score(trajectory(asked, text)) == reward


async def test_the_event_loop_runs_on_while_a_reward_hangs() -> None:
    async with scoring([spec("hangs", timeout_s=0.3, retries=0)]) as scorer:
        await scorer.score(trajectory(prompt(), "ok"))
        hanging = asyncio.create_task(scorer.score(trajectory(prompt(), "hang")))
        turns = 0
        while not hanging.done():
            await asyncio.sleep(0)
            turns += 1
        assert isinstance(hanging.exception(), RewardError)
        assert turns > 100


async def test_a_cancelled_scoring_leaves_no_busy_process_behind() -> None:
    async with scoring([spec("hangs", timeout_s=60.0)]) as scorer:
        await scorer.score(trajectory(prompt(), "ok"))
        hanging = asyncio.create_task(scorer.score(trajectory(prompt(), "hang")))
        await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert scorer.num_processes == 0
        assert await scorer.score(trajectory(prompt(), "ok")) == 1.0


async def test_a_failing_reward_is_retried_once(tmp_path: Path) -> None:
    async with scoring([spec("once_bad", columns=("path",))]) as scorer:
        asked = prompt(path=str(tmp_path / "called"))
        assert await scorer.score(trajectory(asked, "x")) == 1.0


@pytest.mark.parametrize("workers", [0, 1])
async def test_an_unusable_reward_fails_its_sample_alone_without_a_retry(workers: int) -> None:
    attempts = mock.Mock(side_effect=Rater._attempt)
    with mock.patch.object(Rater, "_attempt", lambda *given, **named: attempts(*given, **named)):
        async with scoring([spec("evaluated", workers=workers, retries=3)]) as scorer:
            with pytest.raises(RewardError, match=rf"{FUNCTIONS}:evaluated returned nan, which is not finite"):
                await scorer.score(trajectory(prompt(), "[float('nan')]"))
            assert await scorer.score(trajectory(prompt(), "[2]")) == 2.0
            assert attempts.call_count == 2


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_return_of_another_form_ends_the_run_unless_one_was_right_before(workers: int) -> None:
    async with scoring([spec("evaluated", workers=workers)]) as scorer:
        with pytest.raises(DataError, match=f"{FUNCTIONS}:evaluated must return a list of 1 number, got ") as caught:
            await scorer.score(trajectory(prompt(), "1.0"))
        assert not isinstance(caught.value, RewardError)
        assert await scorer.score(trajectory(prompt(), "[1]")) == 1.0
        with pytest.raises(RewardError, match=r"must return a list of 1 number, got list \[\]"):
            await scorer.score(trajectory(prompt(), "[]"))


async def test_a_function_that_cannot_be_built_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (module := tmp_path / "only_once.py").write_text("def reward(completions, **columns): return [1.0]\n")
    config = FunctionConfig(function="only_once:reward", workers=1)
    async with scoring([RewardSpec(source="s", config=config)]) as scorer:
        module.write_text("raise RuntimeError('once was enough')\n")
        with pytest.raises(DataError, match=r"cannot import 'only_once' \(RuntimeError: once was enough"):
            await scorer.score(trajectory(prompt(), "x"))


@pytest.fixture
def slow_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify, as a library that hangs on some responses and fails on others."""
    (tmp_path / "math_verify.py").write_text(
        "def parse(text, parsing_timeout):\n"
        "    while 'hang' in text: pass\n"
        "    if 'raise' in text: raise ValueError('digits')\n"
        "    return [text.removeprefix('\\\\boxed').strip('{}')]\n"
        "def verify(gold, answer, **settings): return gold == answer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def checked(*timeouts_s: float) -> list[RewardSpec]:
    """One source ``s0``, ``s1``, ... for each deadline, each with retries, whose checks share two processes."""
    return [
        RewardSpec(source=f"s{i}", config=MathVerifyConfig(timeout_s=t, retries=3), answer_column="answer")
        for i, t in enumerate(timeouts_s)
    ]


@pytest.mark.usefixtures("slow_library")
async def test_a_check_against_a_known_answer_that_is_late_scores_0_once() -> None:
    async with scoring(checked(60.0, 0.3)) as scorer:
        asked, late = prompt("s0", answer="4"), prompt("s1", answer="4")
        assert await scorer.score(trajectory(asked, "4")) == 1.0
        assert await scorer.score(trajectory(late, "so \\boxed{hang}")) == 0.0
        assert await scorer.score(trajectory(asked, "raise")) == 0.0
        assert scorer.num_processes == 1
        assert await scorer.score(trajectory(late, "hence \\boxed{hang}")) == 0.0
        assert scorer.num_processes == 1, "the same answer to the same row is not checked again"
        assert await scorer.score(trajectory(asked, "4")) == 1.0
        assert scorer.costs()["reward/late"] == 2


@pytest.mark.usefixtures("slow_library")
async def test_late_checks_together_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines_s: list[float] = []

    async def late(pool: WorkerPool, job: dict[str, Any], begin: Callable[[], float]) -> dict[str, Any]:
        deadlines_s.append(begin())
        await asyncio.sleep(0)
        if "hang" in job["samples"][0]["completion"]:
            raise TimeoutError
        return {"values": [1.0]}

    monkeypatch.setattr(WorkerPool, "run", late)
    async with scoring(checked(10.0)) as scorer:
        for n in range(64):
            await scorer.score(trajectory(prompt("s0", answer="4"), f"hang {n}"))
        assert deadlines_s == [10.0] * 6 + [1.0] * 58
        for _ in range(10):
            await scorer.score(trajectory(prompt("s0", answer="4"), "4"))
        await scorer.score(trajectory(prompt("s0", answer="4"), "hang after all"))
        assert deadlines_s[-1] == 10.0


async def test_a_late_sum_of_rewards_is_retried_and_befalls_no_other_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Any] = [TimeoutError(), 0.5, 2.0]

    async def late_once(pool: WorkerPool, job: dict[str, Any], begin: Callable[[], float]) -> dict[str, Any]:
        begin()
        if isinstance(reply := replies.pop(0), TimeoutError):
            raise reply
        return {"values": [reply]}

    monkeypatch.setattr(WorkerPool, "run", late_once)
    async with scoring([RewardSpec(source="s", config=EnvironmentRewardConfig())]) as scorer:
        assert [await scorer.score(trajectory(prompt(), "done")) for _ in range(2)] == [0.5, 2.0]
        assert scorer.costs()["reward/late"] == 0


@pytest.mark.parametrize(("weight", "none"), [(1.0, 0.0), (0.0, None)])
def test_a_curve_lacks_the_episodes_that_were_given_no_reward(weight: float, none: float | None) -> None:
    spec = RewardSpec(source="s", config=EnvironmentRewardConfig(weight=weight))
    reward = spec.config.build(spec)
    for given, total in (([None, None], none), ([None, 0.0], 0.0), ([1.0, 0.5], 1.5)):
        transcript = tuple({"role": "environment", "content": "", "reward": each} for each in given)
        sample = RewardSample(prompt="", columns={}, completion="", completion_ids=(), transcript=transcript)
        assert reward.score(sample) == total


ODD_REASONS = [
    ("KeyError", "KeyError: 'by the function' (functions.py, line "),
    ("TimeoutError", "TimeoutError: by the function (functions.py, line "),
    ("GeneratorExit", "GeneratorExit: by the function (functions.py, line "),
    ("SystemExit", "SystemExit: by the function (functions.py, line "),
    ("BaseException", "BaseException: by the function (functions.py, line "),
    ("CancelledError", "it cancelled itself"),
    ("Nameless", "Nameless (functions.py, line "),
]


@pytest.mark.parametrize(
    ("kind", "reason", "workers"),
    [
        *((kind, reason, workers) for kind, reason in ODD_REASONS for workers in (0, 1)),
        ("KeyboardInterrupt", "KeyboardInterrupt: by the function (functions.py, line ", 1),
    ],
)
async def test_any_exception_fails_its_sample_with_function_reason_and_prompt(
    kind: str, reason: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "raises_anything" if workers else "raises_anything_async"
    async with scoring([spec(name, workers=workers, retries=0)]) as scorer:
        said = rf"\Areward {FUNCTIONS}:{name} of source 's': {re.escape(reason)}.*\(prompt s/0@0\)\Z"
        with pytest.raises(RewardError, match=said):
            await scorer.score(trajectory(prompt(), kind))
        assert scorer.num_processes == workers, "the process lives on"
    out, err = capfd.readouterr()
    assert out + err == ""


async def test_ctrl_c_ends_the_run_while_a_function_is_called_inside_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        async with scoring([spec("raises_anything_async", workers=0)]) as scorer:
            await scorer.score(trajectory(prompt(), "KeyboardInterrupt"))


async def test_a_scoring_that_is_closed_from_outside_ends() -> None:
    forever = spec("awaited_forever", workers=0)
    reward = forever.config.build(forever)
    sample = RewardSample(prompt="p", columns={}, completion="x", completion_ids=())
    one = score_once(reward, [sample])

    async def give_up() -> None:
        one.throw(GeneratorExit)

    one.send(None)
    with pytest.raises(GeneratorExit):
        await asyncio.create_task(give_up())


async def test_sources_share_one_pool_of_the_largest_size() -> None:
    specs = [spec("length", "a"), spec("awaited", "b", workers=2), spec("awaited", "c", workers=0)]
    async with scoring(specs) as scorer:
        rewards = await asyncio.gather(*(scorer.score(trajectory(prompt(source), "abc")) for source in "abcabcabc"))
        assert rewards == [3.0, 0.25, 0.25] * 3
        assert 1 <= scorer.num_processes <= 2


async def test_an_async_function_may_run_on_the_event_loop_under_its_deadline() -> None:
    async with scoring([spec("awaited_forever", workers=0, timeout_s=0.05, retries=1)]) as scorer:
        with pytest.raises(RewardError, match=r"timed out after 0.05 s"):
            await scorer.score(trajectory(prompt(), "x"))
        assert scorer.num_processes == 0


@pytest.mark.parametrize("name", ["runs_a_loop", "judge", "partly_awaited"])
async def test_a_function_may_run_a_loop_of_its_own_or_be_any_form_of_async(name: str) -> None:
    for workers in (1,) if name == "runs_a_loop" else (0, 1):
        async with scoring([spec(name, workers=workers, retries=0)]) as scorer:
            assert [await scorer.score(trajectory(prompt(), "x")) for _ in range(2)] == [0.25, 0.25]


@pytest.mark.parametrize("name", ["remembered", "partly_remembered"])
def test_a_function_that_is_cached_by_its_arguments_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"functools.cache or lru_cache, which cannot hash the lists"):
        RewardScorer([spec(name)], char_tokenizer())


@pytest.mark.parametrize("name", ["yields", "yielding", "partly_yields"])
def test_a_generator_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=rf"{name} is a generator: return a list in place of each yield"):
        RewardScorer([spec(name)], char_tokenizer())


def test_a_blocking_function_is_not_let_onto_the_event_loop() -> None:
    with pytest.raises(DataError, match=r"length is not async and would block the run; set reward.workers"):
        RewardScorer([spec("length", workers=0)], char_tokenizer())
