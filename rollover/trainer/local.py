"""The trainer on one device: weights of version ``v`` and a batch become weights of version ``v + 1``.

Advantages are computed once over the global batch; every denominator is global, so the gradient
does not depend on the split into rows; all log-probs come from one function; ``version`` counts the batches
trained. The trainer knows neither engines nor rollouts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rollover.algorithms.advantages import ComponentRewards, TurnRewards, compute_advantages, shaping
from rollover.algorithms.batch import TokenBatch
from rollover.algorithms.losses import LossError, policy_loss
from rollover.algorithms.metrics import LossMetrics
from rollover.batch import Batch, TrainedStep, WasteCause
from rollover.errors import ConfigError, RolloverError
from rollover.hf.companions import read_companions
from rollover.hf.config import read_model_config
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.kept_codec import mean_kept
from rollover.trainer.balancing import attention_share
from rollover.trainer.checkpoint import read_manifest, write_manifest
from rollover.trainer.checks import check_suits
from rollover.trainer.config import TrainerConfig
from rollover.trainer.context import open_context
from rollover.trainer.gathering import entropy_metrics, gathered_losses, gathered_tokens, measured_drift, of_nothing
from rollover.trainer.guards import deterministic_kernels, reporting_out_of_memory
from rollover.trainer.logprobs import all_logprobs, response_logits, response_logprobs, vocab_size
from rollover.trainer.minibatch import BatchTensors, MiniBatch, StepConstants, shuffled, split
from rollover.trainer.models import pick_device
from rollover.trainer.moments import read_moments, write_moments
from rollover.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from rollover.trainer.packing import PackedRow, TrainingSample, pack, shared
from rollover.trainer.policy import open_policy
from rollover.trainer.setup import TrainingSetup
from rollover.trainer.world import ALONE, PeerLost, World
from rollover.weights.adapters import AdapterSource, MergedWeights
from rollover.weights.base import WeightSource
from rollover.weights.sending import HeldWeights, Lease, own_weights
from rollover.weights.sources import MemoryWeights

_OF_THE_START = re.compile(r"kl/(rollout_)?proximal|(clip|cap)/at_start|is_weight/m|ess/|lag_\w+/(is_weight|ess)")
"""Metrics that compare with the weights at the start of the step. Without a forward of their own, later mini-batches
do not know them."""
_OF_THE_START_AND_RATIO = re.compile(rf"{_OF_THE_START.pattern}|ratio/")


class LocalTrainer:
    """Implements ``Trainer`` on one device of this process.

    Example: after ``trainer.step(batch)`` with the first batch, ``trainer.version`` is 1, and
    ``trainer.weight_source()`` returns the weights that an engine loads as version 1.

    Args:
        model: folder or hub id of the initial policy, which is also the frozen reference if the algorithm needs one.
        resume_from: a checkpoint to continue from, exactly where ``save`` left off.
        world: other ranks with which it trains one model. All are given the same batches, each trains its own rows of
            them, and each writes its share of a checkpoint; the process that leads them has checked the one to continue
            from.

    Raises ``ModelError`` for a model that cannot be trained and for a checkpoint whose settings, model or
    optimizer state do not match (naming what differs), ``ConfigError`` for a device that is not there, and for several
    devices without their ranks.
    """

    def __init__(
        self, setup: TrainingSetup, model: str | Path, *, resume_from: Path | None = None, world: World = ALONE
    ) -> None:
        self._setup = setup
        self._config = config = setup.config
        self._algorithm = setup.algorithm
        self._world = world
        self._device = pick_device(config.device, config.section)
        self._version = 0
        self._lease = Lease()
        self._is_whole = True
        """True if the weights have ``version``: no step was left half done."""
        initial = resolve_model(model)
        check_suits(config, read_model_config(initial, weights=False))
        if config.is_sharded and world.mesh is None:
            what = f"{config.section}.num_devices and offload need ranks, which rollover.train starts"
            raise ConfigError(f"{what}: this trainer is alone in its process")
        self._context = open_context(world, config.context_parallel)
        self._counts = self._context is None or self._context.place == 0
        """True on the one rank, among the ranks that share a row, that reports on it."""
        self._companions = {**read_companions(initial), **setup.companions}
        if resume_from is not None and world is not ALONE:  # the process that leads the ranks has read it
            self._version = read_manifest(resume_from).version
        elif resume_from is not None:
            threads = torch.get_num_threads()
            self._version = self._setup.check_resumable(resume_from, initial, num_threads=threads)
        with reporting_out_of_memory(config, loading=True):
            self._policy = open_policy(
                config,
                initial,
                checkpoint=resume_from,
                needs_ref=setup.algorithm.needs_ref,
                device=self._device,
                seed=setup.seed,
                world=world,
            )
            self._model = self._policy.model
            self._autocast = self._policy.autocast
            self._optimizer = build_optimizer(self._model, config)
            if resume_from is not None:
                read_moments(world, resume_from, self._model, self._optimizer)

    @property
    def version(self) -> int:
        """Return the number of batches trained so far, which is the ``policy_version`` of ``weights()``."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output matrix."""
        return vocab_size(self._model)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that engines serve, by Hugging Face name: views that the next step changes or, if adapters
        are trained, the merged tensors; a tied matrix appears once."""
        return self._policy.weights()

    def weight_source(self) -> WeightSource:
        """Implement ``Trainer.weight_source``: trained tensors are passed on themselves, not as copies."""
        assert self._world.mesh is None, "no rank has all weights to publish: each writes its share"
        weights = self.weights()
        if self._config.publishes_adapters:
            assert isinstance(weights, MergedWeights), "adapters are trained"
            return AdapterSource(self._version, weights.adapters)
        return MemoryWeights(self._version, weights)

    def weights_to_send(self) -> HeldWeights | None:
        """Implement ``Trainer.weights_to_send``."""
        if self._config.publishes_adapters:
            return None
        source, weights, device = self.weight_source(), self.weights(), str(self._device)
        return own_weights(source, weights, self._lease, current=lambda: self._version, device=device)

    def step(self, batch: Batch) -> TrainedStep:
        """Train one batch and count it. A batch in which no token has a gradient is counted without an update. Waits
        until the weights are no longer being sent.

        Raises ``ResourceError`` when memory runs out and ``RolloverError`` when a log-prob, the gradient or a weight is
        not finite; then continue from the last checkpoint, since the state of this trainer can no longer be saved.
        """
        with self._lease.changing():
            return self._step(batch)

    def _step(self, batch: Batch) -> TrainedStep:
        assert batch.step == self._version, f"batch of step {batch.step} given to version {self._version}"
        self._is_whole = False
        started_s = time.perf_counter()
        config, world = self._config, self._world
        with reporting_out_of_memory(config), deterministic_kernels(self._setup.deterministic):
            groups = shuffled(batch.groups, config.mini_batches, seed=self._setup.seed, step=batch.step)
            data = BatchTensors.of(
                groups,
                self._algorithm,
                step=batch.step,
                device=self._device,
                replays_routes=config.replay_routes,
            )
            minis = split(
                data,
                config.mini_batches,
                budget=config.micro_batch_tokens,
                max_response_tokens=self._setup.max_response_tokens,
                world=world,
                context=self._context,
                quadratic=attention_share(self._model.config.hidden_size),
                shares_prompts=not self._model.is_padded,
            )
            constants = self._constants(data, minis)
            measured_3T = torch.full((3, data.num_tokens), torch.nan, dtype=torch.float64, device=self._device)
            rate = learning_rate(config, batch.step, self._setup.num_steps)
            losses, norms, parts = [], [], []
            for mini in minis:
                loss, mini_metrics = self._accumulate(data, constants, mini, measured_3T)
                norms.append(apply_gradients(self._optimizer, config, rate))
                losses.append(loss)
                parts.append(mini_metrics)
            metrics = reduce(LossMetrics.merge, parts)
            measured = metrics.finalize()
            if len(minis) > 1 and not self._algorithm.needs_proximal:
                of_start = _OF_THE_START_AND_RATIO if self._algorithm.old == "proximal" else _OF_THE_START
                measured = {name: value for name, value in measured.items() if not of_start.match(name)}
            trajectories = [t for g in groups for t in g.trajectories]
            distance_T, entropy_T, mass_T = gathered_tokens(world, measured_3T).cpu().numpy()
            drift = measured_drift(trajectories, distance_T, step=batch.step)
        self._version += 1
        self._is_whole = True
        elapsed_s = time.perf_counter() - started_s
        metrics_of_step = {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": rate,
            "time/step_s": elapsed_s,
            "tokens/per_s": data.num_tokens / elapsed_s,
            # As of the surprise, masked tokens are no part of it: samples cut at the limit are the longest ones.
            **entropy_metrics(
                data.lengths_B.cpu().numpy(), np.where(data.loss_mask_T.cpu().numpy() > 0, entropy_T, np.nan)
            ),
            "tokens/response": float(data.num_tokens),
            "tokens/forward": float(sum(mini.num_positions for mini in minis)),
            **_kept_metrics(data, mass_T),
            **_route_metrics(data, config),
            **measured,
        }
        return TrainedStep(metrics=metrics_of_step, untrained=metrics.untrained(), drift=drift)

    def skip(self, batch: Batch) -> TrainedStep:
        """Count one batch without training it: the next version has the weights and the optimizer's state of this
        one."""
        assert batch.step == self._version, f"batch of step {batch.step} given to version {self._version}"
        self._version += 1
        return TrainedStep(metrics={}, untrained={WasteCause.SKIPPED: batch.num_tokens})

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the logits ``[num_prompts, vocab]`` of the token after each prompt under ``weights()``, as ``step``
        would."""
        samples = [TrainingSample(prompt_ids=tuple(ids), response_ids=(0,)) for ids in prompts]
        rows = pack(samples, self._config.micro_batch_tokens, device=self._device)
        logits = np.empty((len(prompts), self.vocab_size), dtype=np.float32)
        with reporting_out_of_memory(self._config), torch.no_grad():
            for row in rows:
                logits_TV = response_logits(self._model, shared(row, self._context), autocast=self._autocast)
                logits[row.token_T.tolist()] = logits_TV.float().cpu().numpy()
        return logits

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint from which ``resume_from`` continues bit for bit; ``extra`` is JSON kept in its manifest.

        Raises ``ResourceError`` when the disk is full; an earlier folder in its place is then intact.
        """
        assert self._is_whole, "a step that raised left weights that are no version's"
        assert self._world.size == 1, "ranks write their shares, and whoever leads them the rest"
        manifest = self._setup.manifest(self._version, num_threads=torch.get_num_threads(), extra=extra)

        def write(partial: Path) -> None:
            self.write_share(partial)
            write_manifest(partial, manifest)

        write_folder(folder, write)

    def write_share(self, folder: Path) -> None:
        """Write this rank's share of a checkpoint: everything but the manifest, if it is alone."""
        self._policy.write(folder, companions=self._companions)
        self._world.tick()
        write_moments(self._world, folder, self._model, self._optimizer)

    def write_weights(self, folder: Path) -> None:
        """Write this rank's part of the weights that engines serve."""
        self._policy.write_weights(folder)

    def rest(self) -> None:
        """Implement ``Trainer.rest``."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Implement ``Trainer.close``; there is nothing to end."""

    def _constants(self, data: BatchTensors, minis: tuple[MiniBatch, ...]) -> StepConstants:
        """Compute the proximal and reference log-probs and the advantages of the batch.

        While the weights are still those at the start of the step, the training forward itself yields the proximal
        log-probs. So the first mini-batch needs no forward of its own (its entries here stay 0 and are not read),
        unless the advantages do.
        """
        in_reward = self._algorithm.needs_ref and self._algorithm.kl_in == "reward"
        late = minis if in_reward else minis[1:] if self._algorithm.needs_proximal else ()

        def forward(model: Any, chosen: tuple[MiniBatch, ...], what: str) -> Tensor:
            rows = [row for mini in chosen for row in mini.rows]
            padding = [row for mini in chosen for row in mini.padding]
            logprobs_T = all_logprobs(
                model,
                rows if self._counts else (),
                self._setup.temperature,
                num_tokens=data.num_tokens,
                autocast=self._autocast,
                padding=padding if self._counts else rows + padding,
                on_pass=self._world.tick,
            )
            return self._world.sum(logprobs_T, what) if chosen else logprobs_T

        proximal_T, ref_T = forward(self._model, late, "proximal log-probs"), None
        if self._algorithm.needs_ref:
            with self._policy.reference() as reference:
                ref_T = forward(reference, minis, "reference log-probs")
        most, components, turns = self._setup.max_response_tokens, None, None
        shaping_B = shaping(self._algorithm, data.limited_B, max_response_tokens=most)
        if data.components_2BK is not None:
            values_BK, weights_BK = data.components_2BK
            components = ComponentRewards(values_BK, weights_BK, shaping_B)
        if data.turns_BK is not None and data.turn_T is not None:
            turns = TurnRewards(data.turns_BK, shaping_B, data.turn_T)
        given = {
            "rewards_B": data.rewards_B + shaping_B,
            "group_B": data.group_B,
            "sample_T": data.sample_T,
            "baseline_B3": data.baseline_B3,
            "components": components,
            "turns": turns,
            "loss_mask_T": data.loss_mask_T,
            "proximal_logprobs_T": proximal_T,
            "ref_logprobs_T": ref_T,
        }
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.cpu(), given)  # CUDA has no deterministic cumulative sum
        advantages_T = compute_advantages(self._algorithm, **on_cpu).float().to(self._device)
        return StepConstants(proximal_logprobs_T=proximal_T, ref_logprobs_T=ref_T, advantages_T=advantages_T)

    def _accumulate(
        self, data: BatchTensors, constants: StepConstants, mini: MiniBatch, measured_3T: Tensor
    ) -> tuple[float, LossMetrics]:
        """Accumulate the gradients of one mini-batch, row by row. The distances between recorded and proximal log-probs
        and the measures of ``head_measures`` are written into ``measured_3T``."""
        distance_T = measured_3T[0]
        self._optimizer.zero_grad(set_to_none=True)
        is_first, needs_proximal = mini.first_group == 0, self._algorithm.needs_proximal
        losses, parts = [], []
        refused: RolloverError | None = None
        for row in mini.rows:
            logprobs_T = response_logprobs(
                self._model, row, self._setup.temperature, autocast=self._autocast, measured_2T=measured_3T[1:]
            )
            tokens = mini.token_batch(data, constants, row, logprobs_T, as_proximal=is_first or not needs_proximal)
            if self._counts and (is_first or needs_proximal):  # otherwise the weights have changed since the step began
                distance_T[row.token_T] = (tokens.proximal_logprobs_T - tokens.rollout_logprobs_T).abs().double()
            try:
                loss, row_metrics = self._loss(data, mini, row, tokens)
            except RolloverError as error:
                if self._world.size == 1:
                    raise
                refused, loss = refused or error, logprobs_T.sum()  # the other ranks wait for this pass
            else:
                if self._counts:
                    losses.append(loss.detach())
                parts.append(row_metrics if self._counts else of_nothing(row_metrics))
            loss.backward()
            self._world.tick()
        for row in mini.padding:
            logprobs_T = response_logprobs(self._model, row, self._setup.temperature, autocast=self._autocast)
            (0 * logprobs_T).sum().backward()
            if not parts and refused is None:  # without rows of its own, this gives the metrics their form
                tokens = mini.token_batch(data, constants, row, logprobs_T.detach(), as_proximal=True)
                try:
                    parts.append(of_nothing(self._loss(data, mini, row, tokens)[1]))
                except RolloverError as error:
                    refused = error
            self._world.tick()
        failed = self._world.failed(refused is not None, "errors")  # none can continue without the others
        if refused is not None:
            raise refused
        if failed:
            raise PeerLost(f"{self._world} cannot continue: rank {failed[0]} failed")
        return gathered_losses(self._world, losses, reduce(LossMetrics.merge, parts))

    def _loss(
        self, data: BatchTensors, mini: MiniBatch, row: PackedRow, tokens: TokenBatch
    ) -> tuple[Tensor, LossMetrics]:
        """Compute the loss share of one row. Raises ``RolloverError`` naming a sample that cannot be trained on."""
        try:
            return policy_loss(self._algorithm, tokens, mini.denominators)
        except LossError as error:
            if error.sample_index is None:
                raise
            sample_id = data.sample_ids[int(data.sample_P[row.samples_B[error.sample_index]])]
            raise RolloverError(f"sample {sample_id} cannot be trained on: {error}") from error


def _route_metrics(data: BatchTensors, config: TrainerConfig) -> dict[str, float]:
    """Return the share of the batch's tokens whose recorded routes were replayed."""
    if not config.replay_routes:
        return {}
    known = ((path, np.array([*map(bool, path.routes)])[len(path.prompt_ids) :]) for path in data.paths if path.routes)
    return {"routes/replayed": sum(int(path.sampled(is_known_R).sum()) for path, is_known_R in known) / data.num_tokens}


def _kept_metrics(data: BatchTensors, mass_T: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean size of the batch's kept sets, and the mean probability that the policy now gives them; nothing
    if all tokens were drawn from the whole vocabulary."""
    if not (kept := [one for path in data.paths for one in path.kept]):
        return {}
    return {"kept/tokens": mean_kept(kept), "kept/mass": float(np.nanmean(mass_T))}
