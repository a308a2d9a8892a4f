"""Sampled tokens follow the softmax, the cuts keep what they should, and noise is a function of (seed, position)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.embedded.sampler import sample, uniforms
from rollover.kept_codec import decode_kept
from rollover.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -4.0, 0.25])
DRAWS = 20_000


def draw(n: int = DRAWS, **params: float) -> tuple[torch.Tensor, torch.Tensor]:
    settings = [SamplingParams(max_new_tokens=1, **params)] * n  # type: ignore[arg-type]
    return sample(LOGITS.expand(n, -1), settings, uniforms([7] * n, range(n)))[:2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_softmax(temperature: float) -> None:
    tokens, logprobs = draw(temperature=temperature)
    expected = torch.softmax(LOGITS.double() / temperature, -1) * DRAWS
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3  # the 0.999 quantile with 7 degrees of freedom
    assert torch.allclose(logprobs, torch.log_softmax(LOGITS / temperature, -1)[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 3}, {0, 5, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": 100}, set(range(8))),
        ({"top_p": 0.6}, {0, 5}),  # probabilities 0.39, 0.24, 0.14, ...
        ({"top_p": 0.1}, {0}),
        ({"top_p": 0.7, "top_k": 3}, {0, 5}),  # of the three left, the first two hold 0.82
        ({"top_p": 0.85, "top_k": 3}, {0, 5, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.3}, {0, 5, 1}),  # 0.37 and 0.22 of the best one
        ({"min_p": 0.3, "top_p": 0.6}, {0, 5}),
    ],
)
def test_cuts_keep_their_support_and_report_what_is_sampled_from(params: dict[str, Any], support: set[int]) -> None:
    tokens, logprobs = draw(5000, **params)
    assert set(tokens.tolist()) == support
    kept = torch.full_like(LOGITS, -torch.inf)
    kept[list(support)] = LOGITS[list(support)]
    assert torch.allclose(logprobs, torch.log_softmax(kept, -1)[tokens], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_sets_are_what_was_sampled_from_and_bounded_in_ties(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0, 1.0, -torch.inf], dtype=dtype)
    rows = [
        SamplingParams(max_new_tokens=1, top_k=4, returns_kept=True),  # three are third
        SamplingParams(max_new_tokens=1, temperature=0.7),
        SamplingParams(max_new_tokens=1, top_k=1, returns_kept=True),
        SamplingParams(max_new_tokens=1, top_k=6, top_p=0.9, temperature=2.0, returns_kept=True),
        SamplingParams(max_new_tokens=1, top_k=2),
    ]
    tokens, logprobs, kept = sample(logits.expand(5, -1), rows, np.linspace(0.1, 0.9, 5))
    counts, ids = decode_kept(kept)
    assert counts.tolist() == [4, 0, 1, 5, 0] and ids.tolist() == [1, 2, 3, 4, 1, 1, 2, 3, 4, 5]
    assert tokens[2] == 1 and logprobs[2] == 0
    of_fourth = torch.log_softmax(logits.float()[[1, 2, 3, 4, 5]] / 2, -1)
    assert logprobs[3] == pytest.approx(of_fourth[[1, 2, 3, 4, 5].index(int(tokens[3]))].item(), abs=1e-6)
    assert sample(logits.expand(2, -1), [rows[1], rows[4]], np.array([0.2, 0.4]))[2] == (), "none was wanted"


def test_one_row_may_be_greedy_and_another_cut() -> None:
    rows = [
        SamplingParams(max_new_tokens=1, temperature=0.0),
        SamplingParams(max_new_tokens=1, top_k=2),
        SamplingParams(max_new_tokens=1, temperature=3.0),
    ]
    noise = np.array([0.999, 0.999, 0.999])
    tokens, logprobs, _ = sample(LOGITS.expand(3, -1), rows, noise)
    assert tokens.tolist() == [0, 5, 7]
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, -1)[0].item(), abs=1e-6)
    for i, row in enumerate(rows):
        alone = sample(LOGITS.expand(1, -1), [row], noise[:1])
        assert (alone[0].item(), alone[1].item()) == (tokens[i].item(), logprobs[i].item())


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    ends = np.array([2.0**-53, 0.5, 1 - 2.0**-52])
    tokens, *_ = sample(logits.expand(3, -1), [SamplingParams(max_new_tokens=1)] * 3, ends)
    assert tokens.tolist() == [1, 3, 3]


def mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 10**6)), min_size=1, max_size=4))
def test_the_noise_is_what_the_protocol_page_says(asked: list[tuple[int, int]]) -> None:
    golden = 0x9E3779B97F4A7C15
    bits = [mixed((mixed((seed + golden) % 2**64) + (position + 1) * golden) % 2**64) for seed, position in asked]
    noise = uniforms(*zip(*asked, strict=True))
    assert noise.tolist() == [((b >> 12) + 0.5) / 2**52 for b in bits]
    assert uniforms([7], [0])[0] == pytest.approx(0.7215081806049702, rel=1e-15)
