"""Tokens drawn from logits, with noise that depends on (seed, response position) alone.

One uniform number per token, from a counter-based hash, is put through the inverse of the cumulative
distribution. So what a sample draws does not depend on who else is in the batch, on being parked or on order.

The log-prob reported is that of the distribution sampled from: ``log_softmax(logits / temperature)`` over the
full vocabulary, in float32; renormalised over the tokens left when top-k or top-p cut some off (top-k
first, as everywhere); at temperature 0, which is greedy, ``log_softmax(logits)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser (Steele, Lea & Flood, OOPSLA 2014): every input bit flips half of the
    output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in ``(0, 1)`` for each (seed, position); seeds are taken modulo 2**64."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Token ids ``[B]`` (int64) and their log-probs ``[B]`` (float32)."""
    logits_BV = logits_BV.float()
    temperatures = np.array([p.temperature or 1.0 for p in params], dtype=np.float32)
    if (temperatures != 1.0).any():
        logits_BV = logits_BV / torch.from_numpy(temperatures).to(logits_BV.device).unsqueeze(1)
    cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
    if cut:
        logits_BV = logits_BV.index_copy(
            0,
            torch.tensor(cut, device=logits_BV.device),
            _truncated(logits_BV[cut], [params[i] for i in cut]),
        )
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        tokens_B = logits_BV.argmax(-1)
    else:
        tokens_B = _inverse_cdf(logprobs_BV, uniforms_B)
        if any(greedy):
            mask_B = torch.tensor(greedy, device=logits_BV.device)
            tokens_B = torch.where(mask_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def _inverse_cdf(logprobs_BV: Tensor, uniforms_B: NDArray[np.float64]) -> Tensor:
    cdf_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    target_B1 = torch.from_numpy(uniforms_B).to(cdf_BV.device).unsqueeze(1) * cdf_BV[:, -1:]
    tokens_B = torch.searchsorted(cdf_BV, target_B1, right=True).squeeze(1)
    return tokens_B.clamp_(max=cdf_BV.shape[1] - 1)  # past the end only when a logit is not a number


def _truncated(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """``logits`` with minus infinity at the tokens that top-k and then top-p leave out; the best one
    stays."""
    vocab = logits_BV.shape[1]
    device = logits_BV.device
    top_k_B1 = torch.tensor([min(p.top_k, vocab) or vocab for p in params], device=device).unsqueeze(1)
    top_p_B1 = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    sorted_BV = sorted_BV.masked_fill(torch.arange(vocab, device=device) >= top_k_B1, -torch.inf)
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    before_BV = probs_BV.cumsum(-1, dtype=torch.float64) - probs_BV
    out_BV = sorted_BV.masked_fill((before_BV >= top_p_B1) & (top_p_B1 < 1), -torch.inf)
    return torch.empty_like(out_BV).scatter_(1, order_BV, out_BV)
