"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted.

The public names are imported when they are first used, so that ``import rollover`` is instant and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.algorithms.config import algorithm as algorithm
    from rollover.engine.base import Capabilities as Capabilities
    from rollover.engine.base import Chunk as Chunk
    from rollover.engine.base import Engine as Engine
    from rollover.engine.base import EngineStats as EngineStats
    from rollover.engine.embedded.config import EmbeddedConfig as EmbeddedConfig
    from rollover.engine.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from rollover.errors import EngineError as EngineError
    from rollover.errors import RewardError as RewardError
    from rollover.errors import RolloverError as RolloverError
    from rollover.rollout.actions import ConsumeBatch as ConsumeBatch
    from rollover.rollout.actions import StartSample as StartSample
    from rollover.rollout.actions import StopAll as StopAll
    from rollover.rollout.config import Limits as Limits
    from rollover.rollout.config import strategy as strategy
    from rollover.rollout.driver import RolloutDriver as RolloutDriver
    from rollover.rollout.journal import Journal as Journal
    from rollover.rollout.journal import restart as restart
    from rollover.rollout.scheduler import GroupRules as GroupRules
    from rollover.rollout.scheduler import Scheduler as Scheduler
    from rollover.rollout.scheduler import Source as Source
    from rollover.rollout.scorer import Scorer as Scorer
    from rollover.rollout.state import RolloutState as RolloutState
    from rollover.run.api import train as train
    from rollover.trainer.config import TrainerConfig as TrainerConfig
    from rollover.trainer.local import LocalTrainer as LocalTrainer
    from rollover.trainer.setup import TrainingSetup as TrainingSetup
    from rollover.types import FinishReason as FinishReason
    from rollover.types import Prompt as Prompt
    from rollover.types import SamplingParams as SamplingParams
    from rollover.types import Segment as Segment
    from rollover.version import __version__ as __version__

PUBLIC_MODULES = {
    "Capabilities": "engine.base",
    "Chunk": "engine.base",
    "ConsumeBatch": "rollout.actions",
    "EmbeddedConfig": "engine.embedded.config",
    "EmbeddedEngine": "engine.embedded.engine",
    "Engine": "engine.base",
    "EngineError": "errors",
    "EngineStats": "engine.base",
    "FinishReason": "types",
    "GroupRules": "rollout.scheduler",
    "Journal": "rollout.journal",
    "Limits": "rollout.config",
    "LocalTrainer": "trainer.local",
    "Prompt": "types",
    "RewardError": "errors",
    "RolloutDriver": "rollout.driver",
    "RolloutState": "rollout.state",
    "RolloverError": "errors",
    "SamplingParams": "types",
    "Scheduler": "rollout.scheduler",
    "Scorer": "rollout.scorer",
    "Segment": "types",
    "Source": "rollout.scheduler",
    "StartSample": "rollout.actions",
    "StopAll": "rollout.actions",
    "TrainerConfig": "trainer.config",
    "TrainingSetup": "trainer.setup",
    "__version__": "version",
    "algorithm": "algorithms.config",
    "restart": "rollout.journal",
    "strategy": "rollout.config",
    "train": "run.api",
}

__all__ = [*PUBLIC_MODULES]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC_MODULES:
        raise AttributeError(f"module 'rollover' has no attribute {name!r}")
    try:
        return getattr(import_module(f"rollover.{PUBLIC_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        from rollover.errors import missing_extra

        raise missing_extra(error) or error from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
