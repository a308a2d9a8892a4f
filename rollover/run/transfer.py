"""Weights that are to be sent over NCCL: what this needs is looked for before a run begins.

Importing this module needs no torch.
"""

from __future__ import annotations

from rollover.errors import ConfigError, EngineError
from rollover.run.config import RunConfig
from rollover.run.engine_memory import numbered


def check_transfer(config: RunConfig) -> None:
    """Raise ``ConfigError`` where weights are to be sent over NCCL and this process cannot: it sends the first ones,
    also where the trainer's ranks on a cluster send the others."""
    if not _is_over_nccl(config):
        return
    from rollover.weights.groups import check_nccl

    try:
        check_nccl()
    except EngineError as error:
        raise ConfigError(str(error)) from None


def sending_device(config: RunConfig) -> str | None:
    """Return the GPU from which this process sends weights over NCCL; ``None`` where it sends none so.

    Example: "cuda:1" for ``trainer.device = "cuda:1"``, and "cuda:0" where the trainer's ranks have several GPUs.
    """
    if not _is_over_nccl(config):
        return None
    if config.trainer.num_devices > 1:
        return "cuda:0"
    from rollover.trainer.models import pick_device

    device = numbered(pick_device(config.trainer.device))
    return device if device.startswith("cuda") else "cuda:0"


def _is_over_nccl(config: RunConfig) -> bool:
    return getattr(config.engine, "weight_transfer", "folder") == "nccl"
