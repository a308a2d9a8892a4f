"""The scheduler inside verl: ``AgentLoopManager`` takes its prompts, and ``ReplayBuffer`` returns batches.

Both are imported, and verl with them, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.integrations.verl.manager import AgentLoopManager as AgentLoopManager
    from rollover.integrations.verl.sampler import ReplayBuffer as ReplayBuffer

_MODULES = {"AgentLoopManager": "manager", "ReplayBuffer": "sampler"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rollover.integrations.verl' has no attribute {name!r}")
    return getattr(import_module(f"rollover.integrations.verl.{_MODULES[name]}"), name)
