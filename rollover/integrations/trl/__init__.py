"""The scheduler inside TRL: ``GRPOTrainer`` for its trainer, ``rollout_worker`` for its asynchronous one.

They are imported, and TRL with them, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.integrations.trl.asynchronous import rollout_worker as rollout_worker
    from rollover.integrations.trl.trainer import GRPOTrainer as GRPOTrainer
    from rollover.integrations.trl.worker import RolloutWorker as RolloutWorker

_MODULES = {"GRPOTrainer": "trainer", "RolloutWorker": "worker", "rollout_worker": "asynchronous"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollover.integrations.trl' has no attribute {name!r}")
    from rollover.integrations.trl.checks import check_version

    check_version()
    return getattr(import_module(f"rollover.integrations.trl.{_MODULES[name]}"), name)
