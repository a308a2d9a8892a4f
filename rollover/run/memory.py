"""Works out what a run needs of the memory of its devices, and what to change where that is too much.

Importing this module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.algorithms.config import resolve
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.config import ServerConfig
from rollover.run.config import RunConfig
from rollover.run.engine import fitted
from rollover.trainer.config import LoraConfig, TrainerConfig

if TYPE_CHECKING:
    import torch

_KEPT = ("weights", "reference policy", "optimizer")
"""What the trainer keeps from step to step, whatever it gives back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that a run takes on one device at most, by what takes them.

    Example: ``DeviceMemory(device="cuda:0", capacity=80 * 2**30, parts={"weights": 2**30})`` fits.
    """

    device: str
    capacity: int | None
    """``None`` where it is that of another machine, which is not known here."""
    parts: Mapping[str, int]
    turn: str = ""
    """When so much is taken, where engine and trainer take turns."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in self.parts.items() if num_bytes)
        if self.capacity is None:
            return f"memory of {self.device}: {_size(self.total)} at most: {parts}"
        verdict = "fits" if self.fits else "does not fit"
        most = f"{_size(self.total)} of {_size(self.capacity)} at most{self.turn and ' ' + self.turn}"
        return f"memory of {self.device}: {most}, {verdict}: {parts}"


def memory_lines(config: RunConfig) -> list[str]:
    """Say what the trainer and the embedded engine take on each device, and which setting to change if that is too
    much. Activations are those of the largest pass that responses of the greatest length make.

    Raises ``ConfigError`` or ``ModelError`` as opening the trainer would, for a device or a model that cannot be used.
    """
    needed = device_memory(config)
    lines = [*map(str, needed), *_left_to_servers(config, needed)]
    if too_small := [memory.device for memory in needed if not memory.fits]:
        advice = next((said for said, changed in _remedies(config) if _all_fit(changed)), None)
        lines.append(
            f"warning: {' and '.join(too_small)} will run out of memory: "
            + (advice or "take a smaller model, or a device with more memory")
        )
    return lines


def device_memory(config: RunConfig) -> list[DeviceMemory]:
    """Work out the memory of each device that trainer and embedded engine take."""
    from rollover.trainer.memory import training_memory

    model, base_dtype = _model(config)
    r = config.rollout
    training = training_memory(
        config.trainer,
        model,
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_response_tokens=r.max_new_tokens,
        batch_samples=r.rollout_batch_size * r.group_size,
        temperature=r.temperature,
        needs_ref=resolve(config.algorithm).needs_ref,
        base_dtype=base_dtype,
    )
    of_trainer = {
        "weights": training.weights,
        "reference policy": training.reference,
        "gradients": training.gradients,
        "optimizer": training.optimizer,
        "activations": training.activations,
        "logits": training.logits,
        "gathered weights": training.gathered,
    }
    parts: dict[torch.device, dict[str, int]] = {}
    elsewhere = []
    if config.cluster is not None and config.trainer.num_devices > 1:
        elsewhere.append(DeviceMemory(device="each rank on the cluster", capacity=None, parts=of_trainer))
    for device in () if elsewhere else _trainer_devices(config.trainer):  # on the CPU all ranks share one memory
        held = parts.setdefault(device, dict.fromkeys(of_trainer, 0))
        held.update({name: held[name] + num_bytes for name, num_bytes in of_trainer.items()})
    turns: dict[torch.device, str] = {}
    if isinstance(config.engine, EmbeddedConfig):
        device, of_engine = _engine_parts(config, config.engine, model, training.num_parameters)
        held = parts.setdefault(device, {})
        if config.engine.colocated and held:
            parts[device], turns[device] = _larger_turn(held, of_engine)
        else:
            held.update(of_engine)
    here = [
        DeviceMemory(device=str(d), capacity=_capacity(d), parts=p, turn=turns.get(d, "")) for d, p in parts.items()
    ]
    return [*elsewhere, *here]


