"""Checks from the ``config.json`` of a model whether settings suit it, before any of it is loaded. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rollover.errors import ConfigError
from rollover.hf.architecture import matrix_shapes, num_kv_heads
from rollover.hf.config import num_experts
from rollover.trainer.config import LoraConfig, StepConfig, TrainerConfig

SHARDED = (
    *("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe"),
    "minimax_m2",
)
"""Types of models that several devices share."""
ADAPTED = tuple(model_type for model_type in SHARDED if model_type != "deepseek_v3")
"""Types of models beside whose matrices adapters are trained: their matrices have the usual names."""


def check_suits(config: StepConfig, model: Mapping[str, Any]) -> None:
    """Check that a model can be trained as ``config`` says.

    Args:
        model: the content of its ``config.json``.

    Raises ``ConfigError`` when a model cannot be sharded, when rows cannot be shared as ``context_parallel`` says, when
    adapters are requested beside matrices that the model does not have, or of a rank above what a matrix can have,
    or routes of a model without experts.

    Example: with 14 heads and 2 key-value heads, each row can be shared by 2 devices.
    """
    if config.is_sharded and model["model_type"] not in SHARDED:
        key = "offload is true" if config.offload else f"num_devices is {config.num_devices}"
        raise ConfigError(
            f"{config.section}.{key}, and a model of type {model['model_type']!r} trains on one device, with its"
            f" weights there; models that several devices share: {', '.join(SHARDED)}"
        )
    if isinstance(config, TrainerConfig) and config.lora is not None and model["model_type"] not in ADAPTED:
        raise ConfigError(
            f"adapters of a model of type {model['model_type']!r} are not supported: train without [trainer.lora], or a"
            f" model of type {', '.join(ADAPTED)}"
        )
    if isinstance(config, TrainerConfig) and config.replay_routes and not num_experts(model):
        raise ConfigError(
            f"trainer.replay_routes = true, but a model of type {model['model_type']!r} has no experts: set it to false"
        )
    if config.context_parallel > 1:
        check_heads(config, model["num_attention_heads"], num_kv_heads(model))
    if isinstance(config, TrainerConfig) and config.lora is not None:
        shapes = matrix_shapes(model)
        if num_experts(model) and not {*config.lora.targets} <= shapes.keys():
            raise ConfigError(
                "trainer.lora.targets: adapters of a mixture of experts are beside its attention alone: set it to"
                f" {list(shapes)} or some of them"
            )
        check_targets(config.lora.targets, shapes)
        _check_rank(config.lora, shapes)


def check_heads(config: StepConfig, num_heads: int, num_kv_heads: int) -> None:
    """Raise ``ConfigError`` when the heads cannot be divided equally among the devices that share a row."""
    size, both = config.context_parallel, math.gcd(num_heads, num_kv_heads)
    if both % size:
        divisors = ", ".join(str(n) for n in range(1, both + 1) if both % n == 0)
        raise ConfigError(
            f"{config.section}.context_parallel is {size}, but the model has {num_heads} attention heads and"
            f" {num_kv_heads} key-value heads, which are divided among the devices: set it to a divisor of both"
            f" ({divisors})"
        )


def _check_rank(config: LoraConfig, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise ``ConfigError`` naming the largest target when the rank exceeds the smaller dimension of every target: no
    change of theirs has a higher rank. That of a few small ones may be lower, as of key matrices that heads share."""
    largest = max(config.targets, key=lambda name: min(shapes[name]))
    rows, columns = shapes[largest]
    if config.rank > min(rows, columns):
        raise ConfigError(
            f"trainer.lora.rank is {config.rank}, but {largest}, the largest of trainer.lora.targets, is a matrix of"
            f" {rows} x {columns}, whose changes have a rank of at most {min(rows, columns)}: lower the rank to that or"
            " less, or train without [trainer.lora]"
        )


def check_targets(targets: Iterable[str], matrices: Iterable[str]) -> None:
    """Raise ``ConfigError`` naming the first of ``targets`` that is not among the ``matrices``, and listing those."""
    known = list(dict.fromkeys(matrices))
    if unknown := [name for name in targets if name not in known]:
        raise ConfigError(
            f"trainer.lora.targets names {unknown[0]!r}, which the model does not have; its matrices:"
            f" {', '.join(known)}"
        )
