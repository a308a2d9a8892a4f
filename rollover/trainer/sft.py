"""Supervised warm-up: maximum likelihood of response tokens, with the packing and the log-probs that the trainer
uses."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollover.errors import DataError
from rollover.hf.companions import Companions, read_companions
from rollover.hf.config import read_model_config
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.trainer.balancing import attention_share
from rollover.trainer.checks import check_suits
from rollover.trainer.config import SFTConfig
from rollover.trainer.context import open_context
from rollover.trainer.guards import deterministic_kernels, reporting_out_of_memory
from rollover.trainer.leading import ForRanks, RankLauncher, RankLost, collective_timeout_s
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.messages import RankTask
from rollover.trainer.minibatch import rows_of_rank
from rollover.trainer.models import pick_device
from rollover.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from rollover.trainer.packing import TrainingSample
from rollover.trainer.policy import FullPolicy
from rollover.trainer.setup import SFTSetup
from rollover.trainer.shares import write_index
from rollover.trainer.staging import Staging
from rollover.trainer.world import ALONE, World

if TYPE_CHECKING:
    from rollover.trainer.sharded import ShardedPolicy

Example = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[bool]]
"""Prompt ids and response ids; the response ends with the end token if the model should learn to stop. For an episode
also whether each response token is the model's own: only these are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTProgress:
    """The result of one optimizer step."""

    step: int
    """Number of the step, from 0."""
    loss: float
    """Mean negative log-likelihood of the step's response tokens, before the update; nats."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Response tokens trained."""
    elapsed_s: float
    """Seconds since the first step began."""


class SFTTrainer:
    """A model in supervised training, on one device of this process or as one of several ranks.

    Args:
        folder: the model to begin with.
        world: the other ranks. All are given the same examples; each trains its own rows of them.
    """

    def __init__(self, setup: SFTSetup, folder: Path, *, world: World = ALONE, device: str | None = None) -> None:
        self._setup = setup
        self._world = world
        check_suits(setup.config, read_model_config(folder))
        self._context = open_context(world, setup.config.context_parallel)
        self._device = pick_device(device or setup.config.device, setup.config.section)
        self._companions = {**read_companions(folder), **setup.companions}
        with reporting_out_of_memory(setup.config, loading=True):
            self._policy: FullPolicy | ShardedPolicy
            if world.mesh is None:
                self._policy = FullPolicy(setup.config, folder, initial=folder, needs_ref=False, device=self._device)
            else:
                from rollover.trainer.sharded import ShardedPolicy

                self._policy = ShardedPolicy(setup.config, folder, initial=folder, needs_ref=False, world=world)
            self._optimizer = build_optimizer(self._policy.model, setup.config)

    def step(self, step: int, samples: Sequence[TrainingSample]) -> tuple[float, float]:
        """Take optimizer step ``step`` (from 0). Returns the mean negative log-likelihood before it, in nats, and the
        norm of the gradient."""
        config, world, model = self._setup.config, self._world, self._policy.model
        with reporting_out_of_memory(config), deterministic_kernels(self._setup.deterministic):
            self._optimizer.zero_grad(set_to_none=True)
            num_tokens = sum(s.num_sampled for s in samples)
            rows, padding, _ = rows_of_rank(
                samples,
                range(len(samples)),
                budget=config.micro_batch_tokens,
                world=world,
                context=self._context,
                quadratic=attention_share(model.config.hidden_size),
                device=self._device,
                shares_prompts=not model.is_padded,
            )
            loss, counts = 0.0, self._context is None or self._context.place == 0
            for row, weight in [*((row, -1 / num_tokens) for row in rows), *((row, 0.0) for row in padding)]:
                logprobs_T = response_logprobs(model, row, 1.0, autocast=self._policy.autocast)
                share = weight * logprobs_T.sum()
                share.backward()
                loss += float(share.detach()) if counts else 0.0
                world.tick()
            grad_norm = apply_gradients(self._optimizer, config, learning_rate(config, step, config.num_steps))
            loss = float(world.sum(torch.tensor(loss, dtype=torch.float64, device=self._device), "losses"))
        return loss, grad_norm

    def save(self, folder: Path) -> None:
        """Write the model to ``folder``, or this rank's part of it if there are several."""
        self._policy.write(folder, companions=self._companions)

    def close(self) -> None:
        """Give the memory of model and optimizer back."""
        del self._policy, self._optimizer
        gc.collect()  # a layer that is recomputed refers to itself
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def run_sft(
    model: str | Path,
    examples: Iterable[Example],
    config: SFTConfig,
    *,
    output: Path,
    deterministic: bool = False,
    companions: Companions | None = None,
    timeout_s: float = 600.0,
    logs: Path | None = None,
    launcher: RankLauncher | None = None,
    max_restarts: int = 0,
    on_progress: Callable[[SFTProgress], None] = lambda progress: None,
    notify: Callable[[str], None] = lambda message: None,
) -> dict[str, float]:
    """Train ``config.num_steps`` steps on examples taken in order, ``config.batch_size`` a step, and write the model to
    the folder ``output``. Prompt tokens are conditioned on and not trained. Returns the closing metrics.

    Args:
        examples: iterated over from their start each time that the warm-up begins.
        companions: files of ``output`` that take the place of the model's, by name.
        timeout_s, logs: of the ranks, if there are several devices; see ``Ranks``.
        launcher: starts ranks elsewhere, even one for a single device.
        max_restarts: times that the warm-up begins again when a rank is lost.
        notify: shows the user that it does.

    Raises ``DataError`` when the examples run out before the last step, ``RankLost`` when ranks are lost too often.
    """
    folder = resolve_model(model)
    setup = SFTSetup(config=config, deterministic=deterministic, companions=companions or {})
    if launcher is None and config.is_sharded:
        from rollover.trainer.ranks import LocalLauncher

        launcher = LocalLauncher(config, timeout_s=timeout_s, logs=logs)
    restarts = itertools.count(1)
    while True:
        trainer: SFTTrainer | SFTRanks
        try:
            if launcher is None:
                trainer = SFTTrainer(setup, folder)
            else:
                trainer = SFTRanks(setup, folder, launcher, timeout_s=timeout_s, fallback=output.parent)
            with closing(trainer):
                return _warmed_up(trainer, iter(examples), config, output, on_progress)
        except RankLost as error:
            if (number := next(restarts)) > max_restarts:
                raise
            notify(f"warm-up: {error}; it begins again (restart {number} of {max_restarts})")


