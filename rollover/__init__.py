"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted.

The public names are imported when they are first used, so that ``import rollover`` is instant and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.engine.base import Capabilities as Capabilities
    from rollover.engine.base import Chunk as Chunk
    from rollover.engine.base import Engine as Engine
    from rollover.engine.base import GenerateRequest as GenerateRequest
    from rollover.errors import RolloverError as RolloverError
    from rollover.rollout.actions import ConsumeBatch as ConsumeBatch
    from rollover.rollout.actions import StartSample as StartSample
    from rollover.rollout.actions import StopAll as StopAll
    from rollover.rollout.config import Limits as Limits
    from rollover.rollout.driver import RolloutDriver as RolloutDriver
    from rollover.rollout.journal import Journal as Journal
    from rollover.rollout.ledger import Ledger as Ledger
    from rollover.rollout.scheduler import Scheduler as Scheduler
    from rollover.rollout.state import RolloutState as RolloutState
    from rollover.rollout.state import View as View
    from rollover.rollout.statistics import Statistics as Statistics
    from rollover.rollout.strategies import STRATEGIES as STRATEGIES
    from rollover.rollout.strategy import Strategy as Strategy
    from rollover.run.api import train as train
    from rollover.run.config import RunConfig as RunConfig
    from rollover.sim.run import simulate as simulate
    from rollover.types import Batch as Batch
    from rollover.types import FinishReason as FinishReason
    from rollover.types import Group as Group
    from rollover.types import Prompt as Prompt
    from rollover.types import SampleId as SampleId
    from rollover.types import SamplingParams as SamplingParams
    from rollover.types import Segment as Segment
    from rollover.types import Trajectory as Trajectory
    from rollover.version import __version__ as __version__
    from rollover.weights.base import WeightTarget as WeightTarget

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
    "__version__": "version",
    "simulate": "sim.run",
    "train": "run.api",
}

__all__ = [*PUBLIC_MODULES]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_MODULES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}")
    return getattr(import_module(f"rollover.{PUBLIC_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
