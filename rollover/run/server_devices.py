"""Names the devices of engine servers as PyTorch names them in this process. Importing this module needs no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rollover.cluster.engine_forms import num_devices
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig

if TYPE_CHECKING:
    import torch

UNSEEN = "GPU "
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def server_devices(engine: ServerConfig, number: int) -> list[str]:
    """Return the devices on which the server of this number is started.

    Example: with ``launch_devices = ["4,5", "6,7"]`` server 1 has ``["GPU 6", "GPU 7"]`` if this process sees only the
    first four GPUs, and ``["cuda:6", "cuda:7"]`` if it sees all eight.
    """
    import torch

    device = engine.started().device if isinstance(engine, EmbeddedServerConfig) else "auto"
    if device == "cpu" or not torch.cuda.is_available():
        return ["cpu"]
    ours = _listed(os.environ.get(_VISIBLE)) or [str(index) for index in range(torch.cuda.device_count())]
    given = engine.launch_devices[number] if engine.launch_devices else None
    own = engine.launch_env.get(_VISIBLE, given)
    seen = ours if own is None else _listed(own)
    first = int(device.partition(":")[2] or 0)
    taken = seen[first : first + num_devices(engine.launch_args)]
    return [f"cuda:{ours.index(name)}" if name in ours else UNSEEN + name for name in taken] or ["cpu"]


def numbered(device: torch.device) -> str:
    """Return the name of a device, with its number even for the first GPU.

    Example: "cuda:0" for ``torch.device("cuda")``.
    """
    return f"cuda:{device.index or 0}" if device.type == "cuda" else str(device)


def _listed(visible: str | None) -> list[str]:
    return [name.strip() for name in (visible or "").split(",") if name.strip()]
