"""Decides what a config and a model make of the engine: device, number formats, size of the cache, way to compute."""

from __future__ import annotations

from functools import partial

import torch

from rollover.engine.devices import device_of
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.graphs import GraphModelRunner
from rollover.engine.embedded.model_runner import MakeModelRunner, TorchModelRunner
from rollover.engine.embedded.native import NativeModelRunner, compiled
from rollover.errors import ConfigError, EngineError
from rollover.hf.architecture import Architecture


def check(arch: Architecture, config: EmbeddedConfig) -> None:
    """Refuse, with ``ConfigError``, what an engine of these would refuse, as far as that is known without weights."""
    dtype = dtype_of(config)
    if device_of(config.device).type == "cpu" and config.cpu_kernels == "compiled":
        dtype = NativeModelRunner.dtype
    num_blocks(config, max_context_of(config, arch), block_bytes(config, arch, dtype))


def block_bytes(config: EmbeddedConfig, arch: Architecture, dtype: torch.dtype) -> int:
    """Return the size of a cache block: keys and values of its tokens in all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * config.block_size_tokens * arch.head_dim * dtype.itemsize


def num_blocks(config: EmbeddedConfig, max_context: int, bytes_per_block: int) -> int:
    """Return the number of cache blocks, one of which is never handed out. Raises ``ConfigError`` when the longest
    sample does not fit."""
    size, fitting = config.block_size_tokens, config.kv_cache_bytes // bytes_per_block
    if (needed := -(-max_context // size) + 1) > fitting:
        raise ConfigError(
            f"engine.kv_cache_bytes = {config.kv_cache_bytes} holds {max(0, fitting - 1) * size} tokens, fewer than"
            f" max_context_tokens = {max_context}, the longest prompt and response; raise it to"
            f" {needed * bytes_per_block}, or lower tasks.max_prompt_tokens or rollout.max_new_tokens (of a server:"
            " --max_context_tokens)"
        )
    return fitting


def dtype_of(config: EmbeddedConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device_of(config.device).type == "cpu" else torch.bfloat16
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def choose_model_runner(
    config: EmbeddedConfig, arch: Architecture, dtype: torch.dtype, device: torch.device, given: MakeModelRunner | None
) -> tuple[MakeModelRunner, torch.dtype]:
    """Choose how to compute, ``given`` if it is, and give the type of the cache with it."""
    if given is not None or device.type != "cpu":
        return given or GraphModelRunner, dtype
    if config.cpu_kernels == "torch":
        return TorchModelRunner, dtype
    try:
        kernels = compiled(arch.head_dim, config.block_size_tokens, arch.num_heads // arch.num_kv_heads)
    except EngineError:
        if config.cpu_kernels == "compiled":
            raise
        return TorchModelRunner, dtype
    return partial(NativeModelRunner, kernels), NativeModelRunner.dtype


def max_context_of(config: EmbeddedConfig, arch: Architecture) -> int:
    limit = arch.max_position_embeddings
    if config.max_context_tokens is not None and config.max_context_tokens > limit:
        raise ConfigError(
            f"max_context_tokens = {config.max_context_tokens} is more than the model's {limit} positions"
        )
    return config.max_context_tokens or limit
