"""The scripted engine keeps the laws it stands in for, and its script."""

from __future__ import annotations

from rollover.weights.base import WeightSource
from tests.engine.contract import EngineContract, FullEngine
from tests.engine.fake import FakeEngine
from tests.weights.kit import FakeWeights


class TestFakeKeepsTheContract(EngineContract):
    def make_engine(self) -> FullEngine:
        return FakeEngine(lambda _: 10**9, auto=True)

    def new_weights(self, version: int) -> WeightSource:
        return FakeWeights(version)

    def bad_weights(self) -> WeightSource:
        return FakeWeights(1, fit=False)
