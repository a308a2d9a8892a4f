"""What rollout, training and weight updates cost in time and memory.

Every time is a specified figure of a device or link times an efficiency of the catalogue; nothing else is fitted.
Notation: P parameters, L layers, q the query width, kappa cache bytes per token. All formulas are sums over tokens of a
decoder-only transformer: 2 FLOPs per multiplied parameter and 4 L q per token of context in a forward pass, three times
that for forward and backward (arXiv 2205.05198).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollover.devices.records import (
    Device,
    LengthBucket,
    Link,
    Mixture,
    ModelShape,
    PartChoice,
    ReplicaKind,
    TrainingPart,
    TrainingPlan,
    WorkloadSpec,
)

BF16_BYTES = 2
"""Of a weight, a gradient or an activation."""
LOGIT_CHUNK_TOKENS = 1024
"""Logits are computed and differentiated in pieces of so many tokens."""
_OPTIMIZER_BYTES = {"adamw": 12, "adamw8bit": 6, "sgd": 4}
"""Per parameter, beside bf16 weights and gradients: fp32 master weights and two moments of 4 or 1 bytes, or none."""


# --- Rollout ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCosts:
    """An engine of ``tp * pp`` devices."""

    device: Device
    model: ModelShape
    workload: WorkloadSpec
    tp: int
    pp: int
    stage_link: Link
    """Between its pipeline stages."""

    @property
    def kv_room(self) -> float:
        """Bytes for caches: what weights leave; below zero where not even they fit."""
        device = self.device
        weights = self.workload.rollout_weight_bytes * self.model.parameters
        return self.tp * self.pp * device.efficiency.memory * device.hbm_bytes - weights

    @property
    def kv_bytes_per_token(self) -> float:
        """kappa; tensor parallelism beyond the number of cached heads repeats them."""
        model = self.model
        repeats = self.tp / min(self.tp, model.kv_heads)
        return model.num_layers * model.kv_width * self.workload.kv_bytes * repeats

    def held_bytes(self, response_tokens: float) -> float:
        """Cache of a sample, mean over its life; siblings share their prompt."""
        return self.kv_bytes_per_token * (self.workload.prompt_tokens / self.workload.group_size + response_tokens / 2)

    def step_s(self, batch: float, context: float) -> float:
        """Time of a decoding iteration: each of ``batch`` samples with ``context`` tokens gets one more.

        With pipeline stages ``batch / pp`` samples are in each at a time, and each micro-batch reads the weights anew:
        stages buy memory, not speed.
        """
        device, model, reached = self.device, self.model, self.device.efficiency
        stage_batch = max(1.0, batch / self.pp)
        read = self.workload.rollout_weight_bytes * read_parameters(model, stage_batch)
        read += stage_batch * self.kv_bytes_per_token * context
        flops = stage_batch * forward_flops(model, 1, context)
        memory_s = read / (self.tp * device.hbm_bytes_per_s * reached.bandwidth)
        compute_s = flops / (self.tp * device.flops * reached.decode)
        hidden = stage_batch * model.hidden * BF16_BYTES
        reduce_s = 2 * model.num_layers * all_reduce_s(hidden, self.tp, device.link, reached.link)
        hand_over_s = (self.pp - 1) * transfer_s(hidden, self.stage_link, reached.link)
        return max(memory_s, compute_s) + reduce_s + hand_over_s + reached.step_s

    def prefill_s(self, tokens: float) -> float:
        """Time in which the replica prefills a sequence of ``tokens``."""
        flops = forward_flops(self.model, tokens, tokens / 2)
        return flops / (self.tp * self.pp * self.device.flops * self.device.efficiency.prefill)

    def batch(self, bucket: LengthBucket, cap: int) -> int:
        """Samples of a bucket decoded at once."""
        return min(cap, int(self.kv_room / self.held_bytes(bucket.tokens)))

    def fits(self) -> bool:
        """Whether the longest sample of all has room."""
        longest = self.workload.prompt_tokens + max(b.max_tokens for b in self.workload.buckets)
        return self.kv_room >= self.kv_bytes_per_token * longest


def replica(
    model: ModelShape, workload: WorkloadSpec, device: Device, tp: int, pp: int, stage_link: Link | None = None
) -> ReplicaCosts:
    """An engine; without a ``stage_link``, stages that one node cannot hold are joined by the network."""
    link = stage_link or (device.link if tp * pp <= device.node_size else device.network)
    return ReplicaCosts(device=device, model=model, workload=workload, tp=tp, pp=pp, stage_link=link)


def replica_kind(engine: ReplicaCosts, batch_cap: int, sync_link: Link | None = None) -> ReplicaKind:
    """Rates and latencies of an engine at a batch cap. Weights reach it over ``sync_link``: its node's network.

    A sample costs the engine ``tokens * step / batch`` and its part of the prompt's prefill; ``batch`` samples at a
    time, it is there for ``batch`` times as long (Little's law).
    """
    workload, buckets = engine.workload, engine.workload.buckets
    batches = [engine.batch(bucket, batch_cap) for bucket in buckets]
    contexts = [workload.prompt_tokens + bucket.tokens / 2 for bucket in buckets]
    prompt_s = engine.prefill_s(workload.prompt_tokens) / workload.group_size
    costs_s = [
        bucket.tokens * engine.step_s(batch, context) / batch + prompt_s
        for bucket, batch, context in zip(buckets, batches, contexts, strict=True)
    ]
    running_s = [batch * cost for batch, cost in zip(batches, costs_s, strict=True)]
    away_s = workload.reward_s + workload.held_s
    load_s = update_s(engine.model, workload, engine.device, sync_link or engine.device.network)
    redone = [
        0.0 if workload.keeps_kv else batch * engine.prefill_s(context)
        for batch, context in zip(batches, contexts, strict=True)
    ]

    def latencies(tokens: Iterable[float]) -> tuple[float, ...]:
        return tuple(s * n / b.tokens + away_s for s, n, b in zip(running_s, tokens, buckets, strict=True))

    return ReplicaKind(
        device=engine.device.name,
        tp=engine.tp,
        pp=engine.pp,
        batch_cap=batch_cap,
        rates=tuple(1 / cost for cost in costs_s),
        latencies_s=latencies(bucket.tokens for bucket in buckets),
        group_latencies_s=latencies(bucket.group_tokens for bucket in buckets),
        batch_latencies_s=latencies(bucket.batch_tokens for bucket in buckets),
        max_latencies_s=latencies(bucket.max_tokens for bucket in buckets),
        kv_bytes=engine.kv_room,
        kv_byte_s=tuple(
            engine.held_bytes(bucket.tokens) * (s + workload.held_s)
            for s, bucket in zip(running_s, buckets, strict=True)
        ),
        updates_s=tuple(load_s + s for s in redone),
    )


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """Time of a training part: ``share * batch_s + fixed_s``."""

    batch_s: float
    """For a whole batch: compute, tensor-parallel traffic, gathered weights."""
    fixed_s: float
    """Whatever its share: filling the pipeline, reducing gradients, the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCosts:
    """Pipelines of one device type; its ``share`` of the batch does not enter its costs."""

    device: Device
    model: ModelShape
    workload: WorkloadSpec
    dp: int
    tp: int
    pp: int
    sharded: bool
    recompute: bool
    ring_link: Link
    """Between nodes whose gradients are reduced; the narrowest counts."""
    stage_link: Link
    """Between its pipeline stages."""

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch: the longest sequence must fit; shorter ones are packed."""
        return longest_tokens(self.workload)

    @property
    def num_micro_batches(self) -> float:
        """Of a whole batch on one pipeline."""
        return batch_tokens(self.workload) / self.micro_tokens

    @property
    def layers(self) -> int:
        """Of the fullest stage."""
        return math.ceil(self.model.num_layers / self.pp)

    @property
    def memory_bytes(self) -> float:
        """On the fullest device: parameters with gradients and optimizer state, the reference model, activations."""
        model, workload = self.model, self.workload
        part = self.layers / model.num_layers / self.tp
        weights = BF16_BYTES * model.parameters * part
        states = (2 * BF16_BYTES + _OPTIMIZER_BYTES[workload.optimizer]) * model.parameters * part
        frozen = weights * workload.reference_model
        if self.sharded:
            gathered = 2 * weights / self.layers
            states, frozen = states / self.dp, frozen / self.dp + gathered
        logits = LOGIT_CHUNK_TOKENS * model.vocab_size * (4 + 4) / self.tp
        return states + frozen + self._activation_bytes() + logits

    def _activation_bytes(self) -> float:
        """Kept for the backward pass, divided over ``tp`` with sequence parallelism (arXiv 2205.05198, section 4)."""
        model = self.model
        layer = BF16_BYTES * (4 * model.hidden + 2 * model.query_width + model.kv_width + 3 * model.ffn_width)
        kept = BF16_BYTES * model.hidden if self.recompute else layer
        in_flight = min(self.pp, max(1.0, self.num_micro_batches / self.dp))
        return self.micro_tokens / self.tp * (kept * self.layers * in_flight + layer * self.recompute)

    def fits(self) -> bool:
        return self.memory_bytes <= self.device.efficiency.memory * self.device.hbm_bytes

    def cost(self) -> PartCost:
        """Time of a step.

        A pipeline of m micro-batches takes ``(m - 1)`` of its slowest stage and once through all: its filling does not
        depend on the share. Gathered weights hide behind compute where they can, reduced gradients behind the last
        micro-batch.
        """
        device, reached = self.device, self.device.efficiency
        stages = self.layers * self.pp / self.model.num_layers
        flops = step_flops(self.model, self.workload, self.recompute) * stages
        compute_s = flops / (self.tp * self.pp * device.flops * reached.train)
        reduces = 4 + 2 * self.recompute + 2 * extra_passes(self.workload)
        hidden = self.micro_tokens * self.model.hidden * BF16_BYTES
        micro_reduce_s = reduces * self.layers * all_reduce_s(hidden, self.tp, device.link, reached.link)
        micro_s = compute_s / self.num_micro_batches + micro_reduce_s
        gather_s, reduce_s = self._exchange_s()
        micro_s = max(micro_s, gather_s)
        ramp_s = (self.pp - 1) * (micro_s + 2 * transfer_s(hidden, self.stage_link, reached.link))
        return PartCost(
            batch_s=max(1.0, self.num_micro_batches / self.dp) * micro_s,
            fixed_s=ramp_s + max(0.0, reduce_s - micro_s) + self._optimizer_s(),
        )

    def _exchange_s(self) -> tuple[float, float]:
        """Data-parallel traffic: of each micro-batch (weights gathered twice and gradients scattered, where sharded),
        and of each step (gradients reduced, where not)."""
        device = self.device
        if self.dp == 1:
            return 0.0, 0.0
        size: float = BF16_BYTES * self.model.parameters
        if self.dp * self.tp * self.pp <= device.node_size:
            link, size = device.link, size / (self.tp * self.pp)
        else:  # all shards of a node share its network
            link, size = self.ring_link, size * min(1.0, device.node_size / (self.tp * self.pp))
        once_s = (self.dp - 1) / self.dp * size / (link.bytes_per_s * device.efficiency.link) + link.latency_s
        gathers = 3 + extra_passes(self.workload)
        return (gathers * once_s, 0.0) if self.sharded else (0.0, 2 * once_s)

    def _optimizer_s(self) -> float:
        """State is read and written once."""
        size = 2 * (2 * BF16_BYTES + _OPTIMIZER_BYTES[self.workload.optimizer]) * self.model.parameters
        shards = self.tp * self.pp * (self.dp if self.sharded else 1)
        return size / shards / (self.device.hbm_bytes_per_s * self.device.efficiency.bandwidth)


def trainer(
    model: ModelShape,
    workload: WorkloadSpec,
    device: Device,
    part: TrainingPart,
    *,
    ring_link: Link | None = None,
    stage_link: Link | None = None,
) -> TrainerCosts:
    """``part`` as it stands on ``device``; links that are not given are those of phase 1, before placement."""
    inside = part.tp * part.pp <= device.node_size
    return TrainerCosts(
        device=device,
        model=model,
        workload=workload,
        dp=part.dp,
        tp=part.tp,
        pp=part.pp,
        sharded=part.sharded,
        recompute=part.recompute,
        ring_link=ring_link or device.network,
        stage_link=stage_link or (device.link if inside else device.network),
    )


def balanced(costs: tuple[PartCost, ...]) -> tuple[tuple[float, ...], float]:
    """Shares with which all parts finish together, and when; a part that only delays the others gets none."""
    using = list(range(len(costs)))
    while True:
        speed = sum(1 / costs[i].batch_s for i in using)
        step_s = (1 + sum(costs[i].fixed_s / costs[i].batch_s for i in using)) / speed
        late = [i for i in using if costs[i].fixed_s >= step_s]
        if not late:
            shares = tuple((step_s - c.fixed_s) / c.batch_s if i in using else 0.0 for i, c in enumerate(costs))
            return shares, step_s
        using.remove(max(late, key=lambda i: costs[i].fixed_s))


def training_plan(trainers: tuple[TrainerCosts, ...], sync_link: Link | None = None) -> TrainingPlan:
    """Parts side by side, each with the share that lets all finish together; gradients of several types meet in a ring
    over the narrowest of their links."""
    costs = tuple(t.cost() for t in trainers)
    shares, step_s = balanced(costs)
    if len(trainers) > 1:
        step_s += _across_s(trainers)
    parts = tuple(_part(t, share) for t, share in zip(trainers, shares, strict=True))
    return TrainingPlan(parts=parts, step_s=step_s, sync_s=_sync_s(trainers, sync_link))


def mixture(first: Sequence[TrainerCosts], second: Sequence[TrainerCosts]) -> Mixture:
    """What ``training_plan`` makes of any of the first beside any of the second, all of a type on each side."""
    one = (first[0], second[0])
    return Mixture(
        first=tuple(map(_choice, first)),
        second=tuple(map(_choice, second)),
        across_s=_across_s(one),
        sync_s=_sync_s(one, None),
    )


def _choice(alone: TrainerCosts) -> PartChoice:
    cost = alone.cost()
    return PartChoice(part=_part(alone, 1.0), batch_s=cost.batch_s, fixed_s=cost.fixed_s)


def _part(made: TrainerCosts, share: float) -> TrainingPart:
    return TrainingPart(
        device=made.device.name,
        dp=made.dp,
        tp=made.tp,
        pp=made.pp,
        sharded=made.sharded,
        recompute=made.recompute,
        share=share,
    )


def _sync_s(trainers: Sequence[TrainerCosts], link: Link | None) -> float:
    slowest = min(trainers, key=lambda t: t.device.network.bytes_per_s)
    return update_s(slowest.model, slowest.workload, slowest.device, link or slowest.device.network)


def _across_s(trainers: Sequence[TrainerCosts]) -> float:
    """Gradients of the parts, each reduced within, are summed across: once more around a ring of the parts."""
    size = BF16_BYTES * trainers[0].model.parameters
    narrow = min(t.ring_link.bytes_per_s * t.device.efficiency.link for t in trainers)
    latency_s = max(t.ring_link.latency_s for t in trainers)
    return 2 * (len(trainers) - 1) / len(trainers) * size / narrow + latency_s


# --- Weights, passes and traffic --------------------------------------------------------------------------------------


def update_s(model: ModelShape, workload: WorkloadSpec, device: Device, link: Link) -> float:
    """Exposed time of a weight update: the bytes once over ``link`` (a pipelined broadcast) and the pause."""
    size = workload.rollout_weight_bytes * model.parameters
    return transfer_s(size, link, device.efficiency.link) + workload.pause_s


def read_parameters(model: ModelShape, batch: float) -> float:
    """Parameters read to decode a token of ``batch`` samples: all shared ones and every expert that some sample visits,
    experts being drawn independently."""
    shared = model.parameters - model.expert_parameters - model.embedding_parameters
    if not model.num_experts:
        return shared
    missed = (1 - model.experts_per_token / model.num_experts) ** batch
    return shared + model.expert_parameters * (1 - missed)


def forward_flops(model: ModelShape, tokens: float, context: float) -> float:
    """Of ``tokens`` tokens that each attend to ``context`` others on average."""
    return tokens * (2 * model.multiplied_parameters + 4 * model.num_layers * model.query_width * context)


def step_flops(model: ModelShape, workload: WorkloadSpec, recompute: bool) -> float:
    """Of a training step: forward and backward, activations again where ``recompute``, log-probability passes."""
    lengths = [(bucket.share, workload.prompt_tokens + bucket.tokens) for bucket in workload.buckets]
    forward = workload.batch_size * sum(share * forward_flops(model, n, n / 2) for share, n in lengths)
    return forward * (3 + recompute + extra_passes(workload))


def extra_passes(workload: WorkloadSpec) -> int:
    """Forward passes beside the one that is differentiated."""
    return workload.proximal_pass + workload.reference_model


def batch_tokens(workload: WorkloadSpec) -> float:
    """Tokens of a training step, prompts included."""
    return workload.batch_size * (workload.prompt_tokens + workload.response_tokens)


def longest_tokens(workload: WorkloadSpec) -> float:
    """Of the longest sequence."""
    return workload.prompt_tokens + max(bucket.max_tokens for bucket in workload.buckets)


def all_reduce_s(size: float, ranks: int, link: Link, efficiency: float) -> float:
    """Ring all-reduce of ``size`` bytes."""
    if ranks == 1:
        return 0.0
    return link.latency_s + 2 * (ranks - 1) / ranks * size / (link.bytes_per_s * efficiency)


def transfer_s(size: float, link: Link, efficiency: float) -> float:
    """``size`` bytes from one end of a link to the other."""
    return link.latency_s + size / (link.bytes_per_s * efficiency)
