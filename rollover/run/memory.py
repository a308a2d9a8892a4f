"""Computes how much memory a run needs on its devices, engines included, and what to change if it is too much.

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
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.errors import ConfigError
from rollover.run.config import RunConfig
from rollover.run.engine import check_engine
from rollover.run.engine_memory import all_parts, engine_memory, is_unseen, numbered, uncounted
from rollover.trainer.config import LoraConfig, TrainerConfig

if TYPE_CHECKING:
    import torch

_CACHE_STEP_BYTES = 64 * 2**20
_KEPT = ("weights", "reference policy", "optimizer")
"""The parts that the trainer keeps from step to step, while it releases the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The most bytes that a run takes on one device, by purpose.

    Example: ``DeviceMemory(device="cuda:0", capacity=80 * 2**30, parts={"weights": 2**30})`` fits.
    """

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
    setting to change if it is too much. Activations are those of the largest pass that responses of the greatest length
    cause.

    Raises ``ConfigError`` or ``ModelError`` as opening the trainer would, for a device or a model that cannot be used.
    """
    needed = device_memory(config)
    left_out = uncounted(config)
    lines = [*map(str, needed), *([] if left_out is None else [left_out]), *_left_to_servers(config, needed)]
    if too_small := [memory.device for memory in needed if not memory.fits]:
        advice = next((said for said, changed in _remedies(config) if _all_fit(changed)), None)
        lines.append(
            f"warning: {' and '.join(too_small)} will run out of memory: "
            + (advice or "take a smaller model, or a device with more memory")
        )
    return lines


def device_memory(config: RunConfig) -> list[DeviceMemory]:
    """Compute the memory that trainer and engines take on each device."""
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
    parts: dict[str, dict[str, int]] = {}
    elsewhere = []
    if config.cluster is not None:
        who = "each rank" if config.trainer.num_devices > 1 else "the trainer"
        elsewhere.append(DeviceMemory(device=f"{who} on the cluster", capacity=None, parts=of_trainer))
    for device in () if elsewhere else _trainer_devices(config.trainer):  # on the CPU all ranks share one memory
        held = parts.setdefault(device, dict.fromkeys(of_trainer, 0))
        held.update({name: held[name] + num_bytes for name, num_bytes in of_trainer.items()})
    turns: dict[str, str] = {}
    engines = engine_memory(config, training.num_parameters, _capacity)
    for device, of_engines in all_parts([*engines]).items():
        held = parts.setdefault(device, {})
        if config.engine.declared.is_colocated and held:
            parts[device], turns[device] = _larger_turn(held, of_engines)
        else:
            held.update(of_engines)
    here = [DeviceMemory(device=d, capacity=_capacity(d), parts=p, turn=turns.get(d, "")) for d, p in parts.items()]
    return [*elsewhere, *here]


