"""TRL's trainer over the scheduler: what reaches its loss, and what the loss makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollover.batch import Batch, Group, WasteCause
from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import EngineError, EngineMismatch, RunError
from rollover.integrations.trl import rollouts
from rollover.integrations.trl.answers import Answers, measure
from rollover.integrations.trl.prompts import ROW
from rollover.report.record import read_run
from rollover.report.run_report import render_report
from rollover.rollout.events import BatchConsumed, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.trainer.gathering import measured_drift
from rollover.types import Prompt, SampleId, Segment, Trajectory
from tests.engine.servers.model_server import ModelServer, SGLangModelServer, serving
from tests.integrations.trl.kit import (
    APRIL,
    GENERATIONS,
    PROMPTS,
    WatchedTrainer,
    arguments,
    distances,
    journaled,
    lags,
    letters,
    logged,
    rows,
    share,
    trainer,
)
from tests.runs import save_model

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

STEPS = 12
SYNC = {"rollout": {"strategy": "sync"}}


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Twelve steps under ``april``, and the folder that they were taken in."""
    folder = tmp_path_factory.mktemp("april")
    trained = trainer(tiny_model, folder, max_steps=STEPS)
    trained.train()
    return trained, folder


def test_every_step_trains_a_batch_of_the_journal_with_its_exact_tokens(run: tuple[Any, Path]) -> None:
    trained, folder = run
    batches = journaled(folder)
    assert [batch.step for batch in batches] == [*range(STEPS)]
    assert len({g.group_id for batch in batches for g in batch.groups}) == STEPS * PROMPTS
    for seen, batch in zip(trained.seen, batches, strict=True):
        expected = [list(t.token_ids) for t in batch.trajectories]
        assert rows(seen, "completion_ids") == expected
        assert seen.output["completion_mask"].sum(1).tolist() == [len(ids) for ids in expected]
        prompts = [
            [i for i in row.tolist()][-len(t.prompt.token_ids) :]
            for row, t in zip(seen.output["prompt_ids"], batch.trajectories, strict=True)
        ]
        assert prompts == [list(t.prompt.token_ids) for t in batch.trajectories]


def test_behaviour_log_probs_are_those_of_the_journal_bit_for_bit(run: tuple[Any, Path]) -> None:
    trained, folder = run
    for seen, batch in zip(trained.seen, journaled(folder), strict=True):
        assert rows(seen, "sampling_per_token_logps") == [list(t.rollout_logprobs) for t in batch.trajectories]


def test_trl_agrees_with_the_engine_about_tokens_of_the_current_weights(run: tuple[Any, Path]) -> None:
    fresh, old = distances(run[0].seen)
    assert len(fresh) > 1000
    assert max(map(abs, fresh)) < 1e-4
    assert len(old) > 500, "too little rolled over for the tests of this file to show anything"


def test_the_importance_ratio_is_one_on_new_tokens_and_another_on_old_ones(run: tuple[Any, Path]) -> None:
    new, old = [], []
    for seen in run[0].seen:
        for ratios, fresh in zip(rows(seen, "importance_sampling_ratio"), seen.answers.fresh, strict=True):
            for ratio, is_fresh in zip(ratios, fresh, strict=True):
                (new if is_fresh else old).append(ratio)
    assert max(abs(ratio - 1) for ratio in new) < 1e-4
    assert sum(abs(ratio - 1) > 0.01 for ratio in old) > len(old) / 2
    assert min(old) < 0.8 and max(old) > 1.2


def test_the_bound_and_the_account_hold_at_every_step(run: tuple[Any, Path]) -> None:
    trained, folder = run
    decoded, counted = 0, {}
    for _, event in read_events(folder / "out" / "_rollover" / "journal.sqlite", effective=True):
        if isinstance(event, SegmentEnded):
            decoded += len(event.segment.token_ids)
        elif isinstance(event, BatchConsumed):
            counted[event.step] = decoded
    bound = trained.rollover_config.rollout.staleness_bound
    oldest = [max(lags(seen.batch)) for seen in trained.seen]
    assert bound == 2 and {*oldest} <= {0, 1, 2} and max(oldest) > 0, "some tokens are older"
    for seen in trained.seen:
        assert min(lags(seen.batch)) >= 0
        account = seen.account
        wasted = sum(n for name, n in account.items() if name.startswith("rollout/wasted_tokens/"))
        sampled = account["rollout/trained_tokens"] + wasted + account["rollout/live_tokens"]
        assert account["rollout/decoded_tokens"] == sampled == counted[seen.batch.step]


