"""The settings of a run that a plan determines."""

from __future__ import annotations

import math
from typing import Any

from rollover.devices.costs.passes import longest_tokens
from rollover.planner.plan import Plan


def rollout_settings(plan: Plan) -> dict[str, Any]:
    """Return the size of a step and how far rollout may run ahead.

    Example: ``{"strategy": "sync", "rollout_batch_size": 128, "group_size": 8, "max_new_tokens": 16384}`` of a plan
    with ``max_staleness=0``.
    """
    workload, staleness = plan.workload, plan.problem.max_staleness
    return {
        "strategy": "bounded_async" if staleness else "sync",
        "rollout_batch_size": workload.num_groups,
        "group_size": workload.group_size,
        "max_new_tokens": max(bucket.max_tokens for bucket in workload.buckets),
        **({"max_staleness": staleness} if staleness else {}),
    }


def engine_settings(plan: Plan) -> dict[str, Any]:
    """Return what engines do with their caches at a weight update, where the plan counts on keeping them."""
    return {"kv_on_update": "keep"} if plan.workload.keeps_kv else {}


def trainer_settings(plan: Plan) -> dict[str, Any]:
    """Return how passes run in the time and the memory that ``devices.costs.training`` works out: in bfloat16, over as
    many tokens as the longest sequence has, with or without recomputing activations.

    Example: ``{"dtype": "bfloat16", "micro_batch_tokens": 16640, "gradient_checkpointing": True}`` of a plan that
    recomputes them, for prompts of 256 tokens on average and responses of up to 16,384.
    """
    return {
        "dtype": "bfloat16",
        "micro_batch_tokens": math.ceil(longest_tokens(plan.workload)),
        "gradient_checkpointing": any(part.recompute for part in plan.solution.plan.parts),
    }
