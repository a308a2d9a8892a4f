"""An evaluation survives failing calls and, when the engine is gone, says so in one error."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.errors import DataError, EngineError, RewardError
from rollover.run.config import RunConfig
from rollover.run.evaluation import Evaluator
from rollover.run.sections import EvalConfig, ModelConfig
from rollover.types import Prompt
from tests.engine.fake import FakeEngine
from tests.engine.test_complete import Failing
from tests.virtual_time import VirtualClock, run


class Source:
    num_rows = 5

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"p/{index}@0", token_ids=(5, 6), text="?", source="p")


class Scorer:
    async def score(self, trajectory: Any) -> float:
        return float(trajectory.num_tokens == 9)

    def pass_score(self, source: str) -> float:
        return 1.0


class Refusing(Scorer):
    """Cannot score the samples of one prompt."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def score(self, trajectory: Any) -> float:
        if trajectory.prompt.prompt_id == "p/0@0":
            raise self.error
        return await super().score(trajectory)


def evaluator(engine: FakeEngine, scorer: Scorer | None = None) -> Evaluator:
    return Evaluator(
        RunConfig(model=ModelConfig(path="model"), eval=EvalConfig(samples_per_prompt=2, max_new_tokens=9)),
        engine=engine,
        sources=[Source()],  # type: ignore[list-item]
        scorer=scorer or Scorer(),  # type: ignore[arg-type]
        stops=(),
        clock=VirtualClock(),
        on_progress=lambda done, total: None,
    )


def test_responses_go_on_after_failures() -> None:
    async def main() -> None:
        result = await evaluator(Failing(after=4, failures=7)).run()
        assert result.lengths == (9,) * 10
        assert result.rows[-1].reward.mean == 1.0

    run(main())


def test_a_sample_that_cannot_be_scored_counts_as_0_and_is_told() -> None:
    async def main() -> None:
        result = await evaluator(Failing(after=10**6, failures=0), Refusing(RewardError("late"))).run()
        assert (result.num_failed, result.rows[-1].reward.mean) == (2, 0.8)

    run(main())


def test_a_wrong_reward_function_ends_the_evaluation_with_one_error() -> None:
    async def main() -> None:
        await evaluator(Failing(after=10**6, failures=0), Refusing(DataError("returns text"))).run()

    with pytest.raises(DataError, match="returns text"):
        run(main())


def test_an_engine_that_is_gone_is_one_error() -> None:
    async def main() -> None:
        await evaluator(Failing(after=0, failures=10**6)).run()

    with pytest.raises(EngineError, match="dead on arrival"):
        run(main())
