"""The input of a policy loss: the trained tokens of one micro-batch, flat, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Response tokens of ``B`` whole samples, concatenated (``T`` tokens). A sample is never split.

    All log-probs follow one convention: float32 ``log_softmax(logits / temperature)`` over the full vocabulary, or over
    the kept set of the token if it was drawn from a part of the vocabulary.

    Example: two samples of one group, of 3 and 2 tokens, have ``sample_T`` of ``(0, 0, 0, 1, 1)`` and ``group_B`` of
    ``(0, 0)``.
    """

    trainer_logprobs_T: Tensor
    """Under the parameters being optimised; carries the gradient."""
    proximal_logprobs_T: Tensor
    """Under the parameters at the start of this training step; constant."""
    rollout_logprobs_T: Tensor
    """Recorded when each token was sampled; constant."""
    ref_logprobs_T: Tensor | None
    """Under the frozen reference policy; ``None`` unless a KL term needs it."""
    advantages_T: Tensor
    loss_mask_T: Tensor
    """1.0 if the token trains, 0.0 if it is masked out (truncated sample, environment token)."""
    staleness_T: Tensor
    """Training step minus the version that sampled the token; int64, at least 0."""
    sample_T: Tensor
    """Index of the sample, among the B, to which each token belongs; int64, non-decreasing."""
    group_B: Tensor
    """Index of the group of the global batch to which each sample belongs; int64."""

    share_B: Tensor | None = None
    """Weight of each sample's mean among the means of its episode, if the turns of episodes may form a tree, of which
    each path counts as a sample; ``None`` if all are 1."""
    is_only_choice_T: Tensor | None = None
    """True if the token's kept set contains no other, so that its log-prob is constant; ``None`` if all were drawn
    from the whole vocabulary."""

    @property
    def num_samples(self) -> int:
        return int(self.group_B.shape[0])

    def sum_per_sample(self, x_T: Tensor) -> Tensor:
        """Return the sum of ``x_T`` over the tokens of each sample, ``[B]``."""
        return torch.zeros(self.num_samples, dtype=x_T.dtype, device=x_T.device).index_add(0, self.sample_T, x_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over the *global* batch of one optimiser step: all micro-batches, all ranks.

    Masked and rejected tokens stay in: they were decoded, and leaving them out would enlarge the step on the rest.

    Example: for two groups with responses of 10 and 20, and of 5 and 5 tokens, ``Denominators(num_tokens=40,
    num_samples=4, num_groups=2, tokens_per_group=(30, 10), max_response_tokens=64)``.
    """

    num_tokens: int
    num_samples: int
    num_groups: int
    tokens_per_group: tuple[int, ...]
    """Response tokens of each group, indexed like ``TokenBatch.group_B``."""
    max_response_tokens: int
    """The response budget, constant over the run (Dr.GRPO's divisor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The loss of each token before correction and aggregation, with flags for what the clip did to it."""

    loss_T: Tensor
    ratio_T: Tensor
    low_T: Tensor
    """Below the lower clip. ``ppo_clip``: the token has no gradient. ``cispo``: its weight is capped."""
    high_T: Tensor
    dual_T: Tensor