def _warmed_up(
    trainer: SFTTrainer | SFTRanks,
    source: Iterator[Example],
    config: SFTConfig,
    output: Path,
    on_progress: Callable[[SFTProgress], None],
) -> dict[str, float]:
    """Take all steps, and write the model. Returns the closing metrics."""
    started_s = time.perf_counter()
    total_tokens, losses = 0, []
    for step in range(config.num_steps):
        samples = _take(source, config, step)
        num_tokens = sum(s.num_sampled for s in samples)
        loss, grad_norm = trainer.step(step, samples)
        losses.append(loss)
        total_tokens += num_tokens
        on_progress(
            SFTProgress(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=learning_rate(config, step, config.num_steps),
                num_tokens=num_tokens,
                elapsed_s=time.perf_counter() - started_s,
            )
        )
    write_folder(output, trainer.save)
    last = losses[-min(20, len(losses)) :]
    return {
        "loss/first": losses[0],
        "loss/last_20_steps": sum(last) / len(last),
        "tokens/response": float(total_tokens),
        "time/total_s": time.perf_counter() - started_s,
    }


def _take(source: Iterator[Example], config: SFTConfig, step: int) -> list[TrainingSample]:
    examples = list(itertools.islice(source, config.batch_size))
    if len(examples) < config.batch_size:
        raise DataError(
            f"the examples ran out at step {step} of {config.num_steps}: "
            "lower sft.num_steps or sft.batch_size, or give more examples"
        )
    return [
        TrainingSample(prompt_ids=tuple(prompt), response_ids=tuple(response), is_sampled=tuple(*is_own))
        for prompt, response, *is_own in examples
    ]


class SFTRanks:
    """Leads the ranks of a warm-up on several devices, with the interface of ``SFTTrainer``. A warm-up that loses a
    rank begins again: it has no checkpoints.

    Args:
        launcher: starts them.
        timeout_s: ranks that do nothing for so long are given up.
        fallback: a folder for passing examples on when shared memory is too small for them.
    """

    def __init__(
        self, setup: SFTSetup, folder: Path, launcher: RankLauncher, *, timeout_s: float, fallback: Path
    ) -> None:
        self._staging = Staging(2**28, fallback=fallback, on_disk=launcher.is_remote)
        try:
            task = RankTask(
                rank=0,
                size=len(launcher.devices),
                device=launcher.devices[0],
                num_threads=launcher.num_threads,
                folder=self._staging.meeting(),
                timeout_s=collective_timeout_s(timeout_s),
                setup=setup,
                model=folder,
                resume_from=None,
            )
            self._ranks = launcher.launch(task)
        except BaseException:
            self._staging.close()
            raise

    def step(self, step: int, samples: Sequence[TrainingSample]) -> tuple[float, float]:
        """Implement ``SFTTrainer.step``."""
        batch = ForRanks((step, list(samples)))
        loss, grad_norm = self._ranks.ask(f"step {step} of the warm-up", "step", batch=batch)[0]
        return loss, grad_norm

    def save(self, folder: Path) -> None:
        """Let each rank write its part of the model."""
        self._ranks.ask("writing the model", "save", folder=folder)
        write_index(folder)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.end()
        self._staging.close()
