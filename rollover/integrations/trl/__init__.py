"""The scheduler inside TRL: ``GRPOTrainer`` takes the place of TRL's own.

It is imported, and TRL with it, when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollover.integrations.trl.trainer import GRPOTrainer as GRPOTrainer

__all__ = ["GRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name != "GRPOTrainer":
        raise AttributeError(f"module 'rollover.integrations.trl' has no attribute {name!r}")
    from rollover.integrations.trl.checks import check_version

    check_version()
    from rollover.integrations.trl.trainer import GRPOTrainer

    return GRPOTrainer
