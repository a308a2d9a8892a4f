"""slime's samples as our prompts, and our trajectories as slime's samples.

Invariants: a sample's tokens, log-probs and loss mask are appended together, segment by segment, with slime's
own method if it has one, and with the label of the weights that sampled each; a group always has all of its samples; a
failed one does not change the mean of its siblings' rewards and trains nothing.

slime normalises the rewards of a group itself. A failed sample counted as 0 would lower the mean of its siblings; with
their mean as its reward it leaves that unchanged, and ``remove_sample`` takes it out of the loss. The standard
deviation that slime divides by shrinks: with k of n samples scored, by sqrt((k - 1) / (n - 1)), 7 % for one of eight.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollover.errors import DataError
from rollover.integrations.slime.host import Sample
from rollover.types import FinishReason, Prompt, Trajectory

_MADE_HERE = frozenset(
    {
        *("group_index", "index", "tokens", "response", "response_length", "reward", "loss_mask", "weight_versions"),
        *("rollout_log_probs", "status", "spec_info", "prefix_cache_info", "session_id", "remove_sample"),
    }
)
"""Fields of a sample that a rollout fills; the others belong to its prompt."""
_OF_IMAGES = ("multimodal_inputs", "multimodal_train_inputs")
_STATUS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort", None: "abort"}
"""The finish reason in SGLang's terms, from which slime derives a status."""


def prompt_of(group: Sequence[Sample], number: int, encode: Callable[[str], Sequence[int]]) -> Prompt:
    """Return the prompt of a group from slime's data source, with everything needed to build its samples again. Raises
    ``DataError`` if the samples contain images, already have a response, or have values that JSON cannot hold; the
    message names the group.

    Args:
        number: how many groups were drawn before.
        encode: returns the ids of a text, without special tokens.
    """
    name = f"group {group[0].group_index} of the data source"
    for sample in group:
        if any(getattr(sample, field, None) for field in _OF_IMAGES):
            raise DataError(f"{name} has images or other media, and Rollover's rollout function takes text only")
        if sample.response_length or sample.status.value != "pending":
            raise DataError(
                f"{name} has a response already: groups that another rollout function has left in the buffer cannot be"
                " resumed; start with an empty buffer"
            )
    first = group[0]
    if not isinstance(first.prompt, str):
        raise DataError(f"{name} is a list of messages: set --apply-chat-template")
    templates = [_template(sample, name) for sample in group]
    same = all(template == templates[0] for template in templates)
    return Prompt(
        prompt_id=f"slime/{number}@0",
        token_ids=tuple(first.tokens or encode(first.prompt)),
        text=first.prompt,
        source="slime",
        columns={
            "group_index": first.group_index,
            "indices": [sample.index for sample in group],
            "samples": templates[:1] if same else templates,
        },
    )


def _template(sample: Sample, name: str) -> dict[str, Any]:
    """Return the fields of a sample that differ from a new sample's and that no rollout fills."""
    fresh, template = type(sample)(), {}
    for field in dataclasses.fields(sample):
        value = getattr(sample, field.name)
        if field.name not in _MADE_HERE and value != getattr(fresh, field.name):
            template[field.name] = value
    try:
        if json.loads(json.dumps(template)) == template:
            return template
    except (TypeError, ValueError):
        pass
    raise DataError(
        f"{name}: its samples have fields that cannot be written as JSON, so the journal cannot keep them: {template}"
    )


def new_sample(kind: type[Sample], prompt: Prompt, place: int) -> Sample:
    """Return a sample of ``prompt`` without a response, as the data source provided it.

    Args:
        kind: slime's class.
        place: index among its siblings.
    """
    columns: Mapping[str, Any] = prompt.columns
    templates = columns["samples"]
    template = json.loads(json.dumps(templates[place if len(templates) > 1 else 0]))  # no two share a table
    sample = kind(group_index=columns["group_index"], index=columns["indices"][place], **template)
    sample.tokens = [*prompt.token_ids]
    return sample


