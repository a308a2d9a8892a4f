"""Time and memory of a training step on one or two device types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rollover.devices.costs.links import all_reduce_s, narrowest, transfer_s, weight_update_s
from rollover.devices.costs.passes import batch_tokens, extra_passes, longest_tokens, step_flops
from rollover.devices.costs.records import PartCost, TrainingPart, TrainingPlan
from rollover.devices.records import BF16_BYTES, Device, Link, ModelShape, WorkloadSpec

LOGIT_CHUNK_TOKENS = 1024
"""Number of tokens in a piece for which logits are computed and differentiated."""
_STATE_BYTES = 2 * BF16_BYTES + 3 * 4
"""Bytes per parameter: bf16 weights and gradients, and AdamW's fp32 master weights and two moments."""


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Time and memory of data-parallel pipelines on one device type, regardless of their share of the batch.

    Example: for a model of 28 layers on ``part.pp == 3`` stages, ``layers`` is 10, for the fullest stage.
    """

    device: Device
    model: ModelShape
    workload: WorkloadSpec
    part: TrainingPart
    ring_link: Link
    """The narrowest link between nodes whose gradients are reduced."""
    stage_link: Link
    """Link that joins its pipeline stages."""

    @property
    def micro_tokens(self) -> float:
        """Return the tokens of a micro-batch: the longest sequence fits, and shorter ones are packed."""
        return longest_tokens(self.workload)

    @property
    def num_micro_batches(self) -> float:
        """Return the number of micro-batches of a whole batch on one pipeline."""
        return batch_tokens(self.workload) / self.micro_tokens

    @property
    def layers(self) -> int:
        """Return the number of layers of the fullest stage."""
        return math.ceil(self.model.num_layers / self.part.pp)

    @property
    def memory_bytes(self) -> float:
        """Return the bytes on the fullest device: parameters, gradients, optimizer, reference model, activations."""
        model, workload = self.model, self.workload
        part = self.layers / model.num_layers / self.part.tp
        weights = BF16_BYTES * model.parameters * part
        states = _STATE_BYTES * model.parameters * part
        frozen = weights * workload.reference_model
        if self.part.sharded:
            gathered = 2 * weights / self.layers
            states, frozen = states / self.part.dp, frozen / self.part.dp + gathered
        logits = LOGIT_CHUNK_TOKENS * model.vocab_size * (4 + 4) / self.part.tp
        return states + frozen + self._activation_bytes() + logits

    def _activation_bytes(self) -> float:
        """Return the bytes kept for the backward pass, over ``tp`` by sequence parallelism (arXiv 2205.05198)."""
        model = self.model
        layer = BF16_BYTES * (4 * model.hidden + 2 * model.query_width + model.kv_width + 3 * model.ffn_width)
        kept = BF16_BYTES * model.hidden if self.part.recompute else layer
        in_flight = min(self.part.pp, max(1.0, self.num_micro_batches / self.part.dp))
        return self.micro_tokens / self.part.tp * (kept * self.layers * in_flight + layer * self.part.recompute)

    def fits(self) -> bool:
        return self.memory_bytes <= self.device.efficiency.memory * self.device.hbm_bytes

    @cached_property
    def cost(self) -> PartCost:
        """Return the time of a step.

        A pipeline of m micro-batches takes ``(m - 1)`` of its slowest stage and once through all: its filling does not
        depend on the share. Gathered weights hide behind compute if they can, reduced gradients behind the last
        micro-batch.
        """
        device, reached = self.device, self.device.efficiency
        stages = self.layers * self.part.pp / self.model.num_layers
        flops = step_flops(self.model, self.workload, self.part.recompute) * stages
        compute_s = flops / (self.part.tp * self.part.pp * device.flops * reached.train)
        reduces = 4 + 2 * self.part.recompute + 2 * extra_passes(self.workload)
        hidden = self.micro_tokens * self.model.hidden * BF16_BYTES
        micro_reduce_s = reduces * self.layers * all_reduce_s(hidden, self.part.tp, device.link, reached.link)
        micro_s = compute_s / self.num_micro_batches + micro_reduce_s
        gather_s, reduce_s = self._exchange_s()
        micro_s = max(micro_s, gather_s)
        ramp_s = (self.part.pp - 1) * (micro_s + 2 * transfer_s(hidden, self.stage_link, reached.link))
        return PartCost(
            part=self.part,
            batch_s=max(1.0, self.num_micro_batches / self.part.dp) * micro_s,
            fixed_s=ramp_s + max(0.0, reduce_s - micro_s) + self._optimizer_s(),
        )

    def _exchange_s(self) -> tuple[float, float]:
        """Return the data-parallel traffic in seconds: of each micro-batch (weights gathered twice and gradients
        scattered, if sharded), and of each step (gradients reduced, if not)."""
        device = self.device
        if self.part.dp == 1:
            return 0.0, 0.0
        size: float = BF16_BYTES * self.model.parameters
        if self.part.dp * self.part.tp * self.part.pp <= device.node_size:
            link, size = device.link, size / (self.part.tp * self.part.pp)
        else:  # all shards of a node share its network
            link, size = self.ring_link, size * min(1.0, device.node_size / (self.part.tp * self.part.pp))
        once_s = (self.part.dp - 1) / self.part.dp * size / (link.bytes_per_s * device.efficiency.link) + link.latency_s
        gathers = 3 + extra_passes(self.workload)
        return (gathers * once_s, 0.0) if self.part.sharded else (0.0, 2 * once_s)

    def _optimizer_s(self) -> float:
        """Return the time in which the optimizer state is read and written once."""
        size = 2 * _STATE_BYTES * self.model.parameters
        shards = self.part.tp * self.part.pp * (self.part.dp if self.part.sharded else 1)
        return size / shards / (self.device.hbm_bytes_per_s * self.device.efficiency.bandwidth)


def trainer_costs(
    model: ModelShape,
    workload: WorkloadSpec,
    device: Device,
    part: TrainingPart,
    *,
    ring_link: Link | None = None,
    stage_link: Link | None = None,
) -> TrainerCosts:
    """Make the costs of ``part`` on ``device``; links that are not given are taken from phase 1, before placement."""
    inside = part.tp * part.pp <= device.node_size
    return TrainerCosts(
        device=device,
        model=model,
        workload=workload,
        part=part,
        ring_link=ring_link or device.network,
        stage_link=stage_link or (device.link if inside else device.network),
    )


def balanced_shares(costs: tuple[PartCost, ...]) -> tuple[tuple[float, ...], float]:
    """Return the shares with which all parts finish together, and the time they take; a part that would only delay the
    others gets none.

    Example: two parts of ``batch_s`` 20 and 60 and no fixed time get 0.75 and 0.25 of the batch and take 15 s.
    """
    using = list(range(len(costs)))
    while True:
        speed = sum(1 / costs[i].batch_s for i in using)
        step_s = (1 + sum(costs[i].fixed_s / costs[i].batch_s for i in using)) / speed
        late = [i for i in using if costs[i].fixed_s >= step_s]
        if not late:
            shares = tuple((step_s - c.fixed_s) / c.batch_s if i in using else 0.0 for i, c in enumerate(costs))
            return shares, step_s
        using.remove(max(late, key=lambda i: costs[i].fixed_s))


def training_plan(
    trainers: tuple[TrainerCosts, ...], *, sync_link: Link | None = None, across: Link | None = None
) -> TrainingPlan:
    """Put parts side by side, each with the share that lets all finish together. Gradients of several types meet in a
    ring over ``across``, by default the narrowest of their networks."""
    shares, step_s = balanced_shares(tuple(t.cost for t in trainers))
    step_s += _across_s(trainers, across)
    parts = tuple(replace(t.part, share=share) for t, share in zip(trainers, shares, strict=True))
    slowest = min(trainers, key=lambda t: t.device.network.bytes_per_s)
    sync_s = weight_update_s(slowest.model, slowest.workload, slowest.device, sync_link or slowest.device.network)
    return TrainingPlan(parts=parts, step_s=step_s, sync_s=sync_s)


def _across_s(trainers: Sequence[TrainerCosts], link: Link | None) -> float:
    """Return the time in which gradients, reduced within each part, go once more around a ring of the parts."""
    size = BF16_BYTES * trainers[0].model.parameters
    used = link or narrowest(t.device.network for t in trainers)
    assert used is not None
    return all_reduce_s(size, len(trainers), used, min(t.device.efficiency.link for t in trainers))
