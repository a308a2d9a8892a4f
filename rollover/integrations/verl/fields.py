"""Trajectories in the form that verl's trainer reads: keys, fields and tags of its TransferQueue, and inputs of its
rewards.

The names come from the ``AgentLoopWorkerTQ`` of verl 0.9.0 and 0.9.1; torch and verl are imported by the functions
that need them.
"""

from __future__ import annotations

from typing import Any

from rollover.integrations.verl.rows import Row
from rollover.types import Trajectory

_NOT_STORED = ("multi_modal_data", "__rollout_n__", "__do_sample__")


def key(row: Row, place: int) -> str:
    """Return verl's key of a trajectory: the prompt's uid, its place among the siblings, and 0 for its only turn.

    Example: ``key({"uid": "ab"}, 3)`` is ``"ab_3_0"``.
    """
    return f"{row['uid']}_{place}_0"


def fields(trajectory: Trajectory, row: Row, *, first_step: int, reward: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields that verl stores for a trajectory. Tensors have one dimension: prompt, response or both.

    Args:
        first_step: verl's number of the training step that version 0 of this run belongs to.
        reward: verl's ``reward_score`` and ``reward_extra_info``; ``None`` if its trainer computes them.
    """
    import torch

    prompts = torch.tensor(trajectory.prompt.token_ids, dtype=torch.int64)
    responses = torch.tensor(trajectory.token_ids, dtype=torch.int64)
    mask = torch.ones_like(responses)
    extra: dict[str, Any] = {"turn_scores": [], "tool_rewards": [], **_steps(trajectory, first_step)}
    found: dict[str, Any] = {
        **{name: value for name, value in row.items() if name not in _NOT_STORED},
        "session_id": trajectory.sample_id.index,
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses), dtype=torch.int64),
        "rollout_log_probs": torch.tensor(trajectory.rollout_logprobs, dtype=torch.float32),
        "multi_modal_inputs": {},
        "num_turns": 2,
        "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1},
        "extra_fields": extra,
    }
    if reward is not None:
        scores = torch.zeros_like(responses, dtype=torch.float32)
        scores[-1] = reward["reward_score"]
        found["rm_scores"] = scores
        extra["reward_extra_info"] = reward["reward_extra_info"]
    return found


def tag(trajectory: Trajectory, row: Row, *, first_step: int) -> dict[str, Any]:
    """Return the tag with which verl's buffer describes a trajectory.

    Args:
        first_step: verl's number of the training step that version 0 of this run belongs to.
    """
    num_prompt, num_response = len(trajectory.prompt.token_ids), trajectory.num_tokens
    return {
        "status": "success",
        "prompt_len": num_prompt,
        "response_len": num_response,
        "seq_len": num_prompt + num_response,
        "global_steps": row["global_steps"],
        **_steps(trajectory, first_step),
    }


def _steps(trajectory: Trajectory, first_step: int) -> dict[str, int]:
    versions = [s.policy_version for s in trajectory.segments if s.token_ids] or [0]
    return {"min_global_steps": first_step + min(versions), "max_global_steps": first_step + max(versions)}


def reward_input(trajectory: Trajectory, row: Row) -> Any:
    """Return the ``DataProto`` of one trajectory for verl's reward workers."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.protocol import DataProto

    prompts = torch.tensor([trajectory.prompt.token_ids], dtype=torch.int64)
    responses = torch.tensor([trajectory.token_ids], dtype=torch.int64)
    input_ids = torch.cat([prompts, responses], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.ones_like(input_ids),
        "input_ids": input_ids,
        "position_ids": torch.arange(input_ids.size(1)).unsqueeze(0),
    }
    others = {
        **row,
        "__num_turns__": 2,
        "tool_extra_fields": {},
        "prompt_len": prompts.size(1),
        "response_len": responses.size(1),
    }
    columns = {}
    for name, value in others.items():
        column = np.empty(1, dtype=object)
        column[0] = value
        columns[name] = column
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=columns)
