"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted.

The public names are imported when they are first used, so that ``import rollover`` is instant and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.engine.base import Capabilities as Capabilities
    from rollover.engine.base import Chunk as Chunk
    from rollover.engine.base import Engine as Engine
    from rollover.engine.base import EngineStats as EngineStats
    from rollover.engine.base import GenerateRequest as GenerateRequest
    from rollover.errors import EngineError as EngineError
    from rollover.errors import RewardError as RewardError
    from rollover.errors import RolloverError as RolloverError
    from rollover.rollout.actions import ConsumeBatch as ConsumeBatch
    from rollover.rollout.actions import StartSample as StartSample
    from rollover.rollout.actions import StopAll as StopAll
    from rollover.rollout.config import Limits as Limits
    from rollover.rollout.config import strategy as strategy
    from rollover.rollout.driver import RolloutDriver as RolloutDriver
    from rollover.rollout.driver import Scorer as Scorer
    from rollover.rollout.journal import Journal as Journal
    from rollover.rollout.journal import restart as restart
    from rollover.rollout.ledger import Ledger as Ledger
    from rollover.rollout.scheduler import Scheduler as Scheduler
    from rollover.rollout.scheduler import Source as Source
    from rollover.rollout.state import RolloutState as RolloutState
    from rollover.rollout.state import View as View
    from rollover.rollout.strategies import STRATEGIES as STRATEGIES
    from rollover.rollout.strategy import OnFull as OnFull
    from rollover.rollout.strategy import Strategy as Strategy
    from rollover.run.api import train as train
    from rollover.run.config import RunConfig as RunConfig
    from rollover.run.loading import load as load
    from rollover.sim.run import simulate as simulate
    from rollover.sim.scenario import ReplicaModel as ReplicaModel
    from rollover.sim.scenario import Scenario as Scenario
    from rollover.types import Batch as Batch
    from rollover.types import FinishReason as FinishReason
    from rollover.types import Group as Group
    from rollover.types import Prompt as Prompt
    from rollover.types import SampleId as SampleId
    from rollover.types import SamplingParams as SamplingParams
    from rollover.types import Segment as Segment
    from rollover.types import Trajectory as Trajectory
    from rollover.version import __version__ as __version__
    from rollover.workload.base import Workload as Workload

PUBLIC_MODULES = {
    "STRATEGIES": "rollout.strategies",
    "Batch": "types",
    "Capabilities": "engine.base",
    "Chunk": "engine.base",
    "ConsumeBatch": "rollout.actions",
    "Engine": "engine.base",
    "EngineError": "errors",
    "EngineStats": "engine.base",
    "FinishReason": "types",
    "GenerateRequest": "engine.base",
    "Group": "types",
    "Journal": "rollout.journal",
    "Ledger": "rollout.ledger",
    "Limits": "rollout.config",
    "OnFull": "rollout.strategy",
    "Prompt": "types",
    "ReplicaModel": "sim.scenario",
    "RewardError": "errors",
    "RolloutDriver": "rollout.driver",
    "RolloutState": "rollout.state",
    "RolloverError": "errors",
    "RunConfig": "run.config",
    "SampleId": "types",
    "SamplingParams": "types",
    "Scenario": "sim.scenario",
    "Scheduler": "rollout.scheduler",
    "Scorer": "rollout.driver",
    "Segment": "types",
    "Source": "rollout.scheduler",
    "StartSample": "rollout.actions",
    "StopAll": "rollout.actions",
    "Strategy": "rollout.strategy",
    "Trajectory": "types",
    "View": "rollout.state",
    "Workload": "workload.base",
    "__version__": "version",
    "load": "run.loading",
    "restart": "rollout.journal",
    "simulate": "sim.run",
    "strategy": "rollout.config",
    "train": "run.api",
}

__all__ = [*PUBLIC_MODULES]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_MODULES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}")
    return getattr(import_module(f"rollover.{PUBLIC_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
