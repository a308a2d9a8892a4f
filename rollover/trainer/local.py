"""The trainer on one device: weights of version ``v`` and a batch become weights of version ``v + 1``.

Advantages are computed once over the global batch; every denominator is global, so the gradient
does not depend on the split into rows; all log-probs come from one function; ``version`` counts the batches
trained. The trainer knows neither engines nor rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.algorithms.advantages import compute_advantages, shaped_rewards
from rollover.algorithms.losses import LossError, policy_loss
from rollover.algorithms.metrics import LossMetrics
from rollover.algorithms.registry import Algorithm
from rollover.errors import ModelError, RolloverError
from rollover.hf.companions import read_companions
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.trainer.checkpoint import (
    CheckpointManifest,
    check_identity,
    read_manifest,
    read_state,
    verify_files,
    write_state,
)
from rollover.trainer.config import TrainerConfig
from rollover.trainer.drift import measured_drift
from rollover.trainer.guards import deterministic_kernels, reporting_out_of_memory
from rollover.trainer.logprobs import all_logprobs, response_logits, response_logprobs
from rollover.trainer.minibatch import BatchTensors, MiniBatch, StepConstants, deal, split
from rollover.trainer.models import pick_device
from rollover.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from rollover.trainer.packing import TrainingSample, pack
from rollover.trainer.policy import check_kind, open_policy
from rollover.types import Batch, TrainedStep, WasteCause
from rollover.weights.base import WeightSource


class LocalTrainer:
    """Implements ``Trainer`` on one device of this process.

    Args:
        model: folder or hub id of the initial policy, also the frozen reference where the algorithm needs
        one.
        temperature: of the sampling; log-probs are taken at it.
        max_response_tokens: the response budget (overlong punishment, Dr.GRPO's divisor).
        num_steps: batches in the run, where the ``linear`` and ``cosine`` schedules end.
        seed: deals the groups of a batch to its mini-batches. (Dropout is off: nothing else is random.)
        deterministic: refuse kernels whose result varies between runs: on one machine with one thread count a step is
            then a function of (state, batch), bit for bit.
        resume_from: a checkpoint to go on from, exactly where ``save`` left off.

    Raises ``ModelError`` for a model that cannot be trained and for a checkpoint whose settings, model or
    optimizer state do not match (naming what differs), ``ConfigError`` for a device that is not there.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        model: str | Path,
        *,
        temperature: float,
        max_response_tokens: int,
        num_steps: int,
        seed: int = 0,
        deterministic: bool = False,
        resume_from: Path | None = None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0 for training, got {temperature}: greedy has no density")
        self._config = config
        self._algorithm = algorithm
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._num_steps = num_steps
        self._seed = seed
        self._deterministic = deterministic
        self._device = pick_device(config.device)
        self._autocast = config.dtype == "bfloat16"
        self._version = 0
        self._is_whole = True
        """The weights are those of ``version``: no step was left halfway."""
        initial = resolve_model(model)
        self._companions = read_companions(initial)
        if resume_from is not None:
            self._version = self._check_resumable(resume_from, initial)
        with reporting_out_of_memory(config):
            self._policy = open_policy(
                config,
                initial,
                checkpoint=resume_from,
                needs_ref=algorithm.needs_ref,
                device=self._device,
                seed=seed,
            )
            self._model = self._policy.model
            self._optimizer = build_optimizer(self._model, config)
            if resume_from is not None:
                read_state(resume_from, self._model, self._optimizer)

    @property
    def version(self) -> int:
        """Batches trained so far: the ``policy_version`` of ``weights()``."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        return int(self._model.lm_head.out_features)

    def weights(self) -> Mapping[str, Tensor]:
        """Return what engines serve, by Hugging Face name: views that the next step changes, or, where adapters are
        trained, the merged tensors; a tied matrix once."""
        return self._policy.weights()

    def weight_source(self) -> WeightSource:
        """See ``Trainer.weight_source``: tensors that are trained are passed on themselves, not as copies."""
        return self._policy.source(self._version)

    def step(self, batch: Batch) -> TrainedStep:
        """Train one batch and count it. A batch in which no token has a gradient is counted without an update.

        Raises ``ResourceError`` when memory runs out and ``RolloverError`` when a log-prob, the gradient or a weight is
        not finite; then go on from the last checkpoint: what this trainer holds cannot be saved any more.
        """
        assert batch.step == self._version, f"batch of step {batch.step} given to version {self._version}"
        self._is_whole = False
        started_s = time.perf_counter()
        config = self._config
        with reporting_out_of_memory(config), deterministic_kernels(self._deterministic):
            groups = deal(batch.groups, config.mini_batches, seed=self._seed, step=batch.step)
            data = BatchTensors.of(groups, self._algorithm, step=batch.step, device=self._device)
            minis = split(
                data,
                config.mini_batches,
                budget=config.micro_batch_tokens,
                max_response_tokens=self._max_response_tokens,
            )
            constants = self._constants(data, minis)
            distance_T = torch.full_like(data.rollout_logprobs_T, torch.nan, dtype=torch.float64)
            rate = learning_rate(config, batch.step, self._num_steps)
            losses, norms, parts = [], [], []
            for mini in minis:
                loss, mini_metrics = self._accumulate(data, constants, mini, distance_T)
                norms.append(apply_gradients(self._optimizer, config, rate))
                losses.append(loss)
                parts.append(mini_metrics)
            metrics = reduce(LossMetrics.merge, parts)
            trajectories = [t for g in groups for t in g.trajectories]
            drift = measured_drift(trajectories, distance_T.cpu().numpy(), step=batch.step)
        self._version += 1
        self._is_whole = True
        elapsed_s = time.perf_counter() - started_s
        metrics_of_step = {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "time/step_s": elapsed_s,
            "tokens/per_s": data.num_tokens / elapsed_s,
            **_batch_metrics(data, minis),
            **metrics.finalize(),
        }
        return TrainedStep(metrics=metrics_of_step, untrained=metrics.untrained(), drift=drift)

    def skip(self, batch: Batch) -> TrainedStep:
        """Count one batch without training it: the next version has the weights and the optimizer's state of this."""
        assert batch.step == self._version, f"batch of step {batch.step} given to version {self._version}"
        self._version += 1
        return TrainedStep(metrics={}, untrained={WasteCause.SKIPPED: batch.num_tokens})

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits ``[num_prompts, vocab]`` of the token after each prompt under ``weights()``, as ``step`` would compute
        them."""
        samples = [TrainingSample(prompt_ids=tuple(ids), response_ids=(0,)) for ids in prompts]
        rows = pack(samples, self._config.micro_batch_tokens, device=self._device)
        logits = np.empty((len(prompts), self.vocab_size), dtype=np.float32)
        with reporting_out_of_memory(self._config), torch.no_grad():
            for row in rows:
                logits_TV = response_logits(self._model, row, autocast=self._autocast)
                logits[row.token_T.tolist()] = logits_TV.float().cpu().numpy()
        return logits

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint that ``load`` continues bit for bit; ``extra`` is JSON kept in its manifest.

        Raises ``ResourceError`` when the disk is full; whatever stood there before is then intact.
        """
        assert self._is_whole, "a step that raised left weights that are no version's"
        manifest = CheckpointManifest(
            version=self._version,
            identity=self._identity(),
            num_threads=torch.get_num_threads(),
            extra=dict(extra or {}),
        )

        def write(partial: Path) -> None:
            self._policy.write(partial, companions=self._companions)
            write_state(partial, self._model, self._optimizer, manifest)

        write_folder(folder, write)

    def _check_resumable(self, checkpoint: Path, initial: Path) -> int:
        """The checkpoint's version."""
        manifest = read_manifest(checkpoint)
        verify_files(checkpoint, manifest)
        check_identity(checkpoint, manifest, self._identity())
        if self._deterministic and manifest.num_threads != torch.get_num_threads():
            raise ModelError(
                f"checkpoint {str(checkpoint)!r} was written with {manifest.num_threads} threads, "
                f"now there are {torch.get_num_threads()}: set OMP_NUM_THREADS={manifest.num_threads}, "
                "or deterministic = false"
            )
        check_kind(self._config, checkpoint, initial)
        return manifest.version

    def _identity(self) -> dict[str, Any]:
        settings = {f"trainer.{k}": v for k, v in self._config.identity().items()}
        settings |= {f"algorithm.{k}": v for k, v in self._algorithm.settings().items()}
        settings |= {"seed": self._seed, "temperature": self._temperature}
        settings["max_response_tokens"] = self._max_response_tokens
        if self._config.schedule != "constant":
            settings["num_steps"] = self._num_steps
        return settings

    def _constants(self, data: BatchTensors, minis: tuple[MiniBatch, ...]) -> StepConstants:
        """Proximal and reference log-probs and advantages of the batch.

        While the weights are still those of the step's start, the training forward yields the proximal
        log-probs
        itself: the first mini-batch needs no forward of its own (its entries here stay 0 and are not read),
        unless the advantages do.
        """
        in_reward = self._algorithm.needs_ref and self._algorithm.kl_in == "reward"
        late = minis if in_reward else minis[1:] if self._algorithm.needs_proximal else ()

        def forward(model: Any, chosen: tuple[MiniBatch, ...]) -> Tensor:
            rows = [row for mini in chosen for row in mini.rows]
            return all_logprobs(model, rows, self._temperature, num_tokens=data.num_tokens, autocast=self._autocast)

        proximal_T, ref_T = forward(self._model, late), None
        if self._algorithm.needs_ref:
            with self._policy.reference() as reference:
                ref_T = forward(reference, minis)
        rewards_B = shaped_rewards(
            self._algorithm,
            rewards_B=data.rewards_B,
            lengths_B=data.lengths_B,
            max_response_tokens=self._max_response_tokens,
        )
        advantages_T = compute_advantages(
            self._algorithm,
            rewards_B=rewards_B,
            group_B=data.group_B,
            sample_T=data.sample_T,
            baseline_B3=data.baseline_B3,
            loss_mask_T=data.loss_mask_T,
            proximal_logprobs_T=proximal_T,
            ref_logprobs_T=ref_T,
        )
        return StepConstants(proximal_logprobs_T=proximal_T, ref_logprobs_T=ref_T, advantages_T=advantages_T)

    def _accumulate(
        self, data: BatchTensors, constants: StepConstants, mini: MiniBatch, distance_T: Tensor
    ) -> tuple[float, LossMetrics]:
        """Fill the gradients of one mini-batch, row by row. ``distance_T`` takes the distances between recorded and
        proximal log-probs."""
        self._optimizer.zero_grad(set_to_none=True)
        is_first, needs_proximal = mini.first_group == 0, self._algorithm.needs_proximal
        losses, parts = [], []
        for row in mini.rows:
            logprobs_T = response_logprobs(self._model, row, self._temperature, autocast=self._autocast)
            tokens = mini.token_batch(data, constants, row, logprobs_T, as_proximal=is_first or not needs_proximal)
            if is_first or needs_proximal:  # else the weights have moved since the step began
                distance_T[row.token_T] = (tokens.proximal_logprobs_T - tokens.rollout_logprobs_T).abs().double()
            try:
                loss, row_metrics = policy_loss(self._algorithm, tokens, mini.denominators)
            except LossError as error:
                if error.sample_index is None:
                    raise
                sample_id = data.sample_ids[row.samples_B[error.sample_index]]
                raise RolloverError(f"sample {sample_id} cannot be trained on: {error}") from error
            loss.backward()
            losses.append(loss.detach())
            parts.append(row_metrics)
        return float(sum(losses)), reduce(LossMetrics.merge, parts)


def _batch_metrics(data: BatchTensors, minis: tuple[MiniBatch, ...]) -> dict[str, float]:
    return {
        "reward/mean": float(data.rewards_B.mean()),
        "reward/std": float(data.rewards_B.std(correction=0)),
        "tokens/response": float(data.num_tokens),
        "tokens/forward": float(sum(len(row.input_ids_N) for mini in minis for row in mini.rows)),
    }
