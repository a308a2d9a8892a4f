"""What of an engine is checked, and when."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.rollout.config import RolloutConfig
from rollover.run import engine_trust
from rollover.run.engine_trust import Trust
from tests.engine.fake import FakeEngine, opened


def trust_of(engine: FakeEngine, rollout: RolloutConfig, placement: Any = None) -> Trust:
    return Trust(
        rollout,
        EmbeddedConfig(),
        replace(opened(engine), placement=placement),
        next_logits=lambda prompts: np.zeros((len(prompts), 8), np.float32),
        vocab_size=8,
        trainer_format="float32",
        replayed=(),
    )


@pytest.mark.parametrize(("bound", "is_swarm", "kept"), [(1, True, 8), (16, True, 18), (99, True, 24), (16, False, 8)])
def test_members_of_a_swarm_can_be_checked_as_far_behind_as_they_sample(bound: int, is_swarm: bool, kept: int) -> None:
    placement = SimpleNamespace(on_distrust=lambda listener: None) if is_swarm else None
    trust = trust_of(FakeEngine(lambda request: 1), RolloutConfig(max_staleness=bound), placement)
    for version in range(30):
        trust.expect(version)
    assert [*trust._references] == [*range(30 - kept, 30)]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("draws", [False, True])
async def test_sampling_is_checked_of_who_draws(monkeypatch: pytest.MonkeyPatch, is_known: bool, draws: bool) -> None:
    made: list[str] = []
    for name in ("check_logprobs", "check_sampling"):

        async def check(*args: Any, name: str = name, **kwargs: Any) -> None:
            made.append(name)

        monkeypatch.setattr(engine_trust, name, check)
    engine = FakeEngine(lambda request: 1)
    trust = trust_of(engine, RolloutConfig())
    trust.expect(0)
    await trust._check(engine, 0, is_known=is_known, draws=draws)
    assert made == ["check_logprobs", "check_sampling"][: 1 + draws]
