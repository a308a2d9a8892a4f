"""A small setup that simulates in a fraction of a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollover.frontier.setup import Setup
from rollover.frontier.sweep import FrontierPoint, TrialResult
from rollover.rollout.lag import LagSummary
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.law import LengthLaw

LAW = LengthLaw(
    median_tokens=60, sigma=0.8, icc=0.5, loop_probability=0.03, cap_tokens=300, min_tokens=4, prompt_tokens=10
)
REPLICA = ReplicaModel(c0_s=0.01, b0=12, prefill_tokens_per_s=50_000)


def small(**changes: Any) -> Setup:
    config = SimulatedRollout(rollout_batch_size=6, group_size=4, max_new_tokens=LAW.cap_tokens)
    setup = Setup(
        name="small", lengths=LAW, rollout=config, is_in_use=False, scenario=Scenario(replicas=(REPLICA,)), unit="s"
    )
    return replace(setup, **changes)


def outcome(*, lag: float = 0.0, max_lag: int = 0, **figures: float) -> TrialResult:
    blank = {name: 0.0 for name in TrialResult.__slots__ if name not in ("wasted", "lags")}
    lags = LagSummary(token=lag, batch=lag, group=lag, head=lag, max=max_lag, p95=max_lag, off_policy_fraction=0.0)
    return TrialResult(**(blank | {"tokens_per_s": 1.0, "trained_length": 1.0} | figures), lags=lags, wasted={})


def point(gain: float, lag: float, *, length: float = 1.0, max_lag: int = 0, **config: Any) -> FrontierPoint:
    """A made-up one, of a single seed."""
    made = outcome(tokens_per_s=gain, lag=lag, max_lag=max_lag, trained_length=length)
    kind = config.pop("strategy", "april")
    usual = (
        {} if kind == "sync" else {"max_staleness": 64} | ({"over_sampling_batch_size": 64} if kind == "april" else {})
    )
    return FrontierPoint(config=SimulatedRollout.of(kind, **usual | config), outcomes=(made,), baseline=(outcome(),))
