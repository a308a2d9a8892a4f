"""What a pass through a model reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.devices.costs.passes import read_parameters
from tests.planner.kit import MODEL


@given(st.integers(1, 6), st.integers(1, 3))
def test_every_expert_that_some_sample_visits_is_read(batch: int, per_token: int) -> None:
    """Against the mean over all ways to choose, one expert at a time: 1 - (1 - k/E)^b."""
    experts = 4
    sparse = replace(MODEL, expert_parameters=400, num_experts=experts, experts_per_token=per_token)
    missed = ((experts - per_token) / experts) ** batch
    shared = MODEL.parameters - 400 - MODEL.embedding_parameters
    assert read_parameters(sparse, batch) == pytest.approx(shared + 400 * (1 - missed))
    assert read_parameters(sparse, 10**6) == pytest.approx(shared + 400)
