"""The parts for verl that need no verl: settings, prompts, calls of its replicas, fields. ``make test-verl`` has the rest."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import ConfigError, DataError, EngineError, EngineTimeout
from rollover.integrations.verl import AgentLoopManager, ReplayBuffer
from rollover.integrations.verl.fields import fields, tag
from rollover.integrations.verl.replicas import VerlReplicas
from rollover.integrations.verl.rows import VerlRows
from rollover.integrations.verl.run import VerlParts, VerlRun
from rollover.integrations.verl.sampler import _unused
from rollover.integrations.verl.settings import verl_settings, verl_version
from rollover.report.record import read_config
from rollover.types import FinishReason, Prompt, SampleId, SamplingParams, Trajectory
from tests.segments import segment

GROUP = 4


class Config(dict[str, Any]):
    """A configuration whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def config_of(values: Any) -> Any:
    return Config({key: config_of(value) for key, value in values.items()}) if isinstance(values, dict) else values


def config(**changes: Any) -> Any:
    """verl's; changes are given by dotted key."""
    rollout = {"n": GROUP, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "calculate_log_probs": True}
    sizes = {"name": "vllm", "response_length": 40, "prompt_length": 32, "max_num_seqs": 32}
    v1 = {"trainer_mode": "sync", "sampler": {"sampler_kwargs": {}}}
    made: dict[str, Any] = {
        "actor_rollout_ref": {"model": {"path": "model"}, "rollout": {**rollout, **sizes}},
        "algorithm": {},
        "data": {"train_batch_size": 3, "seed": 5},
        "trainer": {"default_local_dir": "out", "v1": v1},
    }
    for key, value in changes.items():
        *tables, last = key.split(".")
        here = made
        for table in tables:
            here = here[table]
        here[last] = value
    return config_of(made)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verl that only has a version, and a buffer for evaluations."""
    modules = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1", "verl.trainer.ppo.v1.replay_buffer")
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verl"].__version__ = "0.9.1"  # type: ignore[attr-defined]
    sys.modules[modules[-1]].ReplayBuffer = SimpleNamespace  # type: ignore[attr-defined]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_work_are_refused_by_name() -> None:
    own = "trainer.v1.sampler"
    for key, value, words in (
        ("trainer.v1.trainer_mode", "colocate_async", "trainer_mode=colocate_async cannot be used"),
        ("actor_rollout_ref.rollout.calculate_log_probs", False, "need the log-probs"),
        ("actor_rollout_ref.rollout.top_p", 0.9, "top_p=0.9"),
        ("actor_rollout_ref.rollout.top_k", 20, "top_k=20"),
        ("actor_rollout_ref.rollout.name", "trtllm", "use vllm or sglang"),
        ("actor_rollout_ref.rollout.agent", {"default_agent_loop": "tool_agent"}, "default_agent_loop=tool_agent"),
        ("actor_rollout_ref.rollout.ignore_eos", True, "ignore_eos"),
        ("actor_rollout_ref.rollout.max_model_len", 71, "need 72 tokens"),
        ("algorithm.filter_groups", {"enable": True}, "filter_groups.enable"),
        (own, {"sync_refill_failed_groups": True}, "sync_refill_failed_groups"),
        (own, {"sampler_kwargs": {"rollover": {"engine": {}}}}, "engine has no effect"),
        (own, {"sampler_kwargs": {"rollover": "inflight"}}, "replicas sleep then"),
        (own, {"sampler_kwargs": {"rollover": {"rollout": {"group_size": 2}}}}, "rollout.n sets it to 4"),
        (own, {"sampler_kwargs": {"rollover": {"rollout": {"stop_strings": ["."]}}}}, "leave rollout.stop_strings out"),
        (own, {"sampler_kwargs": {"rollover": {"max_running": 0}}}, "max_running must be at least 1"),
        (own, {"sampler_kwargs": {"rollover": 3}}, "expected the name of a strategy"),
    ):
        with pytest.raises(ConfigError) as refusal:
            verl_settings(config(**{key: value}))
        assert words in str(refusal.value)
    assert verl_settings(config()).hosted.rollout.group_size == GROUP


def test_sglang_needs_a_token_of_context_more() -> None:
    changes = {"actor_rollout_ref.rollout.max_model_len": 72}
    verl_settings(config(**changes))
    with pytest.raises(ConfigError, match="of full length need 73 tokens"):
        verl_settings(config(**changes, **{"actor_rollout_ref.rollout.name": "sglang"}))


def test_another_version_of_verl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verl_version() == "0.9.1", "a checkout on the path tells its own version"
    monkeypatch.setattr("verl.__version__", "0.10.0.dev")
    with pytest.raises(ConfigError, match=r"verl 0\.10\.0\.dev is installed, and this was written for 0\.9"):
        verl_settings(config())
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ConfigError, match="neither installed nor on the path"):
        verl_version()
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0\.10\.0 is installed"):
        verl_settings(config())


def test_parts_of_verl_that_do_not_fit_are_refused() -> None:
    class FullyAsyncLLMServerClient: ...

    with pytest.raises(ConfigError, match="FullyAsyncLLMServerClient resumes stopped responses by itself"):
        AgentLoopManager(config(), FullyAsyncLLMServerClient(), evaluation=None)
    with pytest.raises(ConfigError, match="distillation"):
        AgentLoopManager(config(), None, teacher_client=object(), evaluation=None)
    with pytest.raises(ConfigError, match="not a method of its trainer"):
        ReplayBuffer(refill_fn=lambda n: n)

    class Trainer:
        agent_loop_manager = None

        def refill(self, num_prompts: int) -> None: ...

    with pytest.raises(ConfigError, match="agent_loop_manager_class=rollover"):
        ReplayBuffer(refill_fn=Trainer().refill).sample(1, "train", 3)


def test_each_start_has_a_directory_of_its_own(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        (folder := _unused(tmp_path / "from_step_0")).mkdir()
        (folder / "journal.sqlite").touch()
        names.append(folder.name)
    assert names == ["from_step_0", "from_step_0.2", "from_step_0.3"]


def test_a_directory_tells_that_replicas_decode_and_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    end, sizes = SimpleNamespace(eos_token_id=0), {"max_running": 2048, "max_context_tokens": 4096}
    parts = VerlParts(client=None, replicas=[], reward_workers=None, tokenizer=end, model=tmp_path.name, **sizes)  # type: ignore[arg-type]
    rows = VerlRows(lambda messages: [1], lambda number: None, group_size=GROUP, chunk=3)
    VerlRun(verl_settings(config()), parts, rows, first_step=0, folder=tmp_path / "run").close()
    found = read_config(tmp_path / "run")
    assert found["engine"] == {"kind": "verl"}, "and no embedded one"
    assert (found["meta"]["max_running"], found["meta"]["takes_turns"]) == (2048, True)
    assert found["meta"]["model"] == str(tmp_path), "reports are drawn in any working directory"


# -- prompts and fields -----------------------------------------------------------------------------------------------


class Batch(dict[str, Any]):
    """A tensor dictionary of verl."""

    def __len__(self) -> int:
        return len(self["uid"])


def test_a_prompt_is_cut_on_the_left_as_verl_does() -> None:
    class Trainer:
        agent_loop_manager = AgentLoopManager(
            config(**{"actor_rollout_ref.rollout.prompt_length": 4}), None, evaluation=None
        )
        tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **options: {"input_ids": [1, 2, 3, 4, 5, 6]})

        def refill(self, num_prompts: int) -> None: ...

    assert ReplayBuffer(refill_fn=Trainer().refill)._encoder()([{"content": "x"}]) == [3, 4, 5, 6]


def test_prompts_are_asked_for_when_they_are_needed() -> None:
    asked = []

    def refill(number: int) -> None:
        asked.append(number)
        if len(asked) == 1:
            rows.add(Batch(uid=["c", "d"], raw_prompt=[[{"content": "x"}]] * 2))

    rows = VerlRows(lambda messages: [1], refill, group_size=GROUP, chunk=2)
    rows.add(Batch(uid=["a", "b"], raw_prompt=[[{"content": "x"}]] * 2))
    assert [rows.prompt(i).columns["uid"] for i in (0, 1, 2, 3)] == ["a", "b", "c", "d"] and asked == [2]
    with pytest.raises(DataError, match="prompt 4, and verl's trainer has submitted 4"):
        rows.prompt(4)


def test_a_prompt_that_asks_for_something_else_is_refused() -> None:
    NonTensorData = type("NonTensorData", (), {"data": "tool_agent"})
    for column, value, words in (
        ("__rollout_n__", [2], "__rollout_n__ is 2, and .* every prompt has 4"),
        ("__do_sample__", [False], "__do_sample__ is False"),
        ("agent_name", NonTensorData(), "agent_name is tool_agent, and .* single_turn_agent"),
        ("multi_modal_data", [{"image": ["cat.png"]}], "prompt a has images"),
        ("raw_prompt", [[{"content": [{"type": "text"}, {"type": "image"}]}]], "prompt a has images"),
    ):
        rows = VerlRows(lambda messages: [1], print, group_size=GROUP, chunk=3)
        with pytest.raises(DataError, match=words):
            rows.add(Batch({"uid": ["a"], "raw_prompt": [[{"content": "x"}]], column: value}))


def test_steps_count_from_the_checkpoint_and_rewards_may_be_verls() -> None:
    pytest.importorskip("torch")
    prompt = Prompt(prompt_id="verl/0@0", token_ids=(5, 6), text="x", source="verl", columns={"uid": "a"})
    parts = (segment((7, 8), FinishReason.ABORT, version=1), segment((7, 8), version=2))
    one = Trajectory(sample_id=SampleId(0, 3), prompt=prompt, segments=parts, reward=0.0)
    row = {"uid": "a", "global_steps": 23}
    told = tag(one, row, first_step=20)
    assert (told["min_global_steps"], told["max_global_steps"], told["global_steps"]) == (21, 22, 23)
    assert (told["prompt_len"], told["response_len"], told["seq_len"]) == (2, 4, 6)
    assert "rm_scores" not in fields(one, row, first_step=20, reward=None)


# -- replicas ---------------------------------------------------------------------------------------------------------


class Replica:
    """A replica that answers a call once it is told to, or when it is aborted."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.num_aborts = 0

    async def abort_all_requests(self) -> None:
        self.num_aborts += 1
        self.opened.clear()
        if not self.answer.done():
            self.answer.set_result(output("aborted"))

    async def resume_generation(self) -> None:
        self.opened.set()


