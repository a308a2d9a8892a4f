"""Replay of truncated sampling, by enumerating every response over 6 tokens and 3 positions.

The sampler of the embedded engine decides which tokens each prefix keeps; the trainer's own head and loss give the
gradient of each response. Their expectation is compared with the gradient of the expected reward under the policy that
was sampled from, which is computed apart from them, with masks over the whole vocabulary.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rollover.trainer.logprobs as logprobs_module
from rollover.algorithms.batch import Denominators
from rollover.algorithms.losses import policy_loss
from rollover.batch import Batch, WasteCause
from rollover.engine.embedded.sampler import sample
from rollover.kept_codec import decode_kept, encode_kept
from rollover.trainer.kept_sets import KeptSets
from rollover.trainer.logprobs import all_logprobs, head_logprobs
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.types import SamplingParams, Trajectory
from tests.algorithms.batches import row as algorithm_row
from tests.algorithms.batches import token_batch
from tests.trainer.builders import (
    assert_gradients,
    changed,
    in_segment,
    make_batch,
    make_folder,
    make_model,
    make_samples,
    make_trainer,
    separate_logits,
    to_float64,
)

VOCAB, LENGTH = 6, 3
TEMPERATURE = 0.8
RULES = {
    "top_p": {"top_k": VOCAB, "top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"top_k": VOCAB, "min_p": 0.25},
    "all": {"top_k": 4, "top_p": 0.9, "min_p": 0.1},
}
PREFIXES = [y for n in range(LENGTH) for y in itertools.product(range(VOCAB), repeat=n)]
RESPONSES_BT = torch.tensor([*itertools.product(range(VOCAB), repeat=LENGTH)])
PREFIX_BT = torch.tensor([[PREFIXES.index(tuple(y[:n])) for n in range(LENGTH)] for y in RESPONSES_BT.tolist()])
ALGORITHM = algorithm_row(
    "rloo",
    correction="tis",
    correction_level="sequence",
    correction_bounds=(0.0, math.inf),
    aggregation="seq-mean-token-sum",
)
"""Weights per response: exact whatever the distance between the two policies."""


@dataclass(frozen=True)
class World:
    """A policy with its own logits for each prefix, and what an engine kept of them when it sampled."""

    behaviour_PV: Tensor
    kept: tuple[bytes, ...]
    rewards_B: Tensor

    @classmethod
    def make(cls, rule: dict[str, Any], seed: int) -> World:
        rng = torch.Generator().manual_seed(seed)
        logits_PV = torch.randn(len(PREFIXES), VOCAB, dtype=torch.float64, generator=rng)
        params = SamplingParams(max_new_tokens=LENGTH, temperature=TEMPERATURE, returns_kept=True, **rule)
        noise = torch.rand(len(PREFIXES), dtype=torch.float64, generator=rng).numpy()
        tokens, logprobs, kept = sample(logits_PV, [params] * len(PREFIXES), noise)
        world = cls(logits_PV, tuple(kept), torch.rand(len(RESPONSES_BT), dtype=torch.float64, generator=rng))
        drawn = world.truncated(logits_PV).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), drawn, atol=1e-5, rtol=0)  # the engine reports the same policy
        return world

    def truncated(self, logits_PV: Tensor) -> Tensor:
        """The log-probs of the policy with these logits that draws from the kept sets."""
        counts, ids = decode_kept(self.kept)
        out_PV = torch.full_like(logits_PV, -torch.inf)
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        out_PV[rows, torch.from_numpy(ids)] = 0.0
        return (out_PV + logits_PV / TEMPERATURE).log_softmax(-1)

    def probabilities(self, logits_PV: Tensor) -> Tensor:
        """[B]: of each response."""
        return self.truncated(logits_PV)[PREFIX_BT, RESPONSES_BT].sum(1).exp()

    def exact(self, logits_PV: Tensor) -> Tensor:
        """The gradient of the expected reward."""
        leaf_PV = logits_PV.clone().requires_grad_()
        (self.probabilities(leaf_PV) * self.rewards_B).sum().backward()
        assert leaf_PV.grad is not None
        return leaf_PV.grad

    def trained(self, logits_PV: Tensor, *, replays: bool = True) -> Tensor:
        """The expected update of the trainer, over responses drawn from the behaviour policy."""
        probs_B = self.probabilities(self.behaviour_PV)
        drawn_B = probs_B > 0
        prefix_T, token_T = PREFIX_BT[drawn_B].flatten(), RESPONSES_BT[drawn_B].flatten()
        head = nn.Linear(len(PREFIXES), VOCAB, bias=False, dtype=torch.float64)
        with torch.no_grad():
            head.weight.copy_(logits_PV.T)
        sets = KeptSets.of([self.kept[p] for p in prefix_T.tolist()], torch.from_numpy) if replays else None
        hidden_TD = nn.functional.one_hot(prefix_T, len(PREFIXES)).double()
        logprobs_T = head_logprobs(head, hidden_TD, token_T, TEMPERATURE, sets)
        advantages_B = probs_B[drawn_B] * self.rewards_B[drawn_B]
        sample_T = torch.arange(len(advantages_B)).repeat_interleave(LENGTH)
        tokens = token_batch(
            logprobs_T,
            sample_T,
            torch.zeros(len(advantages_B), dtype=torch.int64),
            rollout_logprobs_T=self.truncated(self.behaviour_PV)[prefix_T, token_T],
            advantages_T=advantages_B[sample_T],
        )
        one = Denominators(num_tokens=1, num_samples=1, num_groups=1, tokens_per_group=(1,), max_response_tokens=LENGTH)
        policy_loss(ALGORITHM, tokens, one)[0].backward()
        assert head.weight.grad is not None
        return -head.weight.grad.T


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("moved", [0.0, 0.15], ids=["on-policy", "moved"])
def test_the_expected_gradient_is_that_of_the_truncated_policy(rule: str, moved: float) -> None:
    for seed in range(3):
        world = World.make(RULES[rule], seed)
        noise = torch.randn(world.behaviour_PV.shape, generator=torch.Generator().manual_seed(99 + seed)).double()
        logits_PV = world.behaviour_PV + moved * noise
        exact = world.exact(logits_PV)
        assert relative_error(world.trained(logits_PV), exact) < 1e-12
        assert relative_error(world.trained(logits_PV, replays=False), exact) > 0.3, "what is avoided"


# -- models, rows and batches -----------------------------------------------------------------------------------------


def with_kept(samples: list[TrainingSample], *, whole_every: int = 0) -> list[TrainingSample]:
    """Kept sets of 1 to 12 of 40 tokens, the drawn one among them; ``b""`` at some tokens."""
    rng = np.random.default_rng(4)
    found = []
    for sample_ in samples:
        sets = [sorted({t, *rng.integers(0, 40, rng.integers(0, 12)).tolist()}) for t in sample_.response_ids]
        sets = [[] if whole_every and i % whole_every == 0 else one for i, one in enumerate(sets)]
        counts, ids = np.array([len(s) for s in sets]), np.array([i for s in sets for i in s], dtype=np.int64)
        found.append(replace(sample_, kept=encode_kept(counts, ids)))
    return found


def dense_logprobs(model: Any, samples: list[TrainingSample]) -> Tensor:
    """Of each response token under the policy that draws from its kept set, one forward pass per sample."""
    parts = []
    for s in samples:
        for logits_V, token, kept in zip(separate_logits(model, s) / TEMPERATURE, s.response_ids, s.kept, strict=True):
            ids = decode_kept((kept,))[1] if kept else np.arange(len(logits_V))
            parts.append(logits_V[token] - logits_V[torch.from_numpy(ids)].logsumexp(0))
    return torch.stack(parts)


@pytest.mark.parametrize("whole_every", [0, 3], ids=["all cut", "some whole"])
@pytest.mark.parametrize("chunk", [1 << 26, 40 * 7], ids=["at once", "in chunks"])
def test_packed_rows_are_normalised_over_each_tokens_own_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_every: int, chunk: int
) -> None:
    monkeypatch.setattr(logprobs_module, "LOGITS_PER_CHUNK", chunk)
    model, policy = to_float64(make_model()), to_float64(open_model(make_folder(tmp_path)))
    samples = with_kept(make_samples(12), whole_every=whole_every)
    expected_T = dense_logprobs(model, samples)
    weights_T = torch.randn(len(expected_T), dtype=torch.float64)
    found_T = all_logprobs(policy, pack(samples, 70), TEMPERATURE, num_tokens=len(expected_T))
    torch.testing.assert_close(found_T, expected_T.detach(), atol=1e-12, rtol=0)
    assert_gradients(policy, model, expected_T, samples, weights_T, TEMPERATURE, atol=1e-12, rtol=1e-10)


def recorded(batch: Batch, *, only_choice_of: int | None = None) -> Batch:
    """The batch as an engine that keeps parts of the vocabulary would have sampled it; one of its groups without any
    choice."""

    @torch.no_grad()
    def sampled(t: Trajectory) -> Trajectory:
        [sample_] = with_kept([TrainingSample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids)])
        if t.sample_id.group == only_choice_of:
            ones = np.ones(t.num_tokens, dtype=np.int64)
            sample_ = replace(sample_, kept=encode_kept(ones, np.array(t.token_ids)))
        logprobs = dense_logprobs(make_model(), [sample_]).tolist()
        return in_segment(t, kept=sample_.kept, rollout_logprobs=tuple(logprobs))

    return changed(batch, sampled)


def test_a_step_counts_tokens_without_a_choice_and_measures_the_rest(tmp_path: Path) -> None:
    batch = recorded(make_batch(step=0, num_groups=4, group_size=4), only_choice_of=2)
    trainer = make_trainer(make_folder(tmp_path), temperature=TEMPERATURE)
    trained = trainer.step(batch)
    assert trained.untrained[WasteCause.ONLY_CHOICE] == batch.groups[2].num_tokens
    assert trained.metrics["is_weight/max"] == pytest.approx(1, abs=1e-4), "ratios are of the kept sets on both sides"
    assert trained.drift[""].mean_abs < 1e-5
    assert 1 < trained.metrics["kept/tokens"] < 13 and 0 < trained.metrics["kept/mass"] < 1
