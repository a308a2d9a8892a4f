"""Draws tokens from logits, with noise that depends on (seed, response position) alone.

One uniform number per token, from a counter-based hash, is put through the inverse of the cumulative
distribution. So what a sample draws does not depend on who else is in the batch, on being parked or on order.

The reported log-prob belongs to the distribution sampled from: ``log_softmax(logits / temperature)`` over the
full vocabulary, in float32; renormalised over the tokens left when top-k, top-p or min-p cut some off (in this
order); at temperature 0, which is greedy, ``log_softmax(logits)``. Of equal logits at the border of top-k or top-p,
the lower token ids stay, so that a kept set never exceeds top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rollover.kept_codec import encode_kept
from rollover.types import SamplingParams

Draw = Callable[[Tensor, NDArray[np.float32], NDArray[np.float64]], tuple[Tensor, Tensor]]
"""``draw_tokens``, or another implementation of it."""


class Drawn(NamedTuple):
    """The tokens drawn for B sequences, with their log-probs."""

    token_ids: list[int]
    logprobs: list[float]
    kept: Sequence[bytes] = ()
    """Kept sets, ``b""`` for a sequence that wants none; empty if none does."""
    routes: Sequence[bytes] = ()
    """Routes of all sequences; empty if none wants one."""


_CHUNK = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BELOW_ONE = 1 - 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return one number in ``(0, 1)`` for each (seed, position); seeds are taken modulo 2**64."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    bits = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the splitmix64 finaliser (Steele, Lea & Flood, OOPSLA 2014): every input bit flips half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64], draw: Draw | None = None
) -> tuple[Tensor, Tensor, Sequence[bytes]]:
    """Draw token ids ``[B]`` (int64), and give them with their log-probs ``[B]`` (float32) and the kept sets that are
    wanted (see ``Drawn``)."""
    logits_BV = logits_BV.float()
    temperatures = np.array([p.temperature for p in params], dtype=np.float32)
    kept: Sequence[bytes] = ()
    cut = [i for i, p in enumerate(params) if p.is_cut]
    if cut:
        rows = torch.tensor(cut, device=logits_BV.device)
        tempered = logits_BV[rows] / torch.from_numpy(temperatures[cut]).to(logits_BV.device).unsqueeze(1)
        left_CV = _truncated(tempered, [params[i] for i in cut])
        logits_BV = logits_BV.index_copy(0, rows, left_CV)
        temperatures[cut] = 1.0
        if any(p.returns_kept for p in params):
            rows_N, ids_N = left_CV.isfinite().nonzero().cpu().numpy().T
            found = dict(zip(cut, encode_kept(np.bincount(rows_N, minlength=len(cut)), ids_N), strict=True))
            kept = [found[i] if p.returns_kept and p.is_cut else b"" for i, p in enumerate(params)]
    return *(draw or draw_tokens)(logits_BV, temperatures, uniforms_B), kept


def draw_tokens(
    logits_BV: Tensor, temperatures_B: NDArray[np.float32], uniforms_B: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Draw from the whole vocabulary; take the best token where the temperature is 0."""
    device, greedy_B = logits_BV.device, temperatures_B == 0
    scales_B = torch.from_numpy(np.float32(1 / np.log(2)) / np.where(greedy_B, np.float32(1), temperatures_B))
    greedy_B1 = torch.from_numpy(greedy_B).to(device).unsqueeze(1) if greedy_B.any() else None
    uniforms_B1 = torch.from_numpy(uniforms_B).to(device).unsqueeze(1)
    return drawn(logits_BV, scales_B.to(device).unsqueeze(1), uniforms_B1, greedy_B1)


def drawn(logits_BV: Tensor, scales_B1: Tensor, uniforms_B1: Tensor, greedy_B1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw tokens, with their log-probs, from the distribution ``2^(scale logit)``, without waiting for the device."""
    exponents_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    weights_BV = exponents_BV.mul_(scales_B1).exp2_()  # exp is slow where it underflows
    tokens_B1 = _inverse_cdf(weights_BV, uniforms_B1)
    if greedy_B1 is not None:
        tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(-1, keepdim=True), tokens_B1)
    probs_B1 = weights_BV.gather(1, tokens_B1) / weights_BV.sum(-1, keepdim=True)
    return tokens_B1.squeeze(1), probs_B1.log_().squeeze(1)


def _inverse_cdf(weights_BV: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return the first token at which the cumulative share of the weights exceeds the uniform number, ``[B, 1]``. It is
    found in two steps, the chunk of the vocabulary and the token in it, so that only one chunk is summed token by
    token."""
    if missing := -weights_BV.shape[1] % _CHUNK:
        weights_BV = F.pad(weights_BV, (0, missing))
    chunks_BCW = weights_BV.view(len(weights_BV), -1, _CHUNK)
    chunk_B1, rest_B1 = _draw(chunks_BCW.sum(-1), uniforms_B1)
    chosen_BW = chunks_BCW.take_along_dim(chunk_B1.unsqueeze(2), 1).squeeze(1)
    return chunk_B1 * _CHUNK + _draw(chosen_BW, rest_B1)[0]


def _draw(weights_BC: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column drawn, never one of weight zero, and where in its weight the number fell, again in
    ``[0, 1)``."""
    cdf_BC = weights_BC.cumsum(-1, dtype=torch.float64)
    target_B1 = uniforms_B1 * cdf_BC[:, -1:]
    column_B1 = torch.searchsorted(cdf_BC, target_B1, right=True)
    column_B1.clamp_(max=cdf_BC.shape[1] - 1)  # past the end only when a logit is not a number
    weight_B1 = weights_BC.gather(1, column_B1).double()
    rest_B1 = 1 - (cdf_BC.gather(1, column_B1) - target_B1) / weight_B1
    return column_B1, rest_B1.clamp_(0, _BELOW_ONE)


def _truncated(logits_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the logits with minus infinity at the tokens that top-k, top-p and min-p leave out; the best one stays."""
    vocab, device = logits_BV.shape[1], logits_BV.device
    top_ks = [min(p.top_k, vocab) or vocab for p in params]
    top_k_B1 = torch.tensor(top_ks, device=device).unsqueeze(1)
    top_p_B1 = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    least_B1 = torch.tensor([p.min_p for p in params], device=device).log().unsqueeze(1)
    best_BK = logits_BV.topk(max(top_ks), dim=-1).values
    best_BK = best_BK.masked_fill(torch.arange(max(top_ks), device=device) >= top_k_B1, -torch.inf)
    probs_BK = torch.softmax(best_BK, dim=-1)
    before_BK = probs_BK.cumsum(-1, dtype=torch.float64) - probs_BK
    is_in_BK = ((before_BK < top_p_B1) | (top_p_B1 == 1)) & (best_BK - best_BK[:, :1] >= least_B1)
    num_B1 = (is_in_BK & (best_BK > -torch.inf)).sum(-1, keepdim=True).clamp(min=1)
    border_B1 = best_BK.gather(1, num_B1 - 1)
    is_equal_BV, is_above_BV = logits_BV == border_B1, logits_BV > border_B1
    is_first_BV = is_equal_BV.cumsum(-1) <= num_B1 - is_above_BV.sum(-1, keepdim=True)
    return logits_BV.masked_fill(~(is_above_BV | (is_equal_BV & is_first_BV)), -torch.inf)