def test_each_row_is_that_of_its_prompt_and_rewards_are_trls(run: tuple[Any, Path]) -> None:
    table = letters()
    for seen in run[0].seen:
        prompts = [table[row]["prompt"] for row in seen.answers.rows]
        assert prompts == [t.prompt.text for t in seen.batch.trajectories]
    assert {row for seen in run[0].seen for row in seen.answers.rows} == {*range(len(table))}
    assert all(0 <= reward <= 1 for reward in logged(run[0], "reward"))


def test_trl_logs_the_rollouts_and_the_report_draws_them(run: tuple[Any, Path]) -> None:
    trained, folder = run
    staleness = [max(lags(seen.batch)) for seen in trained.seen]
    assert logged(trained, "sample/staleness_max") == staleness
    record = read_run(folder / "out" / "_rollover")
    assert record.meta["takes_turns"] is True, "one CPU has the model of both"
    assert (record.meta["knows_rewards"], record.meta["model"]) == (False, trained.model.config._name_or_path)
    assert record.meta["max_running"] == trained.rollover_config.engine.max_running
    steps = [row for row in record.metrics if row.kind == "step"]
    assert [row.step for row in steps] == [*range(STEPS)]
    assert [row.values["reward/mean"] for row in steps] == logged(trained, "reward")
    assert steps[-1].values["perf/trained_tokens_per_s"] > 0
    assert "off-policy" in render_report(record)


# -- the gradient -------------------------------------------------------------------------------------------------


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says of every token that it was sampled with another log-prob than it was."""
    laid_out = Answers.of

    def shift(nats: float) -> None:
        def of(batch: Batch, **options: Any) -> Answers:
            answers = laid_out(batch, **options)
            for row in answers.logprobs:
                row[:] = [logprob + nats for logprob in row]
            return answers

        monkeypatch.setattr(Answers, "of", of)

    return shift


def test_the_gradient_follows_the_behaviour_log_probs(tiny_model: Path, tmp_path: Path, shifted: Any) -> None:
    """Every ratio is exp(-shift) while the truncation at 3 is far away, and the gradient is linear in it."""
    norms = {}
    for shift in (0.0, 0.5, 2.0):
        shifted(shift)
        trained = trainer(
            tiny_model,
            tmp_path / str(shift),
            asked={**SYNC, "engine": {"logprob_tolerance": 10.0}},
            max_steps=1,
            max_grad_norm=0.0,
        )
        trained.train()
        (norms[shift],) = logged(trained, "grad_norm")
    assert norms[0.0] > 0.01
    assert norms[0.5] / norms[0.0] == pytest.approx(math.exp(-0.5), rel=1e-3)
    assert norms[2.0] / norms[0.0] == pytest.approx(math.exp(-2.0), rel=1e-3)


def test_a_trl_that_computes_the_loss_without_them_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computes = trl.GRPOTrainer._compute_loss

    def without(self: Any, model: Any, inputs: Any) -> Any:
        self.use_vllm = False
        try:
            return computes(self, model, dict.copy(inputs))
        finally:
            self.use_vllm = True

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", without)
    with pytest.raises(RunError, match="computes the loss without the log-probs that tokens were sampled with"):
        trainer(tiny_model, tmp_path).train()


def test_an_engine_that_samples_from_something_else_is_found(tiny_model: Path, tmp_path: Path, shifted: Any) -> None:
    shifted(0.5)
    with pytest.raises(EngineMismatch, match=r"are 0\.5 nats from the trainer's on average"):
        trainer(tiny_model, tmp_path).train()


def test_the_drift_is_that_of_tokens_on_a_cache_of_their_own_weights() -> None:
    """Three segments of two tokens: of the batch's weights, of older ones, and of its weights on an older cache."""
    segments = [Segment(v, (5, 6), (-1.0, -1.0), None, kv, 0.0, 0.0) for v, kv in ((3, 3), (2, 2), (3, 2))]
    prompt = Prompt(prompt_id="0@0", token_ids=(1,), text="", source="trl", columns={ROW: 0})
    sample = Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=tuple(segments))
    batch = Batch(step=3, groups=(Group(group_id=0, prompt=prompt, trajectories=(sample,)),))
    distance_BT = torch.tensor([[0.125, 0.25, 0.5, 0.5, 1.0, 1.0]])
    output = {
        "completion_mask": torch.ones(1, 6),
        "advantages": torch.ones(1),
        "sampling_per_token_logps": torch.zeros(1, 6),
        "old_per_token_logps": -distance_BT,
    }
    found = measure(output, Answers.of(batch, num_generations=1, end_token=0), advantages_alone=True)
    assert {"": found.drift} == measured_drift([sample], distance_BT[0].double().numpy(), step=3)
    assert found.drift == (2, 0.1875)
    output["importance_sampling_ratio"] = torch.zeros(1, 1)  # TRL adds other terms of the loss after it
    answers = Answers.of(batch, num_generations=1, end_token=0)
    untrained = [measure(output, answers, advantages_alone=alone).untrained for alone in (True, False)]
    assert untrained == [{WasteCause.REJECTED_SAMPLE: 6}, {}]


