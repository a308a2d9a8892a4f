"""The devices of a sharded trainer: which rank has which, and whether they exist."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rollover.errors import ConfigError
from rollover.trainer.config import StepConfig


def rank_devices(config: StepConfig) -> tuple[str, ...]:
    """Return the device of each rank by PyTorch's name.

    Raises ``ConfigError`` when there are too few, or ranks cannot communicate.
    """
    num, kind, key = config.num_devices, config.device, f"{config.section}.num_devices"
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"{config.section}.device {config.device!r} cannot be used with {key} = {num}: set 'auto', 'cuda' or"
            " 'cpu' (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    if not dist.is_available():
        raise ConfigError(f"{key} = {num} needs a PyTorch built with torch.distributed; set it to 1")
    if kind == "cpu":
        most = max(4, os.cpu_count() or 1)
        if num > most:
            raise ConfigError(f"{key} is {num}, but at most {most} processes may train on this machine's CPU: lower it")
        if not dist.is_gloo_available():
            raise ConfigError(f"{key} = {num} on the CPU needs a PyTorch with gloo; set it to 1")
        return ("cpu",) * num
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num > there:
        gpus = "1 GPU" if there == 1 else f"{there} GPUs"
        raise ConfigError(f"{key} is {num}, but {gpus} can be seen: lower it, or check CUDA_VISIBLE_DEVICES")
    if not dist.is_nccl_available():
        raise ConfigError(f"{key} = {num} on GPUs needs a PyTorch with NCCL; set it to 1")
    return tuple(f"cuda:{index}" for index in range(num))
