"""Weights that are to be sent over NCCL: what this needs is looked for before a run begins.

Importing this module needs no torch.
"""

from __future__ import annotations

from rollover.errors import ConfigError, EngineError
from rollover.run.config import RunConfig


def check_transfer(config: RunConfig) -> None:
    """Raise ``ConfigError`` where weights are to be sent over NCCL and this process cannot: it sends the first ones,
    also where the trainer's ranks on a cluster send the others."""
    if getattr(config.engine, "weight_transfer", "folder") != "nccl":
        return
    from rollover.weights.groups import check_nccl

    try:
        check_nccl()
    except EngineError as error:
        raise ConfigError(str(error)) from None
