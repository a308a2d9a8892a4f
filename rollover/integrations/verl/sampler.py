"""The replay buffer: when verl's trainer samples a batch, Rollover's scheduler produces it.

::

    verl's trainer ──▶ manager.generate_sequences(prompts)      they wait
                   ──▶ buffer.sample(global_steps, "train", n)  the feed decodes, stops, parks the rest
                   ◀── keys of TransferQueue, with all training data
"""

from __future__ import annotations

import atexit
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollover.errors import ConfigError
from rollover.integrations.verl.manager import AgentLoopManager
from rollover.integrations.verl.rows import VerlRows
from rollover.integrations.verl.run import VerlParts, VerlRun
from rollover.integrations.verl.settings import VerlSettings, verl_settings


class ReplayBuffer:
    """Replaces verl's replay buffer.

    Example: ``trainer.v1.sampler.custom_sampler.path=pkg://rollover.integrations.verl`` and ``...name=ReplayBuffer``

    Args:
        refill_fn: the method of verl's trainer that submits that many more prompts.
        given: the other arguments of verl's buffer, with which one of verl's own is created for evaluations.
    """

    def __init__(self, *, refill_fn: Any, **given: Any) -> None:
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer as Stock

        self._evaluation = Stock(refill_fn=refill_fn, **given)
        self._trainer: Any = getattr(refill_fn, "__self__", None)
        if self._trainer is None:
            raise ConfigError(
                "verl's refill_fn is not a method of its trainer, whose replicas are needed: use verl 0.9"
            )
        self._refill = refill_fn
        self._run: VerlRun | None = None
        self._rows: VerlRows | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """Return the batch of a training step in the form of verl's queue, and its metrics; evaluations use verl's own
        buffer."""
        if partition_id != "train":
            with nullcontext() if self._run is None else self._run.set_aside():
                found: tuple[Any, dict[str, float]] = self._evaluation.sample(global_steps, partition_id, batch_size)
            return found
        if self._run is None:
            self._run = self._open(global_steps, batch_size)
            atexit.register(self._run.close)
        self._take_submitted()
        batch = self._run.batch(global_steps)

        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        tq.kv_clear(partition_id=partition_id, keys=batch.uids)
        tq.kv_batch_put(
            keys=batch.keys, partition_id=partition_id, fields=list_of_dict_to_tensordict(batch.fields), tags=batch.tags
        )
        return tq.KVBatchMeta(partition_id=partition_id, keys=batch.keys, tags=batch.tags), batch.metrics

    def close(self) -> None:
        """Close the run. Does nothing if there is none."""
        if self._run is not None:
            self._run.close()

    @property
    def _manager(self) -> AgentLoopManager:
        manager = getattr(self._trainer, "agent_loop_manager", None)
        if not isinstance(manager, AgentLoopManager):
            raise ConfigError(
                f"verl's agent-loop manager is {type(manager).__name__}: set"
                " +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollover.integrations.verl.AgentLoopManager"
            )
        return manager

    def _take_submitted(self) -> None:
        assert self._rows is not None, "the run is open"
        for prompts in self._manager.take():
            self._rows.add(prompts)

    def _more(self, num_prompts: int) -> None:
        self._refill(num_prompts)
        self._take_submitted()

    def _open(self, global_steps: int, batch_size: int) -> VerlRun:
        config = self._manager.config
        settings = verl_settings(config)
        if batch_size != config.data.train_batch_size:
            raise ConfigError(
                f"verl samples {batch_size} prompts of {config.data.train_batch_size} at a time"
                " (trainer.v1.sync.parameter_sync_step): with Rollover a step is one batch, so use 1"
            )
        chunk = config.data.get("gen_batch_size") or config.data.train_batch_size
        self._rows = VerlRows(self._encoder(), self._more, group_size=settings.hosted.rollout.group_size, chunk=chunk)
        return VerlRun(
            settings,
            self._parts(settings),
            self._rows,
            first_step=global_steps - 1,
            folder=_unused(Path(config.trainer.default_local_dir) / f"rollover/from_step_{global_steps - 1}"),
        )

    def _parts(self, settings: VerlSettings) -> VerlParts:
        manager, trainer = self._manager, self._trainer
        rollout, replicas = manager.config.actor_rollout_ref.rollout, trainer.llm_server_manager.get_replicas()
        return VerlParts(
            client=manager.llm_client,
            replicas=replicas,
            reward_workers=manager.reward_loop_worker_handles,
            tokenizer=trainer.tokenizer,
            model=_model(manager.config.actor_rollout_ref.model.path, trainer.tokenizer),
            max_running=settings.options.max_running or rollout.max_num_seqs * len(replicas),
            max_context_tokens=rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length,
        )

    def _encoder(self) -> Any:
        tokenizer, config = self._trainer.tokenizer, self._manager.config
        extra = dict(config.data.get("apply_chat_template_kwargs") or {})
        longest = config.actor_rollout_ref.rollout.prompt_length

        def encode(messages: Any) -> list[int]:
            found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **extra)
            ids = [int(token) for token in (found["input_ids"] if hasattr(found, "keys") else found)]
            return ids[-longest:]  # verl's agent loop cuts long prompts on the left

        return encode


def _model(path: str, tokenizer: Any) -> str:
    """Return where the model can be read: verl copies a remote one, and opens the tokenizer of the copy."""
    return str(tokenizer.name_or_path) if "://" in path else path


def _unused(folder: Path) -> Path:
    """Return a directory without a run. verl does not restore its prompts, so each start is a run of its own, including
    a second one from the same checkpoint."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], names) if not (path / "journal.sqlite").exists())
