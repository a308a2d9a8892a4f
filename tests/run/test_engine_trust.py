"""Who is distrusted after a batch: a pure decision."""

from __future__ import annotations

from rollover.run.engine_trust import MIN_TOKENS, too_far
from rollover.types import Drift


def test_an_engine_is_judged_by_its_mean_over_enough_tokens() -> None:
    drift = {
        "honest": Drift(1000, 1e-5),
        "at the limit": Drift(1000, 0.002),
        "beyond it": Drift(MIN_TOKENS, 0.0021),
        "too few": Drift(MIN_TOKENS - 1, 5.0),
        "no number": Drift(1000, float("nan")),
    }
    assert too_far(drift, 0.002).keys() == {"beyond it", "no number"}
    assert too_far({}, 0.002) == {}
