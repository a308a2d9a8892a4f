"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted.

The public names are imported when they are first used, so that ``import rollover`` is instant and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from rollover.engine.base import Capabilities, Chunk, Engine, GenerateRequest
    from rollover.errors import RolloverError
    from rollover.rollout.actions import ConsumeBatch, StartSample, StopAll
    from rollover.rollout.config import Limits
    from rollover.rollout.driver import RolloutDriver
    from rollover.rollout.journal import Journal
    from rollover.rollout.ledger import Ledger
    from rollover.rollout.scheduler import Scheduler
    from rollover.rollout.state import RolloutState, View
    from rollover.rollout.statistics import Statistics
    from rollover.rollout.strategies import STRATEGIES
    from rollover.rollout.strategy import Strategy
    from rollover.run.api import train
    from rollover.run.config import RunConfig
    from rollover.sim.run import simulate
    from rollover.types import Batch, FinishReason, Group, Prompt, SampleId, SamplingParams, Segment, Trajectory
    from rollover.weights.base import WeightTarget

PUBLIC_MODULES = {
    "STRATEGIES": "rollout.strategies",
    "Batch": "types",
    "Capabilities": "engine.base",
    "Chunk": "engine.base",
    "ConsumeBatch": "rollout.actions",
    "Engine": "engine.base",
    "FinishReason": "types",
    "GenerateRequest": "engine.base",
    "Group": "types",
    "Journal": "rollout.journal",
    "Ledger": "rollout.ledger",
    "Limits": "rollout.config",
    "Prompt": "types",
    "RolloutDriver": "rollout.driver",
    "RolloutState": "rollout.state",
    "RolloverError": "errors",
    "RunConfig": "run.config",
    "SampleId": "types",
    "SamplingParams": "types",
    "Scheduler": "rollout.scheduler",
    "Segment": "types",
    "StartSample": "rollout.actions",
    "Statistics": "rollout.statistics",
    "StopAll": "rollout.actions",
    "Strategy": "rollout.strategy",
    "Trajectory": "types",
    "View": "rollout.state",
    "WeightTarget": "weights.base",
    "simulate": "sim.run",
    "train": "run.api",
}

__all__ = [
    "STRATEGIES",
    "Batch",
    "Capabilities",
    "Chunk",
    "ConsumeBatch",
    "Engine",
    "FinishReason",
    "GenerateRequest",
    "Group",
    "Journal",
    "Ledger",
    "Limits",
    "Prompt",
    "RolloutDriver",
    "RolloutState",
    "RolloverError",
    "RunConfig",
    "SampleId",
    "SamplingParams",
    "Scheduler",
    "Segment",
    "StartSample",
    "Statistics",
    "StopAll",
    "Strategy",
    "Trajectory",
    "View",
    "WeightTarget",
    "__version__",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_MODULES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}")
    return getattr(import_module(f"rollover.{PUBLIC_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
