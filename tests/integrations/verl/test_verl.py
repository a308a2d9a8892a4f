"""verl's order of calls, before the manager and the buffer that stand for its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import ConfigError, DataError, EngineError, EngineTimeout
from rollover.integrations.verl import AgentLoopManager, ReplayBuffer
from rollover.integrations.verl.replicas import VerlReplicas
from rollover.integrations.verl.rows import VerlRows
from rollover.integrations.verl.settings import verl_settings, verl_version
from rollover.report.metrics import read_metrics
from rollover.rollout.journal import effective, read_events
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SamplingParams
from tests.integrations.slime.kit import shows_its_run
from tests.integrations.verl import recorded
from tests.integrations.verl.recorded import TensorBatch, Trainer, config_of

BATCH, GROUP, LENGTH = 3, 4, 40
TIMEOUTS = {"abort_timeout_s": 10.0, "response_timeout_s": 10.0}


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
                    "name": "vllm",
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
                "v1": {"trainer_mode": "sync", "sampler": {"sampler_kwargs": {"rollover": TIMEOUTS}}},
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


def request(name: str) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=100_000)
    return GenerateRequest(
        request_id=name, sample_key=name, prompt_key="p", prompt_ids=(1, 2, 3), params=params, seed=0
    )


async def ended(chunks: AsyncIterator[Chunk]) -> Chunk:
    """The only chunk of a call."""
    (chunk,) = [chunk async for chunk in chunks]
    return chunk


@pytest.mark.parametrize("kind", recorded.REASONS)
def test_the_trainer_is_given_what_the_replicas_sampled(tmp_path: Path, kind: str) -> None:
    with training(tmp_path, **{"actor_rollout_ref.rollout.name": kind}) as trainer:
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
            assert all(row["extra_fields"][name] == tag[name] for name in ("min_global_steps", "max_global_steps"))
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
        assert all(replica.num_aborts >= 1 and not replica.closed for replica in trainer.replicas)
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
        steps = [trainer.step() for _ in range(3)]
    tags = [tag for batch, _, _ in steps for tag in batch.tags]
    extra = [row["extra_fields"] for _, fields, _ in steps for row in fields]
    assert [e["min_global_steps"] for e in extra] == [tag["min_global_steps"] for tag in tags]
    assert [e["max_global_steps"] for e in extra] == [tag["max_global_steps"] for tag in tags]
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


@pytest.mark.parametrize("name", ["~/model", "some/model"])
def test_end_tokens_are_those_of_the_model_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path / "model"))
    with training(tmp_path, **{"actor_rollout_ref.model.path": name}) as trainer:
        (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [recorded.EOS, *range(8)]}))
        _, fields, _ = trainer.step()
    responses = [row["responses"].tolist() for row in fields]
    assert all(token >= 8 for response in responses for token in response[:-1])
    assert any(1 <= response[-1] < 8 for response in responses)


def test_a_failed_response_leaves_its_siblings(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        bad = trainer.tokenizer.apply_chat_template(
            [{"content": "prompt 0"}], add_generation_prompt=True, tokenize=True
        )
        trainer.replicas[0].fails = lambda ids: list(ids[: len(bad)]) == bad and len(ids) == len(bad)
        batch, _, _ = trainer.step()
    assert BATCH * GROUP - GROUP < len(batch.keys) <= BATCH * GROUP


def test_a_call_that_reaches_a_closed_replica_is_let_in_and_stopped() -> None:
    async def late() -> tuple[Any, recorded.Replica]:
        replica = recorded.Replica()
        replica.global_steps = 7
        client = recorded.LLMServerClient([replica])
        client.arrives = lambda request_id: request_id == "on time" or replica.num_aborts >= 1
        engine = VerlReplicas(
            client, [replica], max_running=8, max_context_tokens=4096, response_timeout_s=10.0, abort_timeout_s=10.0
        )
        await engine.begin(version=0, global_steps=7)
        calls = [asyncio.create_task(ended(engine.generate(request(name)))) for name in ("on time", "late")]
        while not replica.calls:
            await asyncio.sleep(0)
        await engine.abort(["on time", "late"])
        assert all(call.done() for call in calls), "abort returns once the calls are over"
        return [call.result() for call in calls], replica

    chunks, replica = asyncio.run(late())
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ABORT] * 2
    assert replica.num_aborts >= 2 and not replica.closed and not replica.calls


def test_a_replica_that_cannot_be_stopped_is_named() -> None:
    class Dead(recorded.Replica):
        async def abort_all_requests(self, reject_request: bool = False) -> None:
            raise RuntimeError("the actor died")

    class Deaf(recorded.Replica):
        async def abort_all_requests(self, reject_request: bool = False) -> None:
            await asyncio.Event().wait()

    async def stop(replica: recorded.Replica) -> None:
        replica.global_steps = 0
        engine = VerlReplicas(
            recorded.LLMServerClient([replica]),
            [replica],
            max_running=8,
            max_context_tokens=4096,
            response_timeout_s=10.0,
            abort_timeout_s=0.05,
        )
        await engine.begin(version=0, global_steps=0)
        call = asyncio.create_task(ended(engine.generate(request("a"))))
        while not replica.calls:
            await asyncio.sleep(0)
        try:
            await engine.abort(["a"])
        finally:
            call.cancel()

    with pytest.raises(EngineError, match="could not be stopped: RuntimeError: the actor died"):
        asyncio.run(stop(Dead()))
    with pytest.raises(EngineTimeout, match=r"did not hand over 1 calls within 0\.05 s \(abort_timeout_s\)"):
        asyncio.run(stop(Deaf()))


def test_evaluations_stay_verls_and_find_its_replicas_open(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        assert trainer.validate(2).keys == ["val-0_0_0", "val-1_0_0"]
        trainer.step()
        assert all(replica.num_aborts >= 1 for replica in trainer.replicas)
        batch = trainer.validate(3)
        assert batch.keys == ["val-0_0_0", "val-1_0_0", "val-2_0_0"]
        assert {tag["global_steps"] for tag in batch.tags} == {1}
        assert [len(prompts) for prompts in trainer.agent_loop_manager._evaluation.evaluated] == [2, 3]
        assert not trainer.agent_loop_manager.take()
        trainer.step()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("__rollout_n__", [2, GROUP, GROUP], "__rollout_n__ is 2, and .* every prompt has 4"),
        ("__do_sample__", [False, True, True], "__do_sample__ is False"),
        ("agent_name", recorded.NonTensorData("tool_agent"), "agent_name is tool_agent, and .* single_turn_agent"),
    ],
)
def test_a_prompt_that_asks_for_something_else_is_refused(column: str, value: Any, message: str) -> None:
    columns = {"uid": ["a", "b", "c"], "raw_prompt": [[{"content": "x"}]] * 3}
    rows = VerlRows(lambda messages: [1], None, group_size=GROUP, chunk=3)
    rows.add(TensorBatch({**columns, "__rollout_n__": [GROUP] * 3, "__do_sample__": [True] * 3}, 3))
    with pytest.raises(DataError, match=message):
        rows.add(TensorBatch({**columns, column: value}, 3))


def test_a_prompt_is_cut_where_verl_cuts_it(tmp_path: Path) -> None:
    with training(tmp_path, **{"actor_rollout_ref.rollout.prompt_length": 4}) as trainer:
        _, fields, _ = trainer.step()
    whole = trainer.tokenizer.apply_chat_template(
        [{"content": f"prompt {fields[0]['index']}"}], add_generation_prompt=True, tokenize=True
    )
    assert fields[0]["prompts"].tolist() == whole[-4:]


def test_the_run_is_one_to_report_on_and_to_simulate(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        for _ in range(5):
            trainer.step()
        trainer.validate(2)
    rows = read_metrics(run := tmp_path / "out/rollover/from_step_0")
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    for row in rows:
        values = row.values
        assert 0.0 < values["time/rollout_s"] <= values["time/step_s"]
        assert values["perf/trained_tokens_per_s"] > 0.0
    shows_its_run(run)


def test_the_client_that_hides_aborts_is_refused(tmp_path: Path) -> None:
    with (
        recorded.installed(),
        pytest.raises(ConfigError, match="FullyAsyncLLMServerClient resumes stopped responses by itself"),
    ):
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
        ("actor_rollout_ref.rollout.name", "trtllm", "use vllm or sglang"),
        ("actor_rollout_ref.rollout.agent", {"default_agent_loop": "tool_agent"}, "without tools or turns"),
        ("actor_rollout_ref.rollout.ignore_eos", True, "responses end at the end token"),
        ("actor_rollout_ref.rollout.max_model_len", 71, "of full length need 72 tokens"),
        ("algorithm.filter_groups", {"enable": True}, "groups are not filtered"),
        ("trainer.v1.sampler", {"sync_refill_failed_groups": True}, "Rollover replaces failed groups itself"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": {"engine": {}}}}, "engine has no effect"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": "inflight"}}, "replicas sleep then"),
        (
            "trainer.v1.sampler",
            {"sampler_kwargs": {"rollover": {"rollout": {"group_size": 2}}}},
            "rollout.n sets it to 4",
        ),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": {"max_running": 0}}}, "max_running must be at least 1"),
        ("trainer.v1.sampler", {"sampler_kwargs": {"rollover": 3}}, "expected the name of a strategy"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with recorded.installed(), pytest.raises(ConfigError) as refusal:
        verl_settings(config(tmp_path, **{key: value}))
    assert message in str(refusal.value)


def test_sglang_needs_a_token_of_context_more(tmp_path: Path) -> None:
    changes = {"actor_rollout_ref.rollout.max_model_len": 72}
    with recorded.installed():
        verl_settings(config(tmp_path, **changes))
        with pytest.raises(ConfigError, match="of full length need 73 tokens"):
            verl_settings(config(tmp_path, **changes, **{"actor_rollout_ref.rollout.name": "sglang"}))


def test_another_version_of_verl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0\.10\.0 is installed, and this was written for 0\.9"):
        verl_settings(config(tmp_path))


def test_a_checkout_on_the_path_says_its_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded.installed():
        assert verl_version() == recorded.VERSION
        monkeypatch.setattr("verl.__version__", "0.10.0.dev")
        with pytest.raises(ConfigError, match=r"verl 0\.10\.0\.dev is installed"):
            verl_settings(config(tmp_path))
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match="neither installed nor on the path"):
        verl_version()


def test_a_refill_that_is_no_method_of_a_trainer_is_refused() -> None:
    with recorded.installed(), pytest.raises(ConfigError, match="not a method of its trainer"):
        ReplayBuffer(refill_fn=lambda n: n, trainer_mode="sync")
