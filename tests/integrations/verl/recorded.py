"""verl as an agent-loop manager and a replay buffer meet it: its records, its queue, its replicas, and its trainer's order.

Taken from the wheels of verl 0.9.0 and 0.9.1 (2026-08 and 2026-09) by reading, in our own words. The trainer here is the
synchronous one of its version 1 (``trainer_base.py``, ``trainer_sync.py``): submit a batch of prompts, sample, put the
replicas to sleep, train, update and wake them, and validate through them now and then. Its checkpoint engine
(``checkpoint_engine/base.py``, backend ``naive``) opens no replica that was aborted: ``resume_generation`` alone does,
and only the asynchronous trainers call it. The replicas are those of 0.9.1 (``vllm_async_server.py``,
``async_sglang_server.py``): calls that come while one is closed wait there, and another abort does not end them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.9.1"
VOCAB = 64
EOS = 0


# -- records ----------------------------------------------------------------------------------------------------------


class NonTensorData:
    """A value that all rows share."""

    def __init__(self, data: Any) -> None:
        self.data = data


class TensorBatch:
    """A tensor dictionary: columns of rows, and values that all rows share."""

    def __init__(self, columns: dict[str, Any], size: int) -> None:
        self.columns, self.size = columns, size

    def __len__(self) -> int:
        return self.size

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def items(self) -> Any:
        return self.columns.items()


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    batch: Any
    non_tensor_batch: dict[str, Any]


@dataclass
class KVBatchMeta:
    partition_id: str
    keys: list[str]
    tags: list[dict[str, Any]]
    extra_info: dict[str, Any] = field(default_factory=dict)


class Config(dict[str, Any]):
    """A configuration whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def config_of(values: Any) -> Any:
    if isinstance(values, dict):
        return Config({key: config_of(value) for key, value in values.items()})
    return values


# -- the queue --------------------------------------------------------------------------------------------------------


