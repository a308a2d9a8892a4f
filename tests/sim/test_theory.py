"""The closed forms, against enumeration and quadrature."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from rollover.sim.theory import StepModel, expected_longest
from rollover.workload.source import PRESETS

PRESET_NAMES = ("r1-16k", "qwen3-16k", "heavy-32k")
N, G = 32, 8


def step_model(name: str, *, b0: float = 256.0, num_groups: int = 6000, seed: int = 0) -> StepModel:
    workload = PRESETS[name].workload(seed)
    lengths_PG = [workload.group_lengths(i, G) for i in range(num_groups)]
    return StepModel.of_lengths(lengths_PG, batch_size=N, b0=b0)


@pytest.mark.parametrize(("name", "theirs"), [("r1-16k", 8937), ("qwen3-16k", 8637), ("heavy-32k", 15910)])
def test_kappa_of_the_presets(name: str, theirs: int) -> None:
    """A sample of 48,000 lengths, and the values an independent simulator's authors drew from another such sample."""
    assert step_model(name).kappa == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("name", [*PRESET_NAMES, "light-8k"])
def test_throughput_identity_of_the_presets(name: str) -> None:
    """Tokens per c0 at B0 = 256: of sync, as an independent simulator has it, and of 512 samples, the same for any law."""
    model = step_model(name)
    sync = {"r1-16k": 70.1, "qwen3-16k": 84.5, "heavy-32k": 46.3, "light-8k": 42.5}[name]
    assert model.tokens / model.step_time(model.sync_iterations) == pytest.approx(sync, rel=0.015)
    assert model.tokens / model.step_time(model.tokens / 512) == pytest.approx(1 / (1 / 512 + 1 / 256))


def test_setup_of_the_published_measurement() -> None:
    """B0 = 108: the gains of 512 samples in flight and of the ceiling."""
    model = step_model("qwen3-16k", b0=108)
    assert model.gain(model.tokens / 512) == pytest.approx(1.53, abs=0.01)
    assert model.ceiling == pytest.approx(1.86, abs=0.01)
    assert model.ceiling == pytest.approx(1 + model.sync_iterations * 108 / model.tokens)


def test_waits_by_counting_every_token() -> None:
    rng = random.Random(5)
    groups = [[rng.randint(1, 60) for _ in range(3)] for _ in range(50)]
    tokens = [(length - j - 0.5, max(group) - length) for group in groups for length in group for j in range(length)]
    model = StepModel.of_lengths(groups, batch_size=4, b0=10)
    assert model.kappa_own == pytest.approx(np.mean([own for own, _ in tokens]))
    assert model.kappa_sibling == pytest.approx(np.mean([sibling for _, sibling in tokens]))
    assert model.kappa == model.kappa_own + model.kappa_sibling


def test_longest_of_several_by_enumeration() -> None:
    lengths = [1, 4, 4, 9]
    assert expected_longest(lengths, 3) == pytest.approx(
        np.mean([max(d) for d in itertools.product(lengths, repeat=3)])
    )
    assert expected_longest(lengths, 1) == np.mean(lengths)


def test_step_time_adds_iterations_and_tokens() -> None:
    """Two batches of iterations by hand: 3 at B = 4, 2 at B = 1; B0 = 2."""
    model = StepModel.of_lengths([[5, 3, 3, 3]], batch_size=1, b0=2)
    by_hand = 3 * (1 + 4 / 2) + 2 * (1 + 1 / 2)
    assert model.sync_iterations == 5 and model.tokens == 14
    assert model.step_time(5) == by_hand
    assert model.gain(2.0) == (5 + 7) / (2 + 7)


def test_lag_and_gain_lie_on_one_curve() -> None:
    model = step_model("r1-16k", num_groups=500)
    for num_running in (256, 384, 512):
        k = model.tokens / num_running
        assert model.gain_at_lag(model.kappa / k) == pytest.approx(model.gain(k))
        assert model.gain_at_lag(model.kappa_own / k, whole_groups=False) == pytest.approx(model.gain(k))
    gains = [model.gain_at_lag(lag) for lag in (1, 2, 4, 1e9)]
    assert gains == sorted(gains) and gains[-1] == pytest.approx(model.ceiling)
