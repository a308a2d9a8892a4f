"""Simulated rewards: prompts that are easier than others, and easier with shorter responses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr

from rollover.sim.rewards import Accuracies
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.workload.source import PRESETS

GROUP = 4
SCENARIO = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=8.0),))
PROMPTS = range(4000)


def accuracies(seed: int = 0, **given: float) -> list[float]:
    found = Accuracies(replace(SCENARIO, **given), PRESETS["light-8k"].workload(seed), GROUP, seed)
    return [found.of_prompt(i) for i in PROMPTS]


@pytest.mark.parametrize(("mean", "icc"), [(0.3, 0.0), (0.5, 0.5), (0.2, 0.9), (0.7, 1.0)])
def test_mean_and_share_of_equal_rewards_follow_from_the_law(mean: float, icc: float) -> None:
    """The share of groups whose rewards are equal, by quadrature over the difficulty of a prompt."""
    found = np.array(accuracies(accuracy=mean, accuracy_icc=icc))
    assert found.mean() == pytest.approx(mean, abs=0.02)
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    (threshold,) = [z for z in np.linspace(-2, 2, 400001) if abs(ndtr(z) - mean) < 1e-6][:1]
    p = ndtr((threshold + math.sqrt(icc) * nodes) / math.sqrt(max(1 - icc, 1e-12)))
    equal = float(weights @ (p**GROUP + (1 - p) ** GROUP)) / math.sqrt(2 * math.pi)
    assert np.mean(found**GROUP + (1 - found) ** GROUP) == pytest.approx(equal, abs=0.02)


def test_lengths_and_accuracy_are_correlated_as_asked() -> None:
    workload = PRESETS["light-8k"].workload(0)
    lengths = [np.mean(np.log(workload.group_lengths(i, GROUP))) for i in PROMPTS]
    ranks = np.argsort(np.argsort(lengths))
    for correlation in (-0.6, 0.0, 0.6):
        found = accuracies(accuracy=0.5, accuracy_icc=0.8, accuracy_length_correlation=correlation)
        spearman = np.corrcoef(ranks, np.argsort(np.argsort(found)))[0, 1]
        assert spearman == pytest.approx(6 / math.pi * math.asin(correlation / 2), abs=0.04)
        assert np.mean(found) == pytest.approx(0.5, abs=0.02)


def test_accuracy_of_a_prompt_follows_from_seed_and_number_alone() -> None:
    given = {"accuracy": 0.5, "accuracy_icc": 0.5, "accuracy_length_correlation": -0.5}
    forwards = accuracies(**given)
    found = Accuracies(replace(SCENARIO, **given), PRESETS["light-8k"].workload(0), GROUP, 0)
    assert [found.of_prompt(i) for i in reversed(PROMPTS)] == forwards[::-1]
    assert accuracies(seed=1, **given) != forwards
