"""slime as a rollout function meets it: its records, what it calls in which order, and what it asks of the answer.

Taken from slime 0.3.1 (commit 624b824, 2026-08-21) by reading, in our own words: the fields of a sample and how a response is
appended to it, the data source and its checkpoints, hooks and reward models, the background event loop, and the rollout
manager with its checks. Nothing trains here: ``Manager.step`` says what the trainer would be given.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import random
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# -- slime.utils.types ------------------------------------------------------------------------------------------------


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class AnySample:
    """What samples of slime and of miles have."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward


@dataclass
class Sample(AnySample):
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    spec_info: SpecInfo = field(default_factory=SpecInfo)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int] | None = None,
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        """Model tokens come with log-probs and with what SGLang says; masks and lengths follow."""
        tokens = tokens or []
        if tokens and trainable and (log_probs is None or len(log_probs) != len(tokens)):
            raise ValueError("tokens that train need a log-prob each")
        self.response += text or ""
        if tokens:
            before = self.response_length
            self.tokens += tokens
            self.response_length += len(tokens)
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.loss_mask += [int(trainable)] * len(tokens)
            if self.rollout_log_probs is None:
                if before:
                    raise ValueError("earlier tokens have no log-probs")
                self.rollout_log_probs = []
            self.rollout_log_probs += log_probs or []
        if meta_info is not None and "finish_reason" in meta_info:
            if "weight_version" in meta_info:
                self.weight_versions.append(meta_info["weight_version"])
            ends = {"length": "TRUNCATED", "abort": "ABORTED", "stop": "COMPLETED"}
            self.status = Sample.Status[ends[meta_info["finish_reason"]["type"]]]
        for filled in (self.loss_mask, self.rollout_log_probs):
            if filled is not None and len(filled) != self.response_length:
                raise ValueError("a mask or log-prob is missing")


# -- slime.rollout ----------------------------------------------------------------------------------------------------


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]


class RolloutDataSource:
    """Prompts of a JSON-lines file, shuffled anew for each pass, and the place in them in each checkpoint."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.rows = [Sample(**json.loads(line)) for line in Path(args.prompt_data).read_text().splitlines()]
        self._shuffle()

    def _shuffle(self) -> None:
        order = list(range(len(self.rows)))
        random.Random(self.args.rollout_seed + self.epoch_id).shuffle(order)
        self.shuffled = [self.rows[i] for i in order]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        drawn: list[Sample] = []
        while len(drawn) < num_samples:
            if self.sample_offset == len(self.rows):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._shuffle()
            drawn.append(self.shuffled[self.sample_offset])
            self.sample_offset += 1
        groups = []
        for row in drawn:
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(row)
                sample.group_index, sample.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            groups.append(group)
        return groups

    def _file(self, folder: str, rollout_id: int) -> Path:
        return Path(folder) / f"rollout/global_dataset_state_dict_{rollout_id}.pt"

    def save(self, rollout_id: int) -> None:
        names = ("epoch_id", "sample_group_index", "sample_index", "sample_offset")
        file = self._file(self.args.save, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({name: getattr(self, name) for name in names}))

    def load(self, rollout_id: int | None = None) -> None:
        if self.args.load is None or rollout_id is None or not self._file(self.args.load, rollout_id).exists():
            return
        for name, value in json.loads(self._file(self.args.load, rollout_id).read_text()).items():
            setattr(self, name, value)
        self._shuffle()


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own, of which evaluations remain."""
    assert evaluation, "training rollouts are made elsewhere"
    sample = Sample(index=0, prompt="e", tokens=[1, 2], response_length=1, reward=0.5, status=Sample.Status.COMPLETED)
    return RolloutFnEvalOutput(data={"held out": {"rewards": [0.5], "truncated": [False], "samples": [sample]}})


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def apply_rollout_sample_hooks(args: Namespace, value: Any, **known: Any) -> Any:
    for path in getattr(args, "rollout_sample_hook_path", None) or []:
        value = load_function(path)(args, value) or value
    return value


async def async_rm(args: Namespace, sample: Sample, **known: Any) -> Any:
    if args.custom_rm_path is not None:
        return await load_function(args.custom_rm_path)(args, sample, **known)
    raise NotImplementedError("Rule-based RM type is not specified.")


# -- slime.utils ------------------------------------------------------------------------------------------------------


class AsyncLoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Letters:
    """A tokenizer: one id for each of 64 characters; id 0 ends a response."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(c) % 63 for c in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(63 + t) for t in token_ids if t or not skip_special_tokens)


@contextmanager
def installed() -> Iterator[AsyncLoopThread]:
    """slime, as far as it is recorded here, for the imports within."""
    thread = AsyncLoopThread()
    modules = {
        "slime": {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.misc": {"load_function": load_function},
        "slime.utils.async_utils": {"get_async_loop": lambda: thread, "run": thread.run},
        "slime.utils.processing_utils": {"load_tokenizer": lambda name, **known: Letters()},
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
        "slime.rollout.data_source": {"RolloutDataSource": RolloutDataSource},
        "slime.rollout.rm_hub": {"async_rm": async_rm},
        "slime.rollout.sample_hooks": {"apply_rollout_sample_hooks": apply_rollout_sample_hooks},
        "slime.rollout.sglang_rollout": {"generate_rollout": generate_rollout},
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, contents in modules.items():
                patch.setitem(sys.modules, name, module := ModuleType(name))
                vars(module).update(contents)
            yield thread
    finally:
        thread.close()


# -- slime.ray.rollout, train.py ----------------------------------------------------------------------------------------


@dataclass
class Trained:
    """What a training step is given."""

    rollout_id: int
    groups: list[list[Sample]]
    rewards: list[float]
    """Normalised by group."""
    loss_masks: list[list[int]]
    metrics: dict[str, Any]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


class Manager:
    """The rollout manager of one process of slime, from its start behind rollout ``start - 1``."""

    def __init__(self, args: Namespace, *, start: int = 0) -> None:
        self.args = args
        self.data_source = load_function(args.data_source_path)(args)
        self.generate_rollout: Callable[..., Any] = load_function(args.rollout_function_path)
        self.data_source.load(start - 1)

    def generate(self, rollout_id: int) -> Trained:
        output = self.generate_rollout(self.args, rollout_id, self.data_source, evaluation=False)
        assert isinstance(output, RolloutFnTrainOutput)
        samples = [sample for group in output.samples for sample in group]
        raw = [sample.get_reward_value(self.args) for sample in samples]
        rewards, size = [], self.args.n_samples_per_prompt
        assert len(raw) == size * self.args.rollout_batch_size
        for first in range(0, len(raw), size):
            mean = sum(raw[first : first + size]) / size
            rewards += [reward - mean for reward in raw[first : first + size]]
        masks = []
        for sample in samples:
            assert sample.loss_mask is not None and len(sample.loss_mask) == sample.response_length
            assert len(sample.tokens) > sample.response_length > 0
            masks.append([0] * sample.response_length if sample.remove_sample else sample.loss_mask)
        if samples[0].rollout_log_probs is not None:
            assert all(sample.rollout_log_probs is not None for sample in samples)
        return Trained(rollout_id, output.samples, rewards, masks, output.metrics or {})

    def eval(self, rollout_id: int) -> RolloutFnEvalOutput:
        output: RolloutFnEvalOutput = self.generate_rollout(self.args, rollout_id, self.data_source, evaluation=True)
        return output

    def save(self, rollout_id: int) -> None:
        self.data_source.save(rollout_id)
