"""Log-probabilities of response tokens: the one function behind proximal, reference and trainer log-probs.

Convention: ``log_softmax(logits / temperature)`` over the full vocabulary, in float32 whatever the model's dtype. A
token that was drawn from a part of the vocabulary is normalised over that part, its kept set, whatever the weights: the
policy that is trained is the policy that was sampled from (Keep Sampling Mask of DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollover.trainer.kept_sets import KeptSets
from rollover.trainer.packing import PackedRow

ENTROPY_STRIDE = 32
"""Tokens of a large batch of which one has its entropy measured: measuring all would cost more than half as much as the
head and the loss."""
_ENOUGH = 256
"""Number of tokens whose entropies are enough, as far as a batch has them."""
LOGITS_PER_CHUNK = 1 << 26
"""Number of logits held at a time: 256 MiB in float32. Beyond it the head is recomputed in the backward pass."""
_IMPOSSIBLE = -1e9
"""Log-prob below all others of a token of probability 0, times which 0 is 0."""


class OneForward(nn.Module):
    """A model whose every use is one forward pass of this module, including the output matrix: FSDP gathers weights
    when a pass begins, and frees them when it ends."""

    is_padded = False

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, use: Callable[[Any], Tensor]) -> Tensor:
        return use(self.hf)

    @property
    def config(self) -> Any:
        return self.hf.config

    @property
    def device(self) -> torch.device:
        device: torch.device = self.hf.device
        return device


def vocab_size(model: Any) -> int:
    """Return the number of rows of a model's output matrix."""
    return OutputHead(model.hf if isinstance(model, OneForward) else model).out_features


class OutputHead:
    """The output part of a model: its output matrix with whatever the model does beside it (scales, caps, biases)."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def out_features(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        prefix = self._model.base_model_prefix
        base = self._model._modules[prefix]
        self._model._modules[prefix] = _Given(hidden_TD)
        try:
            logits_TV: Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        finally:
            self._model._modules[prefix] = base
        return logits_TV


@dataclass
class _GivenOutput(MoeModelOutputWithPast):
    """Has all that the heads of any family ask of a decoder's output."""

    cross_attentions: None = None


class _Given(nn.Module):
    """Stands in for the decoder, whose last hidden states are known."""

    def __init__(self, hidden_TD: Tensor) -> None:
        super().__init__()
        self._output = _GivenOutput(last_hidden_state=hidden_TD[None])

    @property
    def decoder(self) -> _Given:
        """Return what some families call inside their model."""
        return self

    def forward(self, *_: Any, **__: Any) -> _GivenOutput:
        return self._output


def response_logprobs(
    model: Any, row: PackedRow, temperature: float, *, autocast: bool = False, measured_2T: Tensor | None = None
) -> Tensor:
    """Compute the log-probs ``[T]`` of the row's response tokens under ``model`` (from ``open_model``), with gradient
    unless it is switched off. The head runs only on the ``T`` predicting positions, in bounded memory. ``autocast``
    runs matrix products in bfloat16. If ``measured_2T`` of the batch is given, what ``head_measures`` returns for some
    of its tokens (``is_measured``) is written into it, by the rank that has the token's position."""
    if isinstance(model, OneForward):
        inner: Tensor = model(
            lambda hf: response_logprobs(hf, row, temperature, autocast=autocast, measured_2T=measured_2T)
        )
        return inner
    own = row.share or row
    kept = row.kept if row.kept is None or row.share is None else row.kept.chosen(row.share.own_T)
    with _autocast(row.input_ids_N.device, autocast):
        hidden_TD = response_hidden(model, row)
        if measured_2T is not None:
            token_T = row.token_T if row.share is None else row.token_T[row.share.own_T]
            measured_T = is_measured(token_T, measured_2T.shape[1]).nonzero()[:, 0]
            kept_T = None if kept is None else kept.chosen(measured_T)
            found_2T = head_measures(OutputHead(model), hidden_TD.detach()[measured_T], temperature, kept_T)
            measured_2T[:, token_T[measured_T]] = found_2T.to(measured_2T.dtype)
        logprobs_T = head_logprobs(OutputHead(model), hidden_TD, own.target_T, temperature, kept)
    return logprobs_T if row.share is None else row.share.gathered(logprobs_T)


