"""A replica of the cost model as an engine of the simulator."""

from __future__ import annotations

from rollover.devices.costs.rollout import ReplicaCosts
from rollover.sim.scenario import ReplicaModel


def engine_model(replica: ReplicaCosts, *, pause_s: float, max_running: int = 2**31) -> ReplicaModel:
    """Draw the line through two iteration times of ``replica``: of one sample, and of a batch that fills its KV cache
    or meets ``max_running``. New weights stop it for ``pause_s``."""
    workload = replica.workload
    squares = sum(bucket.share * bucket.tokens**2 for bucket in workload.buckets)
    context = workload.prompt_tokens + squares / (2 * workload.response_tokens)  # mean over tokens, not over samples
    kv_tokens = replica.kv_room / replica.kv_bytes_per_token
    batch = max(2, min(max_running, int(kv_tokens / context)))
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
