"""Names devices as PyTorch names them in this process. Importing this module needs no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rollover.errors import ConfigError

if TYPE_CHECKING:
    import torch

UNSEEN = "GPU "
"""Begins the name of a device that this process does not see."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(name: str) -> torch.device:
    """Return the device that the config of an engine names; ``auto`` prefers a GPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r}, but PyTorch sees no GPU; use 'cpu' or 'auto'")
    return torch.device(name)


def device_here(name: str) -> torch.device:
    """Return the device, as ``device_of`` does, on which this process will compute."""
    import torch

    device = device_of(name)
    if device.type == "cuda" and (device.index or 0) >= (number := torch.cuda.device_count()):
        raise ConfigError(f"device = {name!r}, but the last GPU that PyTorch sees is cuda:{number - 1}")
    return device


def numbered(device: torch.device) -> str:
    """Return the name of a device, with its number even for the first GPU."""
    return f"cuda:{device.index or 0}" if device.type == "cuda" else str(device)


def devices_of_process(device: str, count: int, visible: str | None) -> list[str]:
    """Return the devices that a process on this machine takes, if it sees the GPUs that ``visible`` lists.

    Args:
        device: the first of them, by its name in that process.
        visible: in the form of ``CUDA_VISIBLE_DEVICES``; ``None`` if it sees the same GPUs as this process.

    Example: with "6,7", two devices from "auto" on are ``["GPU 6", "GPU 7"]`` if this process sees only the first four
    GPUs, and ``["cuda:6", "cuda:7"]`` if it sees all eight.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return ["cpu"]
    ours = _listed(os.environ.get(VISIBLE)) or [str(index) for index in range(torch.cuda.device_count())]
    seen = ours if visible is None else _listed(visible)
    first = int(device.partition(":")[2] or 0)
    taken = seen[first : first + count]
    return [f"cuda:{ours.index(name)}" if name in ours else UNSEEN + name for name in taken] or ["cpu"]


def _listed(visible: str | None) -> list[str]:
    return [name.strip() for name in (visible or "").split(",") if name.strip()]