def _larger_turn(of_trainer: Mapping[str, int], of_engine: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Return the larger use of memory when trainer and engine take turns, and whose turn that is. The parts that the
    trainer keeps from step to step count in both."""
    kept = {name: of_trainer[name] for name in _KEPT}
    in_step = {name: num_bytes for name, num_bytes in of_trainer.items() if name not in _KEPT}
    if sum(in_step.values()) >= sum(of_engine.values()):
        return {**kept, **in_step}, "while it trains"
    return {**kept, **of_engine}, "while it generates"


def _left_to_servers(config: RunConfig, needed: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yield which share of a device is left to servers that take turns with the trainer."""
    argument = config.engine.memory_share_argument
    if argument is None or not config.engine.declared.is_colocated:
        return
    for memory in needed:
        if memory.capacity is None or not memory.parts.keys() >= {*_KEPT}:
            continue
        kept = sum(memory.parts[name] for name in _KEPT)
        share = max(0.0, 1 - kept / memory.capacity)
        yield (
            f"memory of {memory.device} while servers generate: the trainer keeps {_size(kept)}; servers there may take"
            f" at most {share:.2f} of the device ({argument})"
        )


def _trainer_devices(trainer: TrainerConfig) -> list[str]:
    """Return the device of each rank."""
    from rollover.trainer.devices import rank_devices
    from rollover.trainer.models import pick_device

    return [numbered(pick_device(trainer.device))] if trainer.num_devices == 1 else [*rank_devices(trainer)]


def _remedies(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield changes of settings, the cheapest first, each on top of those before."""
    if (smaller := _smaller_cache(config, least_share=0.5)) is not None:
        yield smaller
    trainer, said = config.trainer, ""
    if not trainer.gradient_checkpointing:
        trainer, said = replace(trainer, gradient_checkpointing=True), "set trainer.gradient_checkpointing = true"
        yield said, replace(config, trainer=trainer)
    before = said and f"{said} and "
    longest = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    while trainer.micro_batch_tokens > longest:
        trainer = replace(trainer, micro_batch_tokens=max(longest, trainer.micro_batch_tokens // 2))
        said = f"{before}lower trainer.micro_batch_tokens to {trainer.micro_batch_tokens}"
        yield said, replace(config, trainer=trainer)
    if (smaller := _smaller_cache(replace(config, trainer=trainer))) is not None:
        advice, changed = smaller
        yield ", and ".join(filter(None, (said, advice))), changed
    if trainer.lora is None:
        yield "train adapters, [trainer.lora]", replace(config, trainer=replace(config.trainer, lora=LoraConfig()))
        adapters = replace(trainer, lora=LoraConfig())
        yield ", and ".join(filter(None, ("train adapters, [trainer.lora]", said))), replace(config, trainer=adapters)


def _smaller_cache(config: RunConfig, least_share: float = 0.0) -> tuple[str, RunConfig] | None:
    """Return the largest cache of embedded engines with which everything fits; ``None`` if none does that holds the
    longest sample and ``least_share`` of the configured cache."""
    engine = config.engine
    if not isinstance(engine, EmbeddedConfig | EmbeddedServerConfig):
        return None
    excess = 0
    for memory in device_memory(config):
        caches = sum(num_bytes for name, num_bytes in memory.parts.items() if "cache" in name)
        if not memory.fits and memory.capacity is not None and caches:
            num_engines = max(1, caches // engine.kv_cache_bytes)
            excess = max(excess, -(-(memory.total - memory.capacity) // num_engines))
    smaller = (engine.kv_cache_bytes - excess) // _CACHE_STEP_BYTES * _CACHE_STEP_BYTES
    if not 0 < smaller < engine.kv_cache_bytes or smaller < least_share * engine.kv_cache_bytes:
        return None
    changed = replace(config, engine=replace(engine, kv_cache_bytes=smaller))
    try:
        check_engine(changed)
    except ConfigError:  # the longest sample would not fit
        return None
    return f"lower engine.kv_cache_bytes to {smaller}", changed


def _all_fit(config: RunConfig) -> bool:
    return all(memory.fits for memory in device_memory(config))


def _model(config: RunConfig) -> tuple[Mapping[str, Any], torch.dtype]:
    """Return the ``config.json`` of the run's model, and the number format of its folder."""
    import torch

    from rollover.hf.config import read_model_config
    from rollover.hf.hub import resolve_model
    from rollover.trainer.lora import base_format

    if config.model.scratch is not None:
        return config.model.scratch.model_config(config.model.scratch.vocab_size), torch.float32
    assert config.model.path is not None
    folder = resolve_model(config.model.path, weights=False)
    model = read_model_config(folder, weights=Path(config.model.path).is_dir())
    if any(folder.glob("*.safetensors")):
        return model, base_format(folder)
    named = model.get("dtype") or model.get("torch_dtype") or "bfloat16"
    return model, getattr(torch, str(named).removeprefix("torch."), torch.bfloat16)


def _capacity(device: str) -> int | None:
    """Return the memory of a GPU, or of the machine; ``None`` for a device that this process does not see."""
    import torch

    if is_unseen(device):
        return None
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(num_bytes: int) -> str:
    """Format bytes for people, as in "512 MiB" and "1.3 GiB"."""
    mib = num_bytes / 2**20
    return f"{mib:,.0f} MiB" if mib < 1000 else f"{mib / 1024:,.1f} GiB"
