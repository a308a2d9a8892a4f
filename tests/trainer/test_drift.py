"""Recorded and recomputed log-probs are compared at the tokens which both sides computed alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.batch import Batch
from rollover.trainer.gathering import entropy_metrics
from rollover.trainer.packing import TrainingSample
from rollover.types import FinishReason, Trajectory
from tests.trainer.builders import changed, in_segment, make_batch, make_model, make_trainer, separate_logprobs

OFF = {"a": 0.25, "b": 0.0}


def recorded(trajectory: Trajectory, *, engine: str, version: int = 0, kv_version: int = 0) -> Trajectory:
    """As an engine records it that is ``OFF`` so far from the model of ``folder``, if at all; older tokens are ten nats
    off, as nobody should see."""
    sample = TrainingSample(prompt_ids=trajectory.prompt.token_ids, response_ids=trajectory.token_ids)
    off = OFF[engine] if version == kv_version == 0 else 10.0
    logprobs = [p - off for p in separate_logprobs(make_model(), [sample], 0.8).tolist()]
    return in_segment(
        trajectory, rollout_logprobs=logprobs, engine=engine, policy_version=version, kv_version=kv_version
    )


def mixed_batch() -> tuple[Batch, dict[str, int]]:
    """Samples of two engines by turns, the last of each group with an older cache; and how many tokens count."""
    counts = {"a": 0, "b": 0}

    def by_turns(t: Trajectory) -> Trajectory:
        group, i = t.sample_id
        engine = "ab"[(group + i) % 2]
        counts[engine] += t.num_tokens if i < 2 else 0
        return recorded(t, engine=engine, kv_version=0 if i < 2 else -1)

    return changed(make_batch(num_groups=4, group_size=3), by_turns), counts


def test_entropies_are_told_by_their_distance_from_the_end() -> None:
    entropy_T = np.full(300, np.nan)
    # Sample 0 has 280 tokens, sample 1 has 20; followed by 279, 24 and 0 tokens, and by 16 tokens.
    entropy_T[[0, 255, 279, 283]] = 4.0, 3.0, 1.0, 2.0
    found = entropy_metrics(np.array([280, 20]), entropy_T)
    assert found == {"entropy/end_0": 1.0, "entropy/end_16": 2.5, "entropy/end_256": 4.0, "entropy": 2.5}


@pytest.mark.parametrize("masks", [False, True])
def test_entropies_leave_out_masked_tokens_as_surprise_does(folder: Path, masks: bool) -> None:
    cut = partial(in_segment, finish_reason=FinishReason.LENGTH)
    trainer = make_trainer(folder, algorithm=resolve(AlgorithmConfig(mask_truncated=masks)))
    found = trainer.step(changed(make_batch(num_groups=2, group_size=2), cut)).metrics
    assert (found["surprise"] == 0, "entropy" in found) == (masks, not masks)


@pytest.mark.parametrize("settings", [{}, {"micro_batch_tokens": 40}, {"mini_batches": 2, "learning_rate": 1.0}])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_drift_is_the_mean_distance_of_fresh_tokens(folder: Path, settings: dict[str, float], algorithm: str) -> None:
    batch, counts = mixed_batch()
    drift = make_trainer(folder, algorithm=algorithm, **settings).step(batch).drift
    assert drift.keys() == counts.keys()
    for name, found in drift.items():
        assert found.num_tokens == counts[name]
        assert found.mean_abs == pytest.approx(OFF[name], abs=1e-5)


def test_weights_that_have_moved_are_not_compared(folder: Path) -> None:
    """An algorithm without proximal log-probs knows them in its first mini-batch alone."""
    batch, counts = mixed_batch()
    plain = resolve(AlgorithmConfig(name="rloo", correction="none"))
    trainer = make_trainer(folder, algorithm=plain, mini_batches=2, learning_rate=1.0)
    assert not trainer._algorithm.needs_proximal
    drift, moved = (found := trainer.step(batch)).drift, {*found.metrics}
    assert 0 < sum(found.num_tokens for found in drift.values()) < sum(counts.values())
    assert all(found.mean_abs == pytest.approx(OFF[name], abs=1e-5) for name, found in drift.items())
    known = {*make_trainer(folder, algorithm=plain).step(batch).metrics} - moved
    assert known == {
        *(
            "is_weight/mean",
            "is_weight/max",
            "clip/at_start",
            "ess/token",
            "ess/sample",
            "lag_0/is_weight",
            "lag_0/ess",
        ),
        *("ratio/mean", "ratio/max", "kl/proximal", "kl/rollout_proximal_k1", "kl/rollout_proximal_k3"),
    }
    assert "kl/proximal" in make_trainer(folder, mini_batches=2).step(batch).metrics


def test_tokens_of_older_weights_have_no_drift(folder: Path) -> None:
    old = changed(make_batch(), partial(recorded, engine="a", version=-1, kv_version=-1))
    assert make_trainer(folder).step(old).drift == {}
