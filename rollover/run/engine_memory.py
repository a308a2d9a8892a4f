"""Computes how much memory engines take on each device, as far as the settings of a run determine it.

Importing this module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from rollover.cluster.engine_forms import num_devices
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.arguments import argument
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.errors import ConfigError
from rollover.run.config import RunConfig

if TYPE_CHECKING:
    import torch

EACH_ON_CLUSTER = "each engine server on the cluster"
_UNSEEN = "GPU "
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes that one engine takes of one device.

    Example: ``EngineMemory(device="cuda:1", weights=2**30, cache=8 * 2**30)``
    """

    device: str
    """PyTorch's name of the device, ``GPU 4`` when this process does not see it, or ``EACH_ON_CLUSTER``."""
    weights: int = 0
    cache: int = 0
    share: int = 0
    """Bytes of a server that is given a share of the device for everything that it stores."""

    def parts(self) -> dict[str, int]:
        """Return the bytes by purpose."""
        return {"weights": self.weights, "cache": self.cache, "share": self.share}


def engine_memory(
    config: RunConfig, num_parameters: int, capacity: Callable[[str], int | None]
) -> Iterator[EngineMemory]:
    """Yield the memory of each engine on each device: the embedded engine, servers of it that the run starts, and
    servers of vLLM and SGLang whose arguments name their share of a GPU.

    Args:
        capacity: returns the bytes of a device, or ``None`` if they are not known.
    """
    from rollover.engine.embedded import sizing

    def embedded(engine: EmbeddedConfig, device: str) -> EngineMemory:
        weights = num_parameters * sizing.dtype_of(engine).itemsize
        return EngineMemory(device=device, weights=weights, cache=engine.kv_cache_bytes)

    engine = config.engine
    if isinstance(engine, EmbeddedConfig):
        yield embedded(engine, numbered(sizing.device_of(engine.device)))
    elif isinstance(engine, EmbeddedServerConfig) and engine.launch:
        started = _started(engine)
        if _on_cluster(config):
            on_gpu = replace(started, dtype="bfloat16") if started.dtype == "auto" else started
            yield embedded(on_gpu, EACH_ON_CLUSTER)
            return
        for number in range(engine.num_servers):
            yield embedded(started, server_devices(engine, number)[0])
    elif isinstance(engine, ServerConfig) and (share := _share(config)) is not None:
        for number in range(engine.num_servers):
            for device in server_devices(engine, number):
                if device != "cpu" and (size := capacity(device)) is not None:
                    yield EngineMemory(device=device, share=int(share * size))


def uncounted(config: RunConfig) -> str | None:
    """Describe the engines that ``engine_memory`` leaves out, if any."""
    engine = config.engine
    if not isinstance(engine, ServerConfig):
        return None
    if not engine.launch:
        return f"memory: this does not include the {_many(len(engine.urls))} of engine.urls, already running"
    if engine.memory_share_argument is None:
        return None
    kind = engine.kind
    if _on_cluster(config):
        return f"memory: this does not include the {kind} servers on the cluster"
    servers = _many(engine.num_servers, kind)
    devices = {device for number in range(engine.num_servers) for device in server_devices(engine, number)}
    if devices == {"cpu"}:
        return f"memory: this does not include the CPU memory of the {servers}"
    if _share(config) is None:
        return (
            f"memory: this does not include the {servers}: to include them, name their share of a GPU in"
            f" engine.launch_args, as in {engine.memory_share_argument} 0.6"
        )
    return None


def server_devices(engine: ServerConfig, number: int) -> list[str]:
    """Return the devices on which the server of this number is started, by PyTorch's names in this process.

    Example: with ``launch_devices = ["4,5", "6,7"]`` server 1 has ``["GPU 6", "GPU 7"]`` if this process sees only the
    first four GPUs, and ``["cuda:6", "cuda:7"]`` if it sees all eight.
    """
    import torch

    device = _started(engine).device if isinstance(engine, EmbeddedServerConfig) else "auto"
    if device == "cpu" or not torch.cuda.is_available():
        return ["cpu"]
    ours = _listed(os.environ.get(_VISIBLE)) or [str(index) for index in range(torch.cuda.device_count())]
    given = engine.launch_devices[number] if engine.launch_devices else None
    own = engine.launch_env.get(_VISIBLE, given)
    seen = ours if own is None else _listed(own)
    first = int(device.partition(":")[2] or 0)
    taken = seen[first : first + num_devices(engine.launch_args)]
    return [f"cuda:{ours.index(name)}" if name in ours else _UNSEEN + name for name in taken] or ["cpu"]


def numbered(device: torch.device) -> str:
    """Return the name of a device, with its number even for the first GPU.

    Example: "cuda:0" for ``torch.device("cuda")``.
    """
    return f"cuda:{device.index or 0}" if device.type == "cuda" else str(device)


def is_unseen(device: str) -> bool:
    """Return whether this process has no access to a device that ``engine_memory`` names."""
    return device == EACH_ON_CLUSTER or device.startswith(_UNSEEN)


def _started(engine: EmbeddedServerConfig) -> EmbeddedConfig:
    """Return the settings of the engine in each server, including those that ``launch_args`` override."""
    args, settings = engine.launch_args, engine.embedded()
    device, dtype = argument(args, "--device"), argument(args, "--dtype")
    try:
        return EmbeddedConfig(
            device=device or settings.device,
            dtype=cast(Any, dtype or settings.dtype),
            kv_cache_bytes=int(argument(args, "--kv-cache-bytes") or settings.kv_cache_bytes),
        )
    except ValueError as error:
        raise ConfigError(f"engine.launch_args: {error}") from None


def _share(config: RunConfig) -> float | None:
    engine = config.engine
    if not isinstance(engine, ServerConfig) or not engine.launch or _on_cluster(config):
        return None
    try:
        return float(argument(engine.launch_args, engine.memory_share_argument or "") or "")
    except ValueError:
        return None


def _on_cluster(config: RunConfig) -> bool:
    return config.cluster is not None and config.cluster.num_engines > 0


def _listed(visible: str | None) -> list[str]:
    return [name.strip() for name in (visible or "").split(",") if name.strip()]


def _many(count: int, kind: str = "") -> str:
    return f"{count} {kind and kind + ' '}server{'s' * (count != 1)}"


def all_parts(engines: Sequence[EngineMemory]) -> dict[str, dict[str, int]]:
    """Return the memory that the engines of each device take together, by purpose.

    Example: ``{"cuda:0": {"weights of 2 engines": 2 * 2**30, "cache of 2 engines": 2**34}}``
    """
    of_device: dict[str, list[EngineMemory]] = {}
    for engine in engines:
        of_device.setdefault(engine.device, []).append(engine)
    found: dict[str, dict[str, int]] = {}
    for device, there in of_device.items():
        owner = "engine's {}" if len(there) == 1 else f"{{}} of {len(there)} engines"
        sums = {name: sum(engine.parts()[name] for engine in there) for name in there[0].parts()}
        found[device] = {owner.format(name): num_bytes for name, num_bytes in sums.items() if num_bytes}
    return found