def _larger_turn(of_trainer: Mapping[str, int], of_engine: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Return what is held when trainer and engine do not hold theirs at the same time, and whose turn that is. What the
    trainer keeps from step to step is there in both."""
    kept = {name: of_trainer[name] for name in _KEPT}
    in_step = {name: num_bytes for name, num_bytes in of_trainer.items() if name not in _KEPT}
    if sum(in_step.values()) >= sum(of_engine.values()):
        return {**kept, **in_step}, "while it trains"
    return {**kept, **of_engine}, "while it generates"


def _left_to_servers(config: RunConfig, needed: Sequence[DeviceMemory]) -> Iterator[str]:
    """Say which share of a device servers may take that have it in turn with the trainer."""
    if not isinstance(config.engine, ServerConfig) or not config.engine.colocated:
        return
    for memory in needed:
        if memory.capacity is None:
            continue
        kept = sum(memory.parts[name] for name in _KEPT)
        share = max(0.0, 1 - kept / memory.capacity)
        yield (
            f"memory of {memory.device} while servers generate: the trainer keeps {_size(kept)}; servers there may take"
            f" at most {share:.2f} of it (--gpu-memory-utilization of vLLM, --mem-fraction-static of SGLang)"
        )


def _trainer_devices(trainer: TrainerConfig) -> list[torch.device]:
    """Return the device of each rank."""
    import torch

    from rollover.trainer.devices import rank_devices
    from rollover.trainer.models import pick_device

    if trainer.num_devices == 1:
        return [pick_device(trainer.device)]
    return [torch.device(name) for name in rank_devices(trainer)]


def _engine_parts(
    config: RunConfig, engine: EmbeddedConfig, model: Mapping[str, Any], num_parameters: int
) -> tuple[torch.device, dict[str, int]]:
    from rollover.engine.embedded import sizing
    from rollover.hf.architecture import Architecture

    engine = fitted(engine, config, Architecture.from_config(model))
    weights = num_parameters * sizing.dtype_of(engine).itemsize
    return sizing.device_of(engine.device), {"engine's weights": weights, "engine's cache": engine.kv_cache_bytes}


def _remedies(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes of settings, those first that cost least, each on top of those before."""
    trainer = config.trainer
    if not trainer.gradient_checkpointing:
        trainer = replace(trainer, gradient_checkpointing=True)
        yield "set trainer.gradient_checkpointing = true", replace(config, trainer=trainer)
    said = "" if config.trainer.gradient_checkpointing else "set trainer.gradient_checkpointing = true and "
    longest = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    while trainer.micro_batch_tokens > longest:
        trainer = replace(trainer, micro_batch_tokens=max(longest, trainer.micro_batch_tokens // 2))
        advice = f"{said}lower trainer.micro_batch_tokens to {trainer.micro_batch_tokens}"
        yield advice, replace(config, trainer=trainer)
    if trainer.lora is None:
        yield "train adapters, [trainer.lora]", replace(config, trainer=replace(config.trainer, lora=LoraConfig()))
        adapters = replace(trainer, lora=LoraConfig())
        yield f"train adapters, [trainer.lora], and {advice}", replace(config, trainer=adapters)


def _all_fit(config: RunConfig) -> bool:
    return all(memory.fits for memory in device_memory(config))


def _model(config: RunConfig) -> tuple[Mapping[str, Any], torch.dtype]:
    """The ``config.json`` of the run's model, and the number format of its folder."""
    import torch

    from rollover.hf.config import read_model_config
    from rollover.hf.hub import resolve_model
    from rollover.trainer.lora import number_format

    if config.model.scratch is not None:
        return config.model.scratch.model_config(config.model.scratch.vocab_size), torch.float32
    assert config.model.path is not None
    folder = resolve_model(config.model.path, weights=False)
    model = read_model_config(folder, weights=Path(config.model.path).is_dir())
    if any(folder.glob("*.safetensors")):
        return model, number_format(folder)
    named = model.get("dtype") or model.get("torch_dtype") or "bfloat16"
    return model, getattr(torch, str(named).removeprefix("torch."), torch.bfloat16)


def _capacity(device: torch.device) -> int:
    """The memory of a GPU, or of the machine."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: int) -> str:
    """Write bytes for people, as in "512 MiB" and "1.3 GiB"."""
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1000 else f"{mib / 1024:,.1f} GiB"
