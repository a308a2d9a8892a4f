"""verl's order of calls, before the manager and the buffer that stand for its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.errors import ConfigError, DataError, EngineError
from rollover.integrations.verl import AgentLoopManager, ReplayBuffer
from rollover.integrations.verl.settings import verl_settings
from rollover.report.metrics import read_metrics
from rollover.rollout.journal import effective, read_events
from rollover.rollout.state import RolloutState
from tests.integrations.slime.kit import shows_its_run
from tests.integrations.verl import recorded
from tests.integrations.verl.recorded import TensorBatch, Trainer, config_of

BATCH, GROUP, LENGTH = 3, 4, 40


def config(folder: Path, **changes: Any) -> Any:
    """verl's; changes are given by dotted key."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"eos_token_id": recorded.EOS}))
    made = config_of(
        {
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "rollout": {
                    "n": GROUP,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "response_length": LENGTH,
                    "prompt_length": 32,
                    "max_num_seqs": 32,
                    "calculate_log_probs": True,
                },
            },
            "algorithm": {},
            "data": {"train_batch_size": BATCH, "seed": 5},
            "trainer": {
                "default_local_dir": str(folder / "out"),
                "v1": {"trainer_mode": "sync", "sampler": {"sampler_kwargs": {"rollover": {"abort_timeout_s": 10.0}}}},
            },
        }
    )
    for key, value in changes.items():
        *tables, last = key.split(".")
        here = made
        for table in tables:
            here = here[table]
        here[last] = config_of(value)
    return made


@contextmanager
def training(folder: Path, *, behind: int = 0, rewards: bool = True, **changes: Any) -> Iterator[Trainer]:
    with recorded.installed() as queue:
        trainer = Trainer(config(folder, **changes), queue, ReplayBuffer)
        manager = AgentLoopManager.create(
            config=trainer.config,
            llm_client=recorded.LLMServerClient(trainer.replicas),
            teacher_client=None,
            reward_loop_worker_handles=[recorded.RewardWorker(), recorded.RewardWorker()] if rewards else None,
        )
        trainer.fit(manager, behind=behind)
        try:
            yield trainer
        finally:
            trainer.replay_buffer.close()


def journaled(folder: Path, behind: int = 0) -> RolloutState:
    journal = folder / f"out/rollover/from_step_{behind}/journal.sqlite"
    return RolloutState(event for _, event in effective(read_events(journal)))