def is_measured(token_T: Tensor, num_tokens: int) -> Tensor:
    """Choose tokens of a batch of ``num_tokens`` as if at random, by a hash of their number: so that no length of
    responses has places that are measured more often than others."""
    stride = max(1, min(ENTROPY_STRIDE, num_tokens // _ENOUGH))
    hash_T = token_T * 0x9E3779B1 % 2**32
    hash_T = (hash_T ^ hash_T >> 15) * 0x85EBCA6B % 2**32
    return hash_T ^ hash_T >> 13 < 2**32 // stride


def response_logits(model: Any, row: PackedRow, *, autocast: bool = False) -> Tensor:
    """Compute the logits ``[T, vocab]`` from which the row's response tokens are drawn. This is for few tokens, since
    the memory is unbounded."""
    if isinstance(model, OneForward):
        inner: Tensor = model(lambda hf: response_logits(hf, row, autocast=autocast))
        return inner
    with _autocast(row.input_ids_N.device, autocast):
        logits_TV = OutputHead(model)(response_hidden(model, row))
    return logits_TV if row.share is None else row.share.gathered(logits_TV)


def all_logprobs(
    model: Any,
    rows: Sequence[PackedRow],
    temperature: float,
    *,
    num_tokens: int,
    autocast: bool = False,
    padding: Sequence[PackedRow] = (),
    on_pass: Callable[[], None] = lambda: None,
) -> Tensor:
    """Compute the log-probs ``[num_tokens]`` of all response tokens of a batch, in the batch's own order, without
    gradient; 0 for tokens that are in none of the rows.

    Args:
        padding: rows that are passed through the model but do not count.
        on_pass: called after each row.
    """
    out_T = torch.zeros(num_tokens, device=model.device)
    with torch.no_grad():
        for row in rows:
            logprobs = response_logprobs(model, row, temperature, autocast=autocast)
            out_T = out_T.to(logprobs.dtype).index_copy_(0, row.token_T, logprobs)
            on_pass()
        for row in padding:
            response_logprobs(model, row, temperature, autocast=autocast)
            on_pass()
    return out_T


def response_hidden(model: Any, row: PackedRow) -> Tensor:
    """Return the last hidden states ``[T, D]`` at the predicting positions; only this rank's if several share the
    row."""
    if model.is_padded:
        return _padded_hidden(model, row)
    own = row.share or row
    model.routes.given = row.routes if row.share is None or row.routes is None else row.share.own_routes(row.routes)
    hidden_ND = model.base_model(
        input_ids=own.input_ids_N[None],
        attention_mask=torch.ones_like(own.input_ids_N)[None],  # without one, jumps of positions would cut the row
        position_ids=own.position_ids_N[None],
        use_cache=False,
        packed_row=row,
    ).last_hidden_state[0]
    hidden_TD: Tensor = hidden_ND.index_select(0, own.predict_T)
    return hidden_TD


def _padded_hidden(model: Any, row: PackedRow) -> Tensor:
    """Return the last hidden states of a model to which each sample is a line of its own, ``L`` positions wide."""
    found = []
    for positions_SL in row.buckets:
        model.routes.given = None if row.routes is None else row.routes.of_positions(positions_SL.view(-1))
        block_SLD = model.base_model(input_ids=row.input_ids_N[positions_SL], use_cache=False).last_hidden_state
        found.append(block_SLD.flatten(0, 1))
    hidden_TD: Tensor = torch.cat(found).index_select(0, row.unpad_N[row.predict_T])
    return hidden_TD


def head_logprobs(
    head: OutputHead | nn.Linear, hidden_TD: Tensor, target_T: Tensor, temperature: float, kept: KeptSets | None = None
) -> Tensor:
    """Compute the log-probs ``[T]`` of target tokens from the last hidden states ``[T, D]``, in bounded memory."""
    parts = _parts(head, hidden_TD, kept)
    if len(parts) == 1:
        return _token_logprobs(head, hidden_TD, target_T, temperature, kept)
    targets = target_T.split(len(parts[0][0]))
    return torch.cat(
        [
            checkpoint(_token_logprobs, head, h, t, temperature, k, use_reentrant=False, preserve_rng_state=False)
            for (h, k), t in zip(parts, targets, strict=True)
        ]
    )


@torch.no_grad()
def head_measures(
    head: OutputHead | nn.Linear, hidden_TD: Tensor, temperature: float, kept: KeptSets | None = None
) -> Tensor:
    """Compute the entropies, in nats, of the distributions that the last hidden states predict, and the shares of the
    full vocabulary's probability that the kept sets have, ``[2, T]``, in bounded memory."""
    measures = []
    for part_TD, part_kept in _parts(head, hidden_TD, kept):
        logits_TV = _tempered(head, part_TD, temperature)
        left_TK = logits_TV if part_kept is None else part_kept.left(logits_TV)
        logprobs_TK = F.log_softmax(left_TK, dim=-1)
        entropies_T = -(logprobs_TK.exp() * logprobs_TK.clamp(min=_IMPOSSIBLE)).sum(-1)
        masses_T = torch.ones_like(entropies_T)
        if part_kept is not None:
            masses_T = (left_TK.logsumexp(-1) - logits_TV.logsumexp(-1)).exp()
        measures.append(torch.stack([entropies_T, masses_T]))
    return torch.cat(measures, dim=1)


def _parts(
    head: OutputHead | nn.Linear, hidden_TD: Tensor, kept: KeptSets | None
) -> list[tuple[Tensor, KeptSets | None]]:
    """Cut the hidden states into parts whose logits can be held, with their kept sets."""
    chunk = max(1, LOGITS_PER_CHUNK // head.out_features)
    parts = hidden_TD.split(chunk)
    sets = (None if kept is None else kept.chosen(slice(i * chunk, (i + 1) * chunk)) for i in range(len(parts)))
    return list(zip(parts, sets, strict=True))


def _token_logprobs(
    head: OutputHead | nn.Linear, hidden_TD: Tensor, target_T: Tensor, temperature: float, kept: KeptSets | None
) -> Tensor:
    logits_TV = _tempered(head, hidden_TD, temperature)
    if kept is None:
        return -F.cross_entropy(logits_TV, target_T, reduction="none")
    return logits_TV.gather(1, target_T[:, None])[:, 0] - kept.left(logits_TV).logsumexp(-1)


def _tempered(head: OutputHead | nn.Linear, hidden_TD: Tensor, temperature: float) -> Tensor:
    logits_TV = head(hidden_TD)
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return logits_TV if temperature == 1.0 else logits_TV / temperature


def _autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()
