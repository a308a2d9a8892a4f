"""verl as an agent-loop manager and a replay buffer meet it: its records, its queue, its replicas, and its trainer's order.

Taken from verl 0.9.0 (release branch, commit 8851219, 2026-08) by reading, in our own words. The trainer here is the
synchronous one of its version 1: submit a batch of prompts, sample, put the replicas to sleep, train, update and wake them.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.9.0"
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

    def kv_clear(self, *, partition_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self.fields[partition_id].pop(key, None)


# -- replicas ---------------------------------------------------------------------------------------------------------


def token_at(seed: int, position: int, weights: int) -> tuple[int, float]:
    drawn = zlib.crc32(f"{seed}/{position}/{weights}".encode())
    return drawn % VOCAB, -(1 + drawn % 512) / 128


class Replica:
    """A replica that decodes a token of every call per tick. Aborted, it stands still until it has new weights."""

    def __init__(self, *, tick_s: float = 0.001) -> None:
        self.tick_s = tick_s
        self.global_steps: int | None = None
        self.paused = False
        self.asleep = False
        self.fails: Callable[[Sequence[int]], bool] = lambda prompt_ids: False
        self.num_aborts = 0
        self.calls: list[_Call] = []
        self.sampled: set[tuple[int, int, float]] = set()
        """(step of the weights, token, log-prob)."""

    async def generate(self, prompt_ids: list[int], params: dict[str, Any]) -> TokenOutput:
        assert not self.asleep, "a replica that sleeps was called"
        if self.fails(prompt_ids):
            raise RuntimeError("the replica does not take this prompt")
        call = _Call(zlib.crc32(str(prompt_ids).encode()), params)
        self.calls.append(call)
        try:
            while call.reason is None:
                await asyncio.sleep(self.tick_s)
                if not self.paused:
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
        if token in call.params["stop_token_ids"] or len(call.ids) == call.params["max_tokens"]:
            call.reason = "completed"

    async def abort_all_requests(self) -> None:
        self.num_aborts += 1
        self.paused = True
        for call in self.calls:
            call.reason = call.reason or "aborted"


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

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
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
    """verl's own manager, of which evaluations remain."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.evaluated: list[Any] = []

    @classmethod
    def create(cls, **given: Any) -> StockManager:
        return cls(**given)

    def generate_sequences(self, prompts: Any) -> None:
        self.evaluated.append(prompts)


class StockBuffer:
    """verl's own buffer, of which evaluations remain."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        assert partition_id == "val"
        return KVBatchMeta("val", [f"val{i}" for i in range(batch_size)], []), {}


class Trainer:
    """The synchronous trainer, as far as it has to do with rollouts."""

    def __init__(self, config: Any, queue: TransferQueue, buffer: Callable[..., Any], *, num_replicas: int = 2) -> None:
        self.config, self.queue = config, queue
        self.tokenizer = Tokenizer()
        self.replicas = [Replica() for _ in range(num_replicas)]
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
            replica.global_steps, replica.paused, replica.asleep = self.global_steps, False, False

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
            assert not replica.calls, "a replica was put to sleep under an open call"
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
        "verl": {},
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