class TransferQueue:
    """Keys with tags and fields, by partition."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.fields: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}

    def kv_batch_put(self, *, keys: Sequence[str], partition_id: str, tags: Any = None, fields: Any = None) -> None:
        for place, key in enumerate(keys):
            if tags is not None:
                self.tags[partition_id].setdefault(key, {}).update(tags[place])
            if fields is not None:
                self.fields[partition_id].setdefault(key, {}).update(fields[place])

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: dict(self.tags[partition_id])}

    def kv_clear(self, *, partition_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self.fields[partition_id].pop(key, None)


# -- replicas ---------------------------------------------------------------------------------------------------------


def token_at(seed: int, position: int, weights: int) -> tuple[int, float]:
    drawn = zlib.crc32(f"{seed}/{position}/{weights}".encode())
    return drawn % VOCAB, -(1 + drawn % 512) / 128


REASONS = {"vllm": ("aborted", "completed", "completed"), "sglang": ("abort", "stop", "length")}
"""How the replicas of each kind say that a call was aborted, has come to a stop token, or has all its tokens."""


class Replica:
    """A replica that decodes a token of every call per tick. Aborted, it is closed until ``resume_generation``."""

    def __init__(self, *, kind: str = "vllm", tick_s: float = 0.001) -> None:
        self.kind = kind
        self.tick_s = tick_s
        self.global_steps: int | None = None
        self.closed = False
        self.asleep = False
        self.fails: Callable[[Sequence[int]], bool] = lambda prompt_ids: False
        self.num_aborts = 0
        self.calls: list[_Call] = []
        self.num_parked = 0
        """Calls that have come while it was closed and wait."""
        self.sampled: set[tuple[int, int, float]] = set()
        """(step of the weights, token, log-prob)."""

    async def generate(self, prompt_ids: list[int], params: dict[str, Any]) -> TokenOutput:
        assert not self.asleep, "a replica that sleeps was called"
        if self.fails(prompt_ids):
            raise RuntimeError("the replica does not take this prompt")
        self.num_parked += 1
        try:
            while self.closed:
                await asyncio.sleep(self.tick_s)
        finally:
            self.num_parked -= 1
        call = _Call(zlib.crc32(str(prompt_ids).encode()), params)
        self.calls.append(call)
        try:
            while call.reason is None:
                await asyncio.sleep(self.tick_s)
                if not self.closed:
                    self._decode(call)
        finally:
            self.calls.remove(call)
        return TokenOutput(call.ids, call.logprobs, call.reason, {"global_steps": self.global_steps})

    def _decode(self, call: _Call) -> None:
        assert self.global_steps is not None
        token, logprob = token_at(call.seed, len(call.ids), self.global_steps)
        self.sampled.add((self.global_steps, token, logprob))
        call.ids.append(token)
        call.logprobs.append(logprob)
        _, stop, length = REASONS[self.kind]
        if token in call.params["stop_token_ids"]:
            call.reason = stop
        elif len(call.ids) == call.params["max_tokens"]:
            call.reason = length

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        assert not reject_request, "its replicas stay in rotation"
        self.num_aborts += 1
        self.closed = True
        for call in self.calls:
            call.reason = call.reason or REASONS[self.kind][0]

    async def resume_generation(self) -> None:
        self.closed = False


class _Call:
    def __init__(self, seed: int, params: dict[str, Any]) -> None:
        self.seed, self.params = seed, params
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.reason: str | None = None


class LLMServerClient:
    """The plain client: each call goes to one replica, and what it returns is handed on."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self.turn = 0
        self.arrives: Callable[[str], bool] = lambda request_id: True
        """Whether a call that was made reaches its replica by now."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        while not self.arrives(request_id):
            await asyncio.sleep(0.001)
        self.turn += 1
        return await self.replicas[self.turn % len(self.replicas)].generate(prompt_ids, dict(sampling_params))


class FullyAsyncLLMServerClient(LLMServerClient):
    """The client for partial rollouts, which goes on by itself."""


class RewardWorker:
    """A reward worker, as Ray gives it."""

    def __init__(self) -> None:
        self.compute_score = SimpleNamespace(remote=self._score)
        self.seen: list[DataProto] = []

    def _score(self, data: DataProto) -> asyncio.Future[dict[str, Any]]:
        self.seen.append(data)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        responses = data.batch["responses"][0].tolist()
        right = str(data.non_tensor_batch["reward_model"][0]["ground_truth"])
        score = sum(token % 2 for token in responses) / len(responses)
        answer.set_result({"reward_score": score, "reward_extra_info": {"right": right}})
        return answer


# -- the trainer ------------------------------------------------------------------------------------------------------


class Tokenizer:
    eos_token_id = EOS

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> list[int]:
        assert add_generation_prompt and tokenize
        return [1 + ord(c) % 63 for message in messages for c in message["content"]]


class StockManager:
    """verl's own manager, of which evaluations remain. It decodes on threads of its own, as verl does in Ray actors."""

    def __init__(self, *, llm_client: Any = None, **given: Any) -> None:
        self.llm_client, self.given = llm_client, given
        self.evaluated: list[Any] = []

    @classmethod
    def create(cls, **given: Any) -> StockManager:
        return cls(**given)

    def generate_sequences(self, prompts: Any) -> None:
        if "validate" not in prompts:
            return
        self.evaluated.append(prompts)
        queue = import_module("transfer_queue")
        threading.Thread(target=lambda: asyncio.run(self._generate(prompts, queue)), daemon=True).start()

    async def _generate(self, prompts: Any, queue: Any) -> None:
        params = {"max_tokens": 4, "stop_token_ids": [EOS]}
        for uid, messages in zip(prompts["uid"], prompts["raw_prompt"], strict=True):
            ids = Tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
            output = await self.llm_client.generate(uid, prompt_ids=ids, sampling_params=params)
            fields, tags = {"responses": output.token_ids}, {"status": "success", **output.extra_fields}
            queue.kv_batch_put(keys=[f"{uid}_0_0"], partition_id="val", fields=[fields], tags=[tags])