class Losses:
    """Keeps every loss, and the gradient before every optimizer step."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(float(loss))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        self.__dict__.setdefault("gradients", []).append(gradient)
        return loss


class OurLosses(Losses, WatchedTrainer):
    pass


class StockLosses(Losses, trl.GRPOTrainer):
    pass


def test_sync_is_trls_own_trainer_on_the_same_samples(tiny_model: Path, tmp_path: Path) -> None:
    """Three steps of both, so that each step has the weights that the step before has made."""
    ours = trainer(tiny_model, tmp_path / "ours", asked=SYNC, made_by=OurLosses, max_steps=3)
    ours.train()
    table, given = letters(), iter(ours.seen)

    def same(prompts: list[str], asking: Any) -> dict[str, Any]:
        answers = next(given).answers
        assert prompts == [table[row]["prompt"] for row in answers.rows]
        return {
            "prompt_ids": answers.prompt_ids,
            "completion_ids": answers.completion_ids,
            "logprobs": answers.logprobs,
        }

    order = [row for seen in ours.seen for row in seen.answers.rows[::GENERATIONS]]
    stock = StockLosses(
        model=str(tiny_model),
        reward_funcs=share,
        args=arguments(tmp_path / "stock", max_steps=3, shuffle_dataset=False),
        train_dataset=datasets.Dataset.from_list([table[row] for row in order]),
        rollout_func=same,
    )
    stock.train()
    assert len(ours.losses) == len(stock.losses) == 3
    assert ours.losses == pytest.approx(stock.losses, abs=1e-6)
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert float(a.abs().max()) > 0.01
        assert float((a - b).abs().max()) < 1e-6
    for name in ("reward", "entropy", "completions/mean_length"):
        assert logged(ours, name) == pytest.approx(logged(stock, name), rel=1e-6, abs=1e-6), name


# -- samples that fail --------------------------------------------------------------------------------------------


def test_a_failed_sibling_counts_nowhere(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = rollouts.open_engine

    async def flawed(*args: Any, **kwargs: Any) -> Any:
        opened = await opens(*args, **kwargs)
        generate = opened.engine.generate

        async def all_but_one(request: GenerateRequest) -> AsyncIterator[Chunk]:
            if request.sample_key == "g1.2.":
                raise EngineError("this one does not come")
            async for chunk in generate(request):
                yield chunk

        monkeypatch.setattr(opened.engine, "generate", all_but_one)
        return opened

    asked: list[int] = []

    def reward(completions: Sequence[str], answer: Sequence[str], log_extra: Any, **columns: Any) -> list[float]:
        asked.append(len(completions))
        log_extra("letter", [*answer])
        return share(completions, answer)

    monkeypatch.setattr(rollouts, "open_engine", flawed)
    once = {"rollout": {"strategy": "sync", "max_retries": 0}}
    watched = trainer(tiny_model, tmp_path, asked=once, reward=reward, max_steps=1, log_completions=True)
    watched.train()
    (seen,) = watched.seen
    failed = [i for i, is_failed in enumerate(seen.answers.failed) if is_failed]
    assert failed == [1 * GENERATIONS + 2]
    assert asked == [PROMPTS * GENERATIONS - 1]
    letter_of = [letters()[row]["answer"] for row in seen.answers.rows]
    assert [*watched._logs["extra"]["letter"]] == [None if i in failed else each for i, each in enumerate(letter_of)]
    advantages = seen.output["advantages"].tolist()
    assert advantages[failed[0]] == 0.0
    assert seen.output["tool_mask"][failed[0], 0] == 0
    siblings = [GENERATIONS + i for i in (0, 1, 3)]
    texts = [
        watched.processing_class.decode(seen.answers.completion_ids[i], skip_special_tokens=True) for i in siblings
    ]
    rewards = torch.tensor(share(texts, [letters()[seen.answers.rows[i]]["answer"] for i in siblings]))
    by_hand = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [advantages[i] for i in siblings] == pytest.approx(by_hand.tolist(), abs=1e-5)
    assert seen.account["rollout/failed_samples"] == 1
    assert math.isfinite(logged(watched, "loss")[0])


# -- what TRL keeps to itself -------------------------------------------------------------------------------------


def test_evaluation_stays_trls_and_is_no_part_of_a_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + spent_s[0])
    monkeypatch.setattr("rollover.integrations.steps.time", clock)

    class Slow(WatchedTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            spent_s[0] += 1000
            return super().prediction_step(*args, **kwargs)

    held_out = {name: letters().select(range(4)) for name in ("one", "two")}
    often = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": PROMPTS * GENERATIONS}
    evaluated = trainer(tiny_model, tmp_path, made_by=Slow, eval_dataset=held_out, max_steps=2, **often)
    evaluated.train()
    assert len(logged(evaluated, "eval_reward")) == 4
    assert len(evaluated.seen) == 2
    assert evaluated.use_vllm is False
    steps = [row.values for row in read_run(tmp_path / "out" / "_rollover").metrics if row.kind == "step"]
    assert spent_s[0] >= 4000
    assert [0 < row["time/step_s"] < 1000 for row in steps] == [True, True]


def test_several_optimizer_steps_to_a_batch_make_one_version(tiny_model: Path, tmp_path: Path) -> None:
    trained = trainer(
        tiny_model,
        tmp_path,
        max_steps=6,
        per_device_train_batch_size=8,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
    )
    trained.train()
    assert [seen.batch.step for seen in trained.seen] == [0, 1, 2]
    assert [len(batch.groups) for batch in journaled(tmp_path)] == [8, 8, 8]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tokens_without_a_gradient_are_waste(tmp_path: Path, family: str) -> None:
    """The loss that balances a mixture's experts gives every token one."""

    def same(completions: Sequence[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
    model = save_model(tmp_path / family, family, **(mixture if family == "qwen3_moe" else {}))
    trained = trainer(model, tmp_path, asked=SYNC, reward=same, max_steps=2)
    trained.train()
    account: Mapping[str, float] = trained.seen[1].account
    first = sum(map(len, trained.seen[0].answers.completion_ids))
    assert account.get("rollout/wasted_tokens/zero_advantage", 0) == (first if family == "qwen3" else 0)


def test_a_response_ends_with_any_token_that_ends_one_for_trl(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    also = tokenizer.convert_tokens_to_ids("#")
    model.generation_config.eos_token_id = [also]
    trained = trainer(model, tmp_path, asked=SYNC, max_steps=1)
    trained.train()
    ends = {ids[-1] for ids in trained.seen[0].answers.completion_ids if len(ids) < 60}
    assert ends == {also, tokenizer.eos_token_id}
    inside = {token for ids in trained.seen[0].answers.completion_ids for token in ids[:-1]}
    assert not inside & ends


# -- the user's servers -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    ("kind", "made", "strategy"), [("vllm", ModelServer, APRIL), ("sglang", SGLangModelServer, SYNC)]
)
def test_a_server_samples_what_the_trainer_trains(
    tiny_model: Path, tmp_path: Path, kind: str, made: Any, strategy: dict[str, Any]
) -> None:
    with serving(made(tiny_model, context=80)) as url:
        trained = trainer(
            tiny_model,
            tmp_path,
            asked={**strategy, "engine": {"kind": kind, "urls": [url], "max_running": 24}},
            max_steps=3,
            max_completion_length=24,
        )
        trained.train()
    assert [seen.batch.step for seen in trained.seen] == [0, 1, 2]
    fresh, old = distances(trained.seen)
    assert len(fresh) > 100
    assert max(map(abs, fresh)) < 1e-4
    versions = {v for seen in trained.seen for t in seen.batch.trajectories for v in t.policy_versions}
    if strategy is SYNC:
        assert versions == {0, 1, 2} and not old
    else:  # a fast server may finish all that was asked of one version before the next one is there
        assert {0} < versions <= {0, 1, 2}
