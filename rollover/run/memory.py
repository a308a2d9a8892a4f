"""Computes how much memory a run needs on its devices, engines included, and what to change if it is too much."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollover.algorithms.config import resolve
from rollover.engine.devices import UNSEEN, numbered
from rollover.run.config import RunConfig
from rollover.run.trainers import model_shape
from rollover.trainer.checks import SHARDED

if TYPE_CHECKING:
    import torch

_KEPT = ("weights", "reference policy", "optimizer")
"""The parts that the trainer keeps from step to step, while it releases the others."""
_OFFLOADED = "offloaded weights, gradients and optimizer"
_ON_CLUSTER = " on the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The most bytes that a run takes on one device, by purpose."""

    device: str
    capacity: int | None
    """``None`` for a device of another machine, which is not known here."""
    parts: Mapping[str, int]
    turn: str = ""
    """The phase in which this much is used, when engine and trainer take turns."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in self.parts.items() if num_bytes)
        needed = f"memory of {self.device}: needs up to {_size(self.total)}{self.turn and ' ' + self.turn}"
        if self.capacity is None:
            return f"{needed} ({parts})"
        return f"{needed}, {_size(self.capacity)} available: {'fits' if self.fits else 'does not fit'} ({parts})"


def memory_lines(config: RunConfig) -> list[str]:
    """Describe how much memory trainer and engines take on each device, which engines this leaves out, and which
    setting to change if it is too much. Activations are counted for the largest pass that responses of the greatest
    length cause.

    Raises ``ConfigError`` or ``ModelError`` as opening the trainer would, for a device or a model that cannot be used.
    """
    needed = device_memory(config)
    lines = [*map(str, needed), *_uncounted(config), *_left_to_servers(config, needed)]
    if too_small := [memory for memory in needed if not memory.fits]:
        devices = " and ".join(memory.device for memory in too_small)
        lines.append(f"warning: {devices} will run out of memory: {_advice(config, too_small[0])}")
    return lines


def device_memory(config: RunConfig) -> list[DeviceMemory]:
    """Compute the memory that trainer and engines take on each device."""
    from rollover.trainer.memory import training_memory

    training = training_memory(
        config.trainer,
        model_shape(config),
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_response_tokens=config.rollout.max_new_tokens,
        batch_samples=config.rollout.rollout_batch_size * config.rollout.group_size,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        needs_ref=resolve(config.algorithm).needs_ref,
        base_dtype=_base_format(config),
    )
    trainers, engines = Counter(_trainer_devices(config)), _engines(config, training.num_parameters)
    machine = "cpu" if config.cluster is None else f"the machine of {next(iter(trainers))}"
    if training.offloaded:
        offloaded = engines.setdefault(machine, {})
        offloaded[_OFFLOADED] = training.offloaded * (trainers.total() if config.cluster is None else 1)
    found = []
    for device in dict.fromkeys([*trainers, *engines]):
        # All ranks on a CPU share one memory; on the cluster, each rank and server is described.
        ranks = trainers[device]
        parts = {name: num_bytes * ranks for name, num_bytes in training.parts.items()} if ranks else {}
        of_engines, turn = engines.get(device, {}), ""
        if parts and config.engine.declared.is_colocated and of_engines:
            kept = {name: parts.pop(name) for name in _KEPT}
            trains = sum(parts.values()) >= sum(of_engines.values())
            turn = "while it trains" if trains else "while it generates"
            parts, of_engines = {**kept, **(parts if trains else of_engines)}, {}
        found.append(DeviceMemory(device=device, capacity=_capacity(device), parts={**parts, **of_engines}, turn=turn))
    return found


def _trainer_devices(config: RunConfig) -> list[str]:
    from rollover.trainer.devices import rank_devices
    from rollover.trainer.models import pick_device

    trainer = config.trainer
    if config.cluster is not None:
        return [("each rank" if trainer.num_devices > 1 else "the trainer") + _ON_CLUSTER]
    return [numbered(pick_device(trainer.device))] if trainer.num_devices == 1 else [*rank_devices(trainer)]


def _engine_devices(config: RunConfig) -> list[str]:
    if config.cluster is not None and config.cluster.num_engines:
        return ["each engine server" + _ON_CLUSTER]
    return [*config.engine.devices()]


def _engines(config: RunConfig, num_parameters: int) -> dict[str, dict[str, int]]:
    """Return the memory that the engines of each device take together, by purpose, as far as their settings determine
    it.
    """
    found: dict[str, Counter[str]] = {}
    model = model_shape(config)
    for device in _engine_devices(config):
        capacity = None if device == "cpu" else _capacity(device)
        parts = config.engine.memory(num_parameters, model, on_gpu=device != "cpu", capacity=capacity)
        if parts is not None:
            found.setdefault(device, Counter()).update({f"engines' {name}": size for name, size in parts.items()})
    return {device: dict(parts) for device, parts in found.items()}


def _uncounted(config: RunConfig) -> Iterator[str]:
    """Yield which engines are left out."""
    engine, devices = config.engine, _engine_devices(config)
    if devices and _engines(config, 1).keys() >= {*devices}:
        return
    said = f"memory: engines of engine.kind {engine.kind!r} are not included"
    if any(device.startswith("cuda") for device in devices):
        said += f": name their share of a GPU in engine.launch_args, as in {engine.memory_share_argument} 0.6"
    yield said


def _left_to_servers(config: RunConfig, needed: list[DeviceMemory]) -> Iterator[str]:
    """Yield which share of a device is left to servers that take turns with the trainer."""
    argument = config.engine.memory_share_argument
    if argument is None or not config.engine.declared.is_colocated:
        return
    for memory in needed:
        if memory.capacity is not None and memory.parts.keys() >= {*_KEPT}:
            kept = sum(memory.parts[name] for name in _KEPT)
            yield (
                f"memory of {memory.device} while servers generate: the trainer keeps {_size(kept)}; servers there may"
                f" take at most {max(0.0, 1 - kept / memory.capacity):.2f} of the device ({argument})"
            )


def _advice(config: RunConfig, memory: DeviceMemory) -> str:
    """Return a change of settings that makes the largest part smaller that can be."""
    trainer, longest = config.trainer, config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    remedies = {"engines' cache": "lower engine.kv_cache_bytes"}
    if not trainer.gradient_checkpointing:
        remedies["activations"] = "set trainer.gradient_checkpointing = true"
    elif trainer.micro_batch_tokens > longest:
        remedies["activations"] = f"lower trainer.micro_batch_tokens, down to {longest} (the longest sample)"
    if trainer.lora is None:
        adapters = "train adapters, [trainer.lora]"
        can_offload = not trainer.offload and memory.device != "cpu" and model_shape(config)["model_type"] in SHARDED
        offload = f"set trainer.offload = true, or {adapters}" if can_offload else adapters
        over = memory.total - (memory.capacity or memory.total)
        if trainer.optimizer == "adamw" and not trainer.is_sharded and memory.parts.get("optimizer", 0) * 0.7 > over:
            offload = f"set trainer.optimizer = 'adamw_8bit', or {offload}"
        remedies |= {"optimizer": offload, "gradients": offload, _OFFLOADED: adapters}
    if (argument := config.engine.memory_share_argument) is not None:
        remedies["engines' share"] = f"lower {argument} in engine.launch_args"
    largest = max((name for name in memory.parts if name in remedies), key=memory.parts.__getitem__, default=None)
    if largest is None or memory.capacity is None or memory.parts[largest] < memory.total - memory.capacity:
        return "take a smaller model, or a device with more memory"
    return remedies[largest]


def _base_format(config: RunConfig) -> torch.dtype:
    """Return the number format in which the weights of the run's model are held beside adapters."""
    import torch

    from rollover.hf.hub import resolve_model
    from rollover.hf.weights import frozen_format
    from rollover.trainer.lora import base_format

    if config.model.path is None:
        return torch.float32
    folder, model = resolve_model(config.model.path, weights=False), model_shape(config)
    if any(folder.glob("*.safetensors")):
        return base_format(folder)
    named = model.get("dtype") or model.get("torch_dtype") or "bfloat16"
    return getattr(torch, frozen_format(str(named).removeprefix("torch.")), torch.bfloat16)


def _capacity(device: str) -> int | None:
    """Return the memory of a GPU, or of the machine; ``None`` for a device that this process does not see."""
    import torch

    if device.endswith(_ON_CLUSTER) or device.startswith(UNSEEN):
        return None
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: int) -> str:
    """Format bytes for people, as in "512 MiB" and "1.3 GiB"."""
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1000 else f"{mib / 1024:,.1f} GiB"