class StockBuffer:
    """verl's own buffer, of which evaluations remain. It looks into the queue until all of them are there."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        assert partition_id == "val"
        queue, give_up_s = import_module("transfer_queue"), time.monotonic() + 10.0
        while len(done := queue.kv_list("val")["val"]) < batch_size:
            assert time.monotonic() < give_up_s, "the evaluation does not end"
            time.sleep(0.001)
        return KVBatchMeta("val", [*done], [*done.values()]), {}


class Trainer:
    """The synchronous trainer, as far as it has to do with rollouts."""

    def __init__(self, config: Any, queue: TransferQueue, buffer: Callable[..., Any], *, num_replicas: int = 2) -> None:
        self.config, self.queue = config, queue
        self.tokenizer = Tokenizer()
        kind = config.actor_rollout_ref.rollout.get("name", "vllm")
        self.replicas = [Replica(kind=kind) for _ in range(num_replicas)]
        self.llm_server_manager = SimpleNamespace(get_replicas=lambda: self.replicas)
        self.global_steps = 0
        self.num_submitted = 0
        self.replay_buffer = buffer(
            trainer_mode="sync",
            trainer_config=Config(),
            max_off_policy_threshold=1,
            max_off_policy_strategy="drop",
            sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
        )

    def fit(self, agent_loop_manager: Any, *, behind: int = 0) -> None:
        self.agent_loop_manager = agent_loop_manager
        self.global_steps = behind
        self.update_weights()
        self.global_steps += 1

    def update_weights(self) -> None:
        for replica in self.replicas:
            assert not replica.calls, "weights came under an open call"
            replica.global_steps, replica.asleep = self.global_steps, False

    def validate(self, num_prompts: int) -> KVBatchMeta:
        """Return keys and tags of an evaluation of so many prompts."""
        columns: dict[str, Any] = {
            "uid": [f"val-{i}" for i in range(num_prompts)],
            "raw_prompt": [[{"role": "user", "content": f"question {i}"}] for i in range(num_prompts)],
            "global_steps": NonTensorData(self.global_steps),
            "validate": NonTensorData(True),
        }
        self.agent_loop_manager.generate_sequences(TensorBatch(columns, num_prompts))
        batch, _ = self.replay_buffer.sample(global_steps=self.global_steps, partition_id="val", batch_size=num_prompts)
        self.queue.kv_clear(partition_id="val", keys=batch.keys)
        found: KVBatchMeta = batch
        return found

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        numbers = range(self.num_submitted, self.num_submitted + num_prompts)
        self.num_submitted += num_prompts
        columns: dict[str, Any] = {
            "uid": [f"uid-{i}" for i in numbers],
            "raw_prompt": [[{"role": "user", "content": f"prompt {i}"}] for i in numbers],
            "reward_model": [{"ground_truth": i} for i in numbers],
            "index": list(numbers),
            "global_steps": NonTensorData(self.global_steps),
        }
        tags = [{"is_prompt": True, "status": "pending", "global_steps": self.global_steps} for _ in numbers]
        self.queue.kv_batch_put(keys=columns["uid"], partition_id="train", tags=tags)
        self.agent_loop_manager.generate_sequences(TensorBatch(columns, num_prompts))
        return num_prompts

    def step(self) -> tuple[KVBatchMeta, list[dict[str, Any]], dict[str, float]]:
        """Return keys, fields and metrics of the batch that this step trains."""
        size = self.config.data.train_batch_size
        self._add_prompts_to_generate(size)
        batch, metrics = self.replay_buffer.sample(
            global_steps=self.global_steps, partition_id="train", batch_size=size
        )
        for replica in self.replicas:
            assert not replica.calls and not replica.num_parked, "a replica was put to sleep under an open call"
            replica.asleep = True
        fields = [self.queue.fields["train"][key] for key in batch.keys]
        self.queue.kv_clear(partition_id="train", keys=batch.keys)
        self.update_weights()
        self.global_steps += 1
        return batch, fields, metrics


@contextmanager
def installed() -> Iterator[TransferQueue]:
    """verl, as far as it is recorded here, for the imports within."""
    queue = TransferQueue()
    modules: dict[str, dict[str, Any]] = {
        "verl": {"__version__": VERSION},
        "verl.protocol": {"DataProto": DataProto},
        "verl.utils": {},
        "verl.utils.tensordict_utils": {"list_of_dict_to_tensordict": lambda rows: rows},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.ppo.v1": {"AgentLoopManagerTQ": StockManager},
        "verl.trainer.ppo.v1.replay_buffer": {"ReplayBuffer": StockBuffer},
        "tensordict": {"TensorDict": lambda tensors, batch_size: tensors},
        "transfer_queue": {
            "kv_batch_put": queue.kv_batch_put,
            "kv_list": queue.kv_list,
            "kv_clear": queue.kv_clear,
            "KVBatchMeta": KVBatchMeta,
        },
    }
    before = {name: sys.modules.get(name) for name in modules}
    try:
        for name, contents in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        yield queue
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