def output(reason: str, *, ids: tuple[int, ...] = (7,), steps: int = 0) -> Any:
    extra = {"global_steps": steps}
    return SimpleNamespace(token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason=reason, extra_fields=extra)


class Client:
    """The plain client of one replica."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        if request_id == "late":
            while not self.replica.num_aborts:
                await asyncio.sleep(0)
            await self.replica.opened.wait()
            self.replica.answer = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.replica.answer)


async def begun(replica: Any, *, abort_timeout_s: float = 10.0) -> VerlReplicas:
    limits = {"response_timeout_s": 10.0, "abort_timeout_s": abort_timeout_s}
    engine = VerlReplicas(Client(replica), [replica], max_running=8, max_context_tokens=4096, **limits)
    await engine.begin(version=0, global_steps=0)
    return engine


async def ended(chunks: AsyncIterator[Chunk]) -> Chunk:
    """The only chunk of a call."""
    (chunk,) = [chunk async for chunk in chunks]
    return chunk


def request(name: str = "a", **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_new_tokens": 100, "stop_token_ids": (0,), **params})
    return GenerateRequest(request_id=name, sample_key=name, prompt_key="p", prompt_ids=(1,), params=sampling, seed=0)


def answered(made: Any, **params: Any) -> Chunk:
    async def ask() -> Chunk:
        replica = Replica()
        replica.answer.set_exception(made) if isinstance(made, Exception) else replica.answer.set_result(made)
        return await ended((await begun(replica)).generate(request(**params)))

    return asyncio.run(ask())


def test_an_answer_ends_as_vllm_or_sglang_says() -> None:
    for made, reason in (
        (output("aborted"), FinishReason.ABORT),
        (output("abort"), FinishReason.ABORT),
        (output("completed", ids=(7, 0)), FinishReason.STOP),
        (output("stop", ids=(7, 0)), FinishReason.STOP),
        (output("completed", ids=(7, 8)), FinishReason.LENGTH),
        (output("length", ids=(7, 8)), FinishReason.LENGTH),
    ):
        chunk = answered(made, max_new_tokens=2)
        assert (chunk.finish_reason, chunk.token_ids, chunk.policy_version) == (reason, made.token_ids, 0)


def test_answers_that_cannot_be_kept_are_refused() -> None:
    for made, words in (
        (output("aborted", steps=3), "weights of step 3 sampled its tokens, and weights of step 0"),
        (output("completed"), "ended for the reason 'completed' at token 7"),
        (RuntimeError("out of memory"), "failed at a: RuntimeError: out of memory"),
    ):
        with pytest.raises(EngineError, match=words):
            answered(made)


@pytest.mark.real_time
async def test_a_call_that_reaches_a_closed_replica_is_let_in_and_stopped() -> None:
    replica = Replica()
    engine = await begun(replica)
    calls = [asyncio.create_task(ended(engine.generate(request(name)))) for name in ("on time", "late")]
    while len(engine._calls) < 2:
        await asyncio.sleep(0)
    await engine.abort(["on time", "late"])
    assert all(call.done() for call in calls), "abort returns once the calls are over"
    assert [call.result().finish_reason for call in calls] == [FinishReason.ABORT] * 2
    assert replica.num_aborts >= 2 and replica.opened.is_set()


@pytest.mark.real_time
async def test_a_replica_that_cannot_be_stopped_is_named() -> None:
    async def stop(abort: Any) -> None:
        replica = Replica()
        replica.abort_all_requests = abort  # type: ignore[method-assign]
        engine = await begun(replica, abort_timeout_s=0.05)
        call = asyncio.create_task(ended(engine.generate(request())))
        while not engine._calls:
            await asyncio.sleep(0)
        try:
            await engine.abort(["a"])
        finally:
            call.cancel()

    async def deaf() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineError, match="could not be stopped: RuntimeError: the actor died"):
        await stop(AsyncMock(side_effect=RuntimeError("the actor died")))
    with pytest.raises(EngineTimeout, match=r"did not hand over 1 calls within 0\.05 s \(abort_timeout_s\)"):
        await stop(deaf)