def test_the_trainer_is_given_what_the_replicas_sampled(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        steps = [trainer.step() for _ in range(5)]
        drawn = set().union(*(replica.sampled for replica in trainer.replicas))
        sampled = {(step, token, round(logprob, 6)) for step, token, logprob in drawn}
    seen: Counter[str] = Counter()
    for number, (batch, fields, metrics) in enumerate(steps):
        assert len(batch.keys) == len(fields) == BATCH * GROUP
        seen.update(batch.keys)
        for key, row, tag in zip(batch.keys, fields, batch.tags, strict=True):
            uid, place, turn = key.rsplit("_", 2)
            assert (uid, int(place), turn) == (row["uid"], row["session_id"], "0")
            length = len(row["responses"])
            assert 0 < length <= LENGTH and row["response_mask"].tolist() == [1] * length
            assert torch.equal(row["input_ids"], torch.cat([row["prompts"], row["responses"]]))
            assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
            assert (tag["prompt_len"], tag["response_len"]) == (len(row["prompts"]), length)
            assert number - 4 <= tag["min_global_steps"] <= tag["max_global_steps"] <= number
            steps_of_it = range(tag["min_global_steps"], tag["max_global_steps"] + 1)
            for token, logprob in zip(row["responses"].tolist(), row["rollout_log_probs"].tolist(), strict=True):
                assert any((step, token, round(logprob, 6)) in sampled for step in steps_of_it)
            assert row["rm_scores"][-1] == pytest.approx(sum(t % 2 for t in row["responses"].tolist()) / length)
            assert row["extra_fields"]["reward_extra_info"] == {"right": str(row["index"])}
        assert metrics["rollover/staleness/max"] <= 4
    assert len(seen) == 5 * BATCH * GROUP and set(seen.values()) == {1}
    assert any(tag["min_global_steps"] < tag["max_global_steps"] for batch, _, _ in steps for tag in batch.tags)


def test_nothing_is_lost_and_the_replicas_are_aborted_as_such(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trained = sum(len(row["responses"]) for _ in range(4) for row in trainer.step()[1])
        assert all(replica.num_aborts >= 1 for replica in trainer.replicas)
        state = journaled(tmp_path)
    state.ledger.check()
    assert state.ledger.tokens.trained == trained and not state.ledger.tokens.wasted.total()
    assert state.ledger.tokens.live > 0


def test_more_prompts_are_asked_of_the_trainer_than_it_submits(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.step()
        assert trainer.num_submitted == 2 * BATCH
        pending = {key for key, tag in trainer.queue.tags["train"].items() if tag.get("is_prompt")}
        assert len(pending) == BATCH, "those of the batch are gone from the queue, the others wait"


def test_sync_is_a_strategy_too(tmp_path: Path) -> None:
    with training(tmp_path, **{"trainer.v1.sampler": {"sampler_kwargs": {"rollover": "sync"}}}) as trainer:
        for number in range(3):
            batch, _, _ = trainer.step()
            assert {tag["min_global_steps"] for tag in batch.tags} == {number}
        assert trainer.num_submitted == 3 * BATCH and not any(r.num_aborts for r in trainer.replicas)


def test_rewards_are_the_trainers_where_it_has_no_workers(tmp_path: Path) -> None:
    with training(tmp_path, rewards=False) as trainer:
        _, fields, metrics = trainer.step()
    assert not any("rm_scores" in row for row in fields)
    assert not any(name.startswith("rollover/reward/") for name in metrics)


def test_a_run_behind_a_checkpoint_counts_from_there(tmp_path: Path) -> None:
    with training(tmp_path, behind=20) as trainer:
        tags = [tag for _ in range(3) for tag in trainer.step()[0].tags]
    assert {tag["global_steps"] for tag in tags} <= {21, 22, 23}
    assert min(tag["min_global_steps"] for tag in tags) == 20
    assert max(tag["max_global_steps"] for tag in tags) == 22
    journaled(tmp_path, behind=20).ledger.check()


def test_answers_of_other_weights_than_those_due_are_refused(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.step()
        for replica in trainer.replicas:
            replica.global_steps = 0
        with pytest.raises((EngineError, DataError), match="weights of step 0 sampled its tokens, and those of step 1"):
            trainer.step()


def test_a_failed_response_leaves_its_siblings(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        bad = trainer.tokenizer.apply_chat_template(
            [{"content": "prompt 0"}], add_generation_prompt=True, tokenize=True
        )
        trainer.replicas[0].fails = lambda ids: list(ids[: len(bad)]) == bad and len(ids) == len(bad)
        batch, _, _ = trainer.step()
    assert BATCH * GROUP - GROUP < len(batch.keys) <= BATCH * GROUP


def test_evaluations_stay_verls(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        prompts = TensorBatch({"validate": recorded.NonTensorData(True), "uid": ["v"]}, 1)
        trainer.agent_loop_manager.generate_sequences(prompts)
        batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="val", batch_size=2)
        assert batch.keys == ["val0", "val1"]
        assert trainer.agent_loop_manager._evaluation.evaluated == [prompts]
        assert not trainer.agent_loop_manager.take()


def test_the_run_is_one_to_report_on_and_to_simulate(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        for _ in range(5):
            trainer.step()
        trainer.replay_buffer.sample(global_steps=5, partition_id="val", batch_size=2)
    rows = read_metrics(run := tmp_path / "out/rollover/from_step_0")
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        values = row.values
        assert 0.0 < values["time/rollout_s"] <= values["time/step_s"]
        assert values["perf/trained_tokens_per_s"] > 0.0
    shows_its_run(run)


def test_the_client_that_hides_aborts_is_refused(tmp_path: Path) -> None:
    with recorded.installed(), pytest.raises(ConfigError, match="FullyAsyncLLMServerClient goes on by itself"):
        AgentLoopManager.create(config=config(tmp_path), llm_client=recorded.FullyAsyncLLMServerClient([]))


def test_the_buffer_without_the_manager_is_refused(tmp_path: Path) -> None:
    with recorded.installed() as queue:
        trainer = Trainer(config(tmp_path), queue, ReplayBuffer)
        trainer.fit(recorded.StockManager())
        with pytest.raises(ConfigError, match="agent_loop_manager_class=rollover"):
            trainer.step()


def test_each_start_has_a_directory_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        with training(tmp_path) as trainer:
            trainer.step()
    runs = sorted(path.name for path in (tmp_path / "out/rollover").iterdir())
    assert runs == ["from_step_0", "from_step_0.2", "from_step_0.3"]
    journaled(tmp_path).ledger.check()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.v1.trainer_mode", "colocate_async", "trainer_mode=colocate_async cannot be used"),
        ("actor_rollout_ref.rollout.calculate_log_probs", False, "need the log-probs"),
        ("actor_rollout_ref.rollout.top_p", 0.9, "those before top_p"),
        ("actor_rollout_ref.rollout.top_k", 20, "those before top_k"),
        ("algorithm.filter_groups", {"enable": True}, "groups are not filtered"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": {"engine": {}}}}, "engine has no effect"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": "inflight"}}, "replicas sleep then"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": {"rollout": {"group_size": 2}}}}, "rollout.n decides"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": {"max_running": 0}}}, "max_running must be at least 1"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": 3}}, "expected the name of a strategy"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        verl_settings(config(tmp_path, **{key: value}))
    assert message in str(refusal.value)


def test_another_version_of_verl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0\.10\.0 is installed, and this was written for 0\.9"):
        verl_settings(config(tmp_path))


def test_a_refill_that_is_no_method_of_a_trainer_is_refused() -> None:
    with recorded.installed(), pytest.raises(ConfigError, match="no method of its trainer"):
        ReplayBuffer(refill_fn=lambda n: n, trainer_mode="sync")
