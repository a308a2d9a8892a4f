"""Tokens, FLOPs and parameters read in one pass through a model."""

from __future__ import annotations

from rollover.devices.records import ModelShape, WorkloadSpec


def read_parameters(model: ModelShape, batch: float) -> float:
    """Return the parameters read by a decoding iteration over ``batch`` samples: the shared ones, and every expert that
    some sample visits, experts being drawn independently."""
    shared = model.parameters - model.expert_parameters - model.embedding_parameters
    if not model.num_experts:
        return shared
    missed = (1 - model.experts_per_token / model.num_experts) ** batch
    return shared + model.expert_parameters * (1 - missed)


def forward_flops(model: ModelShape, tokens: float, context: float) -> float:
    """Return the FLOPs of ``tokens`` tokens that attend to ``context`` others on average."""
    return tokens * (2 * model.multiplied_parameters + 4 * model.num_layers * model.query_width * context)


def step_flops(model: ModelShape, workload: WorkloadSpec, recompute: bool) -> float:
    """Return the FLOPs of a training step, with activations again for ``recompute``, and the log-prob passes."""
    lengths = [(bucket.share, workload.prompt_tokens + bucket.tokens) for bucket in workload.buckets]
    forward = workload.batch_size * sum(share * forward_flops(model, n, n / 2) for share, n in lengths)
    return forward * (3 + recompute + extra_passes(workload))


def extra_passes(workload: WorkloadSpec) -> int:
    """Count the forward passes that are not differentiated."""
    return workload.proximal_pass + workload.reference_model


def batch_tokens(workload: WorkloadSpec) -> float:
    """Count the tokens of a training step, prompts included."""
    return workload.batch_size * (workload.prompt_tokens + workload.response_tokens)


def longest_tokens(workload: WorkloadSpec) -> float:
    """Count the tokens of the longest sequence, its prompt included."""
    longest_prompt = max(workload.prompt_tokens, workload.longest_prompt_tokens)
    return longest_prompt + max(bucket.max_tokens for bucket in workload.buckets)
