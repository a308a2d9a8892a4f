"""Rollouts for TRL's asynchronous trainer, built from the same arguments as the trainer.

``rollout_worker`` returns the worker over an engine of Rollover's, the trainer's dataset and its reward functions. Its
run has a directory, ``OUTPUT_DIR/rollover``, like that of ``GRPOTrainer``.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from trl.trainer.utils import get_callable_name

from rollover.engine.base import Capabilities
from rollover.errors import ConfigError
from rollover.hf.hub import resolve_model
from rollover.hf.tokenizer import stop_token_ids
from rollover.integrations.hosted import Asked, HostedConfig, hosted_config
from rollover.integrations.record import HostedRun
from rollover.integrations.steps import AskedSteps
from rollover.integrations.trl.checks import check_async, given_by_async, samples_per_version, trl_version
from rollover.integrations.trl.engine import HostedEngine
from rollover.integrations.trl.prompts import ROW, DatasetPrompts, TableRows, encoder, fingerprint
from rollover.integrations.trl.worker import AsyncSettings, Messages, RolloutWorker, Trained
from rollover.rollout.events import Event
from rollover.types import Batch, Group, Trajectory
from rollover.weights.sources import MemoryWeights


def rollout_worker(
    args: Any,
    *,
    model: str,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    train_dataset: TableRows,
    processing_class: Any = None,
    rollover: Asked = None,
    observer: Callable[[Event], None] = lambda event: None,
) -> RolloutWorker:
    """Return the rollout worker and weight transfer of an ``AsyncGRPOTrainer`` that is created with the same arguments.

    Example::

        worker = rollout_worker(args, model="Qwen/Qwen3-4B", reward_funcs=accuracy, train_dataset=dataset,
                                rollover={"engine": {"kind": "vllm", "urls": ["http://gpu-1:8000"]}})
        trainer = AsyncGRPOTrainer("Qwen/Qwen3-4B", accuracy, args=args, train_dataset=dataset,
                                   rollout_worker=worker, weight_transfer=worker)

    Args:
        args: an ``AsyncGRPOConfig``.
        model: a folder or the name of a model on the hub.
        reward_funcs: called on the worker's thread with ``prompts``, ``completions``, ``completion_ids`` and the
            columns of the dataset, as in TRL; they need not be picklable.
        train_dataset: with a column ``prompt`` of messages or texts. Its rows are taken in their order.
        processing_class: the tokenizer; the model's own when it is left out.
        rollover: as for ``GRPOTrainer``. By default the engine is embedded, on the trainer's devices.
        observer: called with each event of the rollouts, on a thread of its own.

    Raises:
        ConfigError: an argument is in the way; the message has a line for each.
    """
    check_async(args)
    config = hosted_config(rollover, given_by_async(args), source="rollover=")
    tokenizer = processing_class or AutoTokenizer.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    functions = [reward_funcs] if callable(reward_funcs) else [*reward_funcs]
    if not functions:
        raise ConfigError("reward_funcs is empty: pass at least one reward function")
    table = _Table(train_dataset, copy.deepcopy(tokenizer), functions)

    def open_rollouts() -> AsyncRollouts:
        return _opened(args, config, model=model, rows=train_dataset, tokenizer=tokenizer, observer=observer)

    settings = AsyncSettings(max_staleness=args.max_staleness, samples_per_version=samples_per_version(args))
    return RolloutWorker(
        config.rollout, settings, open_rollouts=open_rollouts, rewards=table.rewards, messages=table.messages
    )


def _opened(
    args: Any,
    config: HostedConfig,
    *,
    model: str,
    rows: TableRows,
    tokenizer: Any,
    observer: Callable[[Event], None],
) -> AsyncRollouts:
    def make_source(capabilities: Capabilities) -> DatasetPrompts:
        return DatasetPrompts(
            rows,
            # A tokenizer must not be used in two threads, so the feed has its own.
            encoder(copy.deepcopy(tokenizer), args.chat_template_kwargs or {}),
            seed=config.seed,
            shuffle=False,
            max_prompt_tokens=capabilities.max_context_tokens - args.max_completion_length,
        )

    run = HostedRun(
        Path(args.output_dir) / "rollover",
        config,
        host=f"trl {trl_version()}",
        resume=False,
        facts={"dataset": fingerprint(rows)},
        remedy="runs of AsyncGRPOTrainer cannot be resumed, so move it away",
    )
    try:
        folder = resolve_model(model)
        hosted = HostedEngine(
            config,
            run,
            folder=folder,
            make_source=make_source,
            stop_token_ids=stop_token_ids(folder, tokenizer),
            observer=observer,
        )
    except BaseException:
        run.close()
        raise
    return AsyncRollouts(run, hosted)


class AsyncRollouts:
    """Implements ``Rollouts`` over an engine, with the directory of a run. A step lasts from one publication to the
    next.

    Example: see ``Rollouts``.
    """

    def __init__(self, run: HostedRun, hosted: HostedEngine) -> None:
        self._run = run
        self._hosted = hosted
        # With every strategy, the trainer trains one batch while the next ones are decoded.
        self._steps = AskedSteps(hosted.feed, run, knows_rewards=False, overlaps_training=True)

    def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._steps.begin(version)
        self._hosted.publish(version, MemoryWeights(version, tensors))
        self._steps.published()

    def batch(self, version: int) -> Batch:
        return self._hosted.feed.batch(version)

    def trained(self, batch: Batch, outcome: Trained) -> None:
        self._steps.handed_out(batch, outcome.untrained, waited_s=outcome.waited_s)
        if scored := [reward for reward in outcome.rewards if not math.isnan(reward)]:
            self._steps.measured({"reward/mean": sum(scored) / len(scored)})
        self._steps.trained_before(batch.step + 1)
        self._hosted.feed.saved(batch.step + 1)

    def close(self) -> None:
        try:
            self._steps.close()
            self._hosted.feed.close()
        finally:
            self._run.close()


class _Table:
    """The rows of trajectories: their messages, and their rewards from the trainer's functions."""

    def __init__(self, rows: TableRows, tokenizer: Any, functions: Sequence[Callable[..., Any]]) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._functions = functions

    def messages(self, trajectory: Trajectory) -> tuple[Messages, Messages]:
        prompt = self._columns(trajectory)["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        return asked, [{"role": "assistant", "content": self._text(trajectory)}]

    def rewards(self, group: Group) -> list[dict[str, float]]:
        """Return the values of the reward functions for each trajectory; NaN where one returns none."""
        columns = dict(self._columns(group.trajectories[0]))
        prompt = columns.pop("prompt")
        texts = [self._text(trajectory) for trajectory in group.trajectories]
        is_text = isinstance(prompt, str)
        given = {
            **{name: [value] * len(texts) for name, value in columns.items()},
            "prompts": [prompt] * len(texts),
            "completions": texts if is_text else [[{"role": "assistant", "content": text}] for text in texts],
            "completion_ids": [[*trajectory.token_ids] for trajectory in group.trajectories],
        }
        found = {get_callable_name(function): _called(function, given) for function in self._functions}
        return [
            {name: math.nan if values[i] is None else float(values[i]) for name, values in found.items()}
            for i in range(len(texts))
        ]

    def _columns(self, trajectory: Trajectory) -> Mapping[str, Any]:
        return self._rows[int(trajectory.prompt.columns[ROW])]

    def _text(self, trajectory: Trajectory) -> str:
        return str(self._tokenizer.decode([*trajectory.token_ids], skip_special_tokens=True))


def _called(function: Callable[..., Any], given: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of a reward function, which may be asynchronous."""
    found = function(**given)
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    values: Sequence[Any] = found
    return values


async def _awaited(found: Any) -> Any:
    return await found
