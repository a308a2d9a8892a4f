"""The scripted engine keeps the laws it stands in for, and its script."""

from __future__ import annotations

import asyncio

from rollover.types import FinishReason
from rollover.weights.base import WeightSource
from tests.engine.contract import EngineContract, FullEngine, collect, request, tokens
from tests.engine.fake import FakeEngine, logprob_at, token_at
from tests.weights.kit import FakeWeights


class TestFakeKeepsTheContract(EngineContract):
    def make_engine(self) -> FullEngine:
        return FakeEngine(lambda _: 10**9, auto=True)

    def new_weights(self, version: int) -> WeightSource:
        return FakeWeights(version)

    def bad_weights(self) -> WeightSource:
        return FakeWeights(1, fit=False)


async def test_a_tick_decodes_one_scripted_token_per_running_call() -> None:
    engine = FakeEngine(lambda r: 3 if r.seed == 1 else 5, max_running=2)
    calls = [
        asyncio.create_task(collect(engine, request(f"s{seed}", seed=seed, stop_token_ids=(2,)))) for seed in (1, 2, 3)
    ]
    await asyncio.sleep(0)
    await engine.tick(3)
    assert [c.done() for c in calls] == [True, False, False]
    assert engine.decoded_tokens == 6
    await engine.tick(5)
    chunks = await calls[1]
    assert tokens(chunks) == (*(token_at(2, p, 0) for p in range(4)), 2)
    assert [p for c in chunks for p in c.logprobs] == [logprob_at(2, p, 0) for p in range(5)]
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert engine.num_ticks == 8 and calls[2].done()
