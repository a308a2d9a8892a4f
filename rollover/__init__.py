"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted.

The public names are imported when they are first used, so that ``import rollover`` is instant and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollover.engine.base import Capabilities, Chunk, Engine, GenerateRequest
    from rollover.errors import RolloverError
    from rollover.rollout.config import RolloutConfig
    from rollover.rollout.driver import RolloutDriver
    from rollover.rollout.journal import Journal
    from rollover.rollout.ledger import Ledger
    from rollover.rollout.scheduler import Scheduler
    from rollover.rollout.strategies import STRATEGIES
    from rollover.rollout.strategy import Strategy
    from rollover.run.api import train
    from rollover.run.config import RunConfig
    from rollover.sim.run import simulate
    from rollover.types import Batch, FinishReason, Group, Prompt, SampleId, SamplingParams, Segment, Trajectory
    from rollover.weights.base import WeightTarget

_MODULES = {
    "STRATEGIES": "rollout.strategies",
    "Batch": "types",
    "Capabilities": "engine.base",
    "Chunk": "engine.base",
    "Engine": "engine.base",
    "FinishReason": "types",
    "GenerateRequest": "engine.base",
    "Group": "types",
    "Journal": "rollout.journal",
    "Ledger": "rollout.ledger",
    "Prompt": "types",
    "RolloutConfig": "rollout.config",
    "RolloutDriver": "rollout.driver",
    "RolloverError": "errors",
    "RunConfig": "run.config",
    "SampleId": "types",
    "SamplingParams": "types",
    "Scheduler": "rollout.scheduler",
    "Segment": "types",
    "Strategy": "rollout.strategy",
    "Trajectory": "types",
    "WeightTarget": "weights.base",
    "simulate": "sim.run",
    "train": "run.api",
}

__all__ = [
    "STRATEGIES",
    "Batch",
    "Capabilities",
    "Chunk",
    "Engine",
    "FinishReason",
    "GenerateRequest",
    "Group",
    "Journal",
    "Ledger",
    "Prompt",
    "RolloutConfig",
    "RolloutDriver",
    "RolloverError",
    "RunConfig",
    "SampleId",
    "SamplingParams",
    "Scheduler",
    "Segment",
    "Strategy",
    "Trajectory",
    "WeightTarget",
    "__version__",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}")
    return getattr(import_module(f"rollover.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
