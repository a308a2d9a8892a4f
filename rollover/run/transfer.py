"""Weights that are to be sent over NCCL: what this needs is looked for before a run begins.

Importing this module needs no torch.
"""

from __future__ import annotations

from rollover.engine.servers.config import ServerConfig
from rollover.errors import ConfigError, EngineError
from rollover.run.config import RunConfig
from rollover.run.server_devices import numbered, server_devices


def check_transfer(config: RunConfig) -> None:
    """Raise ``ConfigError`` where weights are to be sent over NCCL and cannot be.

    This process sends the first ones, even where the trainer's ranks on a cluster send the others, and NCCL refuses a
    group that has two members on one GPU.
    """
    if not _is_over_nccl(config):
        return
    from rollover.weights.groups import check_nccl

    try:
        check_nccl()
    except EngineError as error:
        raise ConfigError(str(error)) from None
    engine, sender = config.engine, sending_device(config)
    assert isinstance(engine, ServerConfig), "other engines take no weights over NCCL"
    if engine.colocated:
        raise ConfigError(
            "engine.weight_transfer 'nccl' connects different GPUs only, but with engine.colocated = true servers and"
            " trainer have the same ones: set engine.weight_transfer to 'folder'"
        )
    is_here = engine.launch and (config.cluster is None or not config.cluster.num_engines)
    for number in range(engine.num_servers if is_here else 0):
        if sender in server_devices(engine, number):
            raise ConfigError(
                f"engine.weight_transfer 'nccl' connects different GPUs only, but server {number} is started on"
                f" {sender}, from which the trainer sends: give the servers other GPUs with engine.launch_devices, or"
                " set engine.weight_transfer to 'folder'"
            )


def sending_device(config: RunConfig) -> str | None:
    """Return the GPU from which this process sends weights over NCCL; ``None`` where it sends none so.

    Example: "cuda:1" for ``trainer.device = "cuda:1"``, and "cuda:0" where the trainer is in processes of its own.
    """
    if not _is_over_nccl(config):
        return None
    if config.trainer.num_devices > 1 or config.cluster is not None:
        return "cuda:0"
    from rollover.trainer.models import pick_device

    device = numbered(pick_device(config.trainer.device))
    return device if device.startswith("cuda") else "cuda:0"


def _is_over_nccl(config: RunConfig) -> bool:
    return getattr(config.engine, "weight_transfer", "folder") == "nccl"
