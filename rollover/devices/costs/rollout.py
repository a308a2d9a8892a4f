"""Time and memory of decoding and prefill on one replica."""

from __future__ import annotations

from dataclasses import dataclass

from rollover.devices.costs.links import all_reduce_s, transfer_s, weight_update_s
from rollover.devices.costs.passes import forward_flops, longest_tokens, read_parameters
from rollover.devices.costs.records import ReplicaKind
from rollover.devices.records import BF16_BYTES, Device, LengthBucket, Link, ModelShape, WorkloadSpec
from rollover.sim.scenario import ReplicaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCosts:
    """Time and memory of one replica: an engine on ``tp * pp`` devices.

    Example: a 7B model in bf16 on one H100 leaves about 0.9 * 85.5 - 15 = 62 GB for the KV cache.
    """

    device: Device
    model: ModelShape
    workload: WorkloadSpec
    tp: int
    pp: int
    stage_link: Link
    """Link that joins its pipeline stages."""

    @property
    def kv_room(self) -> float:
        """Return the bytes left for the KV cache; below zero if not even the weights fit."""
        device = self.device
        weights = self.workload.rollout_weight_bytes * self.model.parameters
        return self.tp * self.pp * device.efficiency.memory * device.hbm_bytes - weights

    @property
    def kv_bytes_per_token(self) -> float:
        """Return the bytes of KV cache per token; tensor parallelism beyond the number of KV heads repeats them."""
        model = self.model
        repeats = self.tp / min(self.tp, model.kv_heads)
        return model.num_layers * model.kv_width * self.workload.kv_bytes * repeats

    def held_bytes(self, response_tokens: float) -> float:
        """Return the mean KV cache of a sample over its life; siblings share their prompt."""
        return self.kv_bytes_per_token * (self.workload.prompt_tokens / self.workload.group_size + response_tokens / 2)

    def step_s(self, batch: float, context: float) -> float:
        """Return the time of a decoding iteration, in which each of ``batch`` samples of ``context`` tokens gets one
        more.

        With pipeline stages ``batch / pp`` samples are in each at a time, and each micro-batch reads the weights again:
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
        """Return the time in which the replica prefills a sequence of ``tokens``."""
        flops = forward_flops(self.model, tokens, tokens / 2)
        return flops / (self.tp * self.pp * self.device.flops * self.device.efficiency.prefill)

    def batch(self, bucket: LengthBucket, cap: int) -> int:
        """Return the number of samples of a bucket that are decoded at once."""
        return min(cap, int(self.kv_room / self.held_bytes(bucket.tokens)))

    def fits(self) -> bool:
        """Return True if the longest sample of all has room."""
        return self.kv_room >= self.kv_bytes_per_token * longest_tokens(self.workload)


def replica_costs(
    model: ModelShape, workload: WorkloadSpec, device: Device, tp: int, pp: int, stage_link: Link | None = None
) -> ReplicaCosts:
    """Make the costs of a replica. Without ``stage_link``, stages beyond one node are joined by the network."""
    link = stage_link or (device.link if tp * pp <= device.node_size else device.network)
    return ReplicaCosts(device=device, model=model, workload=workload, tp=tp, pp=pp, stage_link=link)


def replica_kind(engine: ReplicaCosts, batch_cap: int, sync_link: Link | None = None) -> ReplicaKind:
    """Make the rate and latencies of a replica at a batch cap. Weights reach it over ``sync_link``, by default its
    node's network.

    A sample costs the replica ``tokens * step / batch`` and its part of the prompt's prefill. With ``batch`` samples at
    a time, each of them stays for ``batch`` times as long (Little's law). Costs are means over the length buckets,
    weighted by who meets them: samples, or the longest of groups and batches.
    """
    workload = engine.workload
    prompt_s = engine.prefill_s(workload.prompt_tokens) / workload.group_size
    sample_s = running_s = group_s = batch_s = longest_s = kv_byte_s = redone_s2 = 0.0
    for bucket in workload.buckets:
        batch, context = engine.batch(bucket, batch_cap), workload.prompt_tokens + bucket.tokens / 2
        alone_s = bucket.tokens * engine.step_s(batch, context) / batch + prompt_s
        stays_s = batch * alone_s
        sample_s += bucket.share * alone_s
        running_s += bucket.share * stays_s
        group_s += bucket.group_share * stays_s * bucket.group_tokens / bucket.tokens
        batch_s += bucket.batch_share * stays_s * bucket.batch_tokens / bucket.tokens
        longest_s = stays_s * bucket.max_tokens / bucket.tokens  # of the last bucket
        kv_byte_s += bucket.share * engine.held_bytes(bucket.tokens) * (stays_s + workload.held_s)
        # What runs at an update is what takes long: buckets weigh by the time they occupy the replica.
        redone_s2 += bucket.share * alone_s * (0.0 if workload.keeps_kv else batch * engine.prefill_s(context))
    away_s = workload.reward_s + workload.held_s
    load_s = weight_update_s(engine.model, workload, engine.device, sync_link or engine.device.network)
    return ReplicaKind(
        device=engine.device.name,
        tp=engine.tp,
        pp=engine.pp,
        batch_cap=batch_cap,
        rate=1 / sample_s,
        latency_s=running_s + away_s,
        group_latency_s=group_s + away_s,
        batch_latency_s=batch_s + away_s,
        max_latency_s=longest_s + away_s,
        kv_bytes=engine.kv_room,
        kv_byte_s=kv_byte_s,
        update_s=load_s + redone_s2 / sample_s,
    )


def engine_model(replica: ReplicaCosts, *, pause_s: float, max_running: int = 2**31) -> ReplicaModel:
    """Draw the line through two iteration times of ``replica``: of one sample, and of a batch that fills its KV cache
    or meets ``max_running``, but is more than one sample per stage. New weights stop it for ``pause_s``."""
    workload = replica.workload
    squares = sum(bucket.share * bucket.tokens**2 for bucket in workload.buckets)
    context = workload.prompt_tokens + squares / (2 * workload.response_tokens)  # mean over tokens, not over samples
    kv_tokens = replica.kv_room / replica.kv_bytes_per_token
    batch = max(replica.pp + 1, min(max_running, int(kv_tokens / context)))
    alone_s, full_s = replica.step_s(1, context), replica.step_s(batch, context)
    slope_s = (full_s - alone_s) / (batch - 1)
    return ReplicaModel(
        c0_s=alone_s - slope_s,
        b0=(alone_s - slope_s) / slope_s,
        prefill_tokens_per_s=context / replica.prefill_s(context),
        kv_tokens=kv_tokens,
        swap_pause_s=pause_s,
        max_running=max_running,
    )
