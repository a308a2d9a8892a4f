"""Context managers around a training step: reproducible kernels on request, and an out-of-memory error that a user can
act upon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rollover.errors import ResourceError
from rollover.trainer.config import StepConfig


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Let PyTorch refuse, within this context, kernels without a reproducible result."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is reproducible only with this
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def reporting_out_of_memory(config: StepConfig, *, loading: bool = False) -> Iterator[None]:
    """Turn PyTorch's out-of-memory errors into ``ResourceError``; while the model is loaded, smaller passes do not
    help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        allocation = "can't allocate memory" in str(error) or "not enough memory" in str(error)
        if not (allocation or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            raise
        if loading:
            raise ResourceError(
                f"the model does not fit the memory ({str(error).splitlines()[0]}): choose a smaller one, or set"
                f" {config.section}.num_devices or {config.section}.offload"
            ) from error
        raise ResourceError(
            f"training ran out of memory: "
            f"lower {config.section}.micro_batch_tokens (now {config.micro_batch_tokens})"
            + ("" if config.gradient_checkpointing else f" or set {config.section}.gradient_checkpointing = true")
        ) from error
