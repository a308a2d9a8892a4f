"""Small batches for the algorithm tests, float64 throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from rollover.algorithms import Algorithm, AlgorithmConfig, resolve
from rollover.algorithms.batch import Denominators, TokenBatch
from rollover.algorithms.losses import policy_loss


def row(name: str, **columns: object) -> Algorithm:
    return resolve(AlgorithmConfig(name=name, **columns))  # type: ignore[arg-type]


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def worked_batch(advantages: Sequence[float] = (1, 1, -1)) -> TokenBatch:
    """Two samples of one group, of two tokens and one. Ratios to the proximal policy (1.5, 0.9, 0.7),
    importance weights (1, 3, 0.5), log-ratios to the reference (0.1, 0.2, -0.3)."""
    proximal_T = f64(-1.0, -2.0, -0.5)
    trainer_T = proximal_T + f64(1.5, 0.9, 0.7).log()
    return TokenBatch(
        trainer_logprobs_T=trainer_T.clone().requires_grad_(),
        proximal_logprobs_T=proximal_T,
        rollout_logprobs_T=proximal_T - f64(1.0, 3.0, 0.5).log(),
        ref_logprobs_T=trainer_T - f64(0.1, 0.2, -0.3),
        advantages_T=f64(*advantages),
        loss_mask_T=f64(1, 1, 1),
        staleness_T=torch.tensor([0, 1, 1]),
        sample_T=torch.tensor([0, 0, 1]),
        group_B=torch.tensor([0, 0]),
    )


WORKED = Denominators(num_tokens=3, num_samples=2, num_groups=1, tokens_per_group=(3,), max_response_tokens=4)


def random_batch(seed: int, lengths: Sequence[int] = (3, 1, 4, 2, 5, 2), num_groups: int = 2) -> TokenBatch:
    """Ratios and weights on both sides of every default bound, one masked sample when there are three."""
    g = torch.Generator().manual_seed(seed)
    num_samples, num_tokens = len(lengths), sum(lengths)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_tokens, generator=g, dtype=torch.float64)

    sample_T = torch.repeat_interleave(torch.arange(num_samples), torch.tensor(lengths))
    proximal_T = -2 + normal(0.5)
    trainer_T = proximal_T + normal(0.3)
    mask_B = torch.ones(num_samples, dtype=torch.float64)
    if num_samples >= 3:
        mask_B[1] = 0
    return TokenBatch(
        trainer_logprobs_T=trainer_T.requires_grad_(),
        proximal_logprobs_T=proximal_T,
        rollout_logprobs_T=proximal_T + normal(0.7),
        ref_logprobs_T=trainer_T.detach() + normal(0.4),
        advantages_T=torch.randn(num_samples, generator=g, dtype=torch.float64)[sample_T],
        loss_mask_T=mask_B[sample_T],
        staleness_T=torch.randint(0, 5, (num_tokens,), generator=g),
        sample_T=sample_T,
        group_B=torch.arange(num_samples) % num_groups,
    )


def token_batch(trainer_logprobs_T: Tensor, sample_T: Tensor, group_B: Tensor, **others: Tensor) -> TokenBatch:
    """Trained and fresh tokens, whose log-probs are the same under all policies unless ``others`` says more."""
    now_T = trainer_logprobs_T.detach()
    plain = {
        "proximal_logprobs_T": now_T,
        "rollout_logprobs_T": now_T,
        "loss_mask_T": torch.ones_like(now_T),
        "staleness_T": torch.zeros_like(sample_T),
    }
    return TokenBatch(
        trainer_logprobs_T=trainer_logprobs_T,
        ref_logprobs_T=None,
        sample_T=sample_T,
        group_B=group_B,
        **{**plain, **others},
    )


def denominators(tokens: TokenBatch, *, max_response_tokens: int = 8) -> Denominators:
    group_T = tokens.group_B[tokens.sample_T]
    num_groups = int(tokens.group_B.max()) + 1
    return Denominators(
        num_tokens=len(tokens.sample_T),
        num_samples=tokens.num_samples,
        num_groups=num_groups,
        tokens_per_group=tuple(torch.bincount(group_T, minlength=num_groups).tolist()),
        max_response_tokens=max_response_tokens,
    )


def take(tokens: TokenBatch, samples: Sequence[int]) -> tuple[TokenBatch, Tensor]:
    """The micro-batch of these samples, in this order, and the places of its tokens in the whole."""
    places = torch.cat([(tokens.sample_T == i).nonzero().flatten() for i in samples])
    renamed = {old: new for new, old in enumerate(samples)}
    changes = {
        f.name: value[places]
        for f in fields(TokenBatch)
        if f.name.endswith("_T") and (value := getattr(tokens, f.name)) is not None
    }
    changes["sample_T"] = torch.tensor([renamed[int(i)] for i in tokens.sample_T[places]])
    changes["trainer_logprobs_T"] = tokens.trainer_logprobs_T.detach()[places].requires_grad_()
    return replace(tokens, group_B=tokens.group_B[list(samples)], **changes), places


def gradient(algorithm: Algorithm, tokens: TokenBatch, counts: Denominators) -> Tensor:
    """[T]: of the loss with respect to each token's log-prob."""
    loss, _ = policy_loss(algorithm, tokens, counts)
    return torch.autograd.grad(loss, tokens.trainer_logprobs_T)[0]