def respond(
    sample: Sample,
    trajectory: Trajectory,
    args: Namespace,
    *,
    decode: Callable[[Sequence[int]], str],
    label: Callable[[int], str],
) -> None:
    """Set the response of a new sample to a trajectory's.

    Args:
        decode: returns the text of ids. The whole response is decoded at once, since a character may span two segments.
        label: returns slime's name for the weights of a version.
    """
    for segment in trajectory.segments:
        if segment.token_ids:
            _append(
                sample,
                args,
                tokens=[*segment.token_ids],
                log_probs=[*segment.rollout_logprobs],
                meta_info={
                    "weight_version": label(segment.policy_version),
                    "finish_reason": {"type": _STATUS[segment.finish_reason]},
                },
            )
    end = trajectory.finish_reason
    sample.status = type(sample).Status.TRUNCATED if end is FinishReason.LENGTH else type(sample).Status.COMPLETED
    sample.response = decode(trajectory.token_ids)


def _append(
    sample: Sample, args: Namespace, *, tokens: list[int], log_probs: list[float], meta_info: Mapping[str, Any]
) -> None:
    if hasattr(sample, "append_response_tokens"):
        sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, trainable=True, meta_info=meta_info)
        return
    sample.tokens = [*sample.tokens, *tokens]
    sample.response_length += len(tokens)
    sample.loss_mask = [*(sample.loss_mask or ()), *(1 for _ in tokens)]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or ()), *log_probs]
    if "weight_version" in meta_info:
        sample.weight_versions = [*sample.weight_versions, meta_info["weight_version"]]


def account_for_versions(
    sample: Sample, trajectory: Trajectory, *, version: int, first_rollout: int, masks_stale: bool
) -> None:
    """Record in a sample's metadata which version sampled which of its tokens, and mask stale ones if asked to.

    Args:
        version: the version of the servers in this rollout.
        first_rollout: slime's number of the run's first rollout.
        masks_stale: ``--mask-offpolicy-in-partial-rollout``, applied per token: tokens of older versions are not
            trained.
    """
    spans = [(s.policy_version, len(s.token_ids)) for s in trajectory.segments if s.token_ids]
    oldest = min((v for v, _ in spans), default=version)
    if oldest < version:
        sample.metadata.setdefault("start_rollout_id", first_rollout + oldest)
    sample.metadata["rollover"] = {"versions": spans, "resumes": trajectory.num_resumes}
    if masks_stale:
        mask = [int(v == version) for v, n in spans for _ in range(n)]
        sample.loss_mask = [a & b for a, b in zip(mask, sample.loss_mask or mask, strict=True)]


def account_for_usage(sample: Sample, usage: Mapping[str, int]) -> None:
    """Add the sums over a rollout's calls to one of its samples: slime sums its samples' caches and drafts for
    ``prefix_cache_hit_rate`` and the like, and a response may have many calls, in several rollouts."""
    for info in (getattr(sample, name, None) for name in ("prefix_cache_info", "spec_info")):
        for name in usage.keys() & vars(info).keys() if info is not None else ():
            setattr(info, name, getattr(info, name) + usage[name])


def failed_sample(sample: Sample, siblings: Sequence[Sample], args: Namespace, *, filler: int) -> None:
    """Turn a new sample into a stand-in for a failed one: its reward is the siblings' mean, and its single token is not
    trained.

    Example: if its siblings have the rewards 1, 0 and 1, its reward is 2/3.

    Args:
        siblings: the scored ones, at least one.
        filler: a token id.
    """
    _append(sample, args, tokens=[filler], log_probs=[0.0], meta_info={"finish_reason": {"type": "abort"}})
    mean = statistics.fmean(float(sibling.get_reward_value(args)) for sibling in siblings)
    like = siblings[0].reward
    sample.reward = {**like, args.reward_key: mean} if isinstance(like, dict) else mean
    sample.loss_mask = [0]
    sample.remove_sample = True
    sample.status = type(sample).Status.FAILED
