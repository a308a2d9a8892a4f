"""Settings of the embedded engine. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rollover.engine.base import DeclaredCapabilities, check_colocated
from rollover.settings.changes import Changeable, Inexact

_MOST = {"max_running": 2**16, "block_size_tokens": 2**16, "prefill_chunk_tokens": 2**24}
"""Tables and buffers of these sizes are made at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """Settings of the embedded engine; what it samples is in each request."""

    kind: Literal["embedded"] = "embedded"
    """``"embedded"`` chooses this engine; so does leaving ``kind`` out."""
    device: Inexact[str] = "auto"
    """``cpu``, ``cuda`` or ``cuda:N``; ``auto`` takes the first GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and cache; ``auto`` is bfloat16 on a GPU and float32 on a CPU, where half precision is
    slow."""
    max_running: Inexact[int] = 64
    """Samples decoded at the same time. More fill the machine better until the cache is too small for
    them."""
    max_context_tokens: Changeable[int | None] = None
    """Longest prompt plus response; unset, it is what ``tasks.max_prompt_tokens`` and ``max_new_tokens`` come to."""
    kv_cache_bytes: Inexact[int] = 512 * 2**20
    """Memory for the key-value cache of running and parked samples and of prompts. Never exceeded: what finished
    responses left is evicted first, then the least recently used blocks of parked samples and prompts, then the
    youngest running sample is preempted; what was evicted is computed again when it is needed."""
    draft_rows: Inexact[int] = 0
    """Rows of a decode iteration that draft tokens may fill up (speculative decoding): with B samples decoding, fewer
    than this, ``draft_rows - B`` draft tokens are verified along, the likeliest first. Choose the number of rows at
    which an iteration takes twice as long as with next to none: tokens are drafted where that pays. What is sampled
    stays the same; the last, longest samples finish sooner where responses repeat each other. 0 switches it off."""
    block_size_tokens: Inexact[int] = 32
    """Tokens per block of the key-value cache, the unit in which it is shared and evicted. Smaller wastes less at the
    end of each sample, larger costs less per step."""
    prefill_chunk_tokens: Inexact[int] = 2048
    """Most tokens prefilled between two decode iterations, padding included: what a long prompt may delay
    the running samples by."""
    cpu_kernels: Inexact[Literal["auto", "compiled", "torch"]] = "auto"
    """How a CPU computes: ``compiled`` by kernels built with the machine's C compiler (some seconds at the start),
    ``torch`` by PyTorch's operations, at a third of the speed; ``auto`` compiles where it can. The compiled ones
    compute and cache in float32, whatever the type of the weights. It has no effect on a GPU."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """How a weight update treats cached tokens. ``recompute`` drops them, so that every token is sampled
    from the one policy it is labelled with; ``keep`` costs nothing and samples from new weights over old
    cache."""
    colocated: Changeable[bool] = False
    """The trainer trains on the same device: while it does, weights and cache are given back to it. What was cached is
    then computed again, and strategies that generate while the trainer trains cannot be used."""
    stream_interval_tokens: Inexact[int] = 16
    """Tokens per streamed chunk; what is lost at most when the process dies. 1 streams every token."""
    logprob_tolerance: Changeable[float | None] = None
    """Largest mean difference, in nats, between the log-probs that the engine reports and the trainer's for the same
    weights. Measured on a few tokens at the start and, unless ``top_p`` or ``top_k`` cut the distribution, on every
    batch; the run stops beyond it. Left out, it is 0.002 where engine and trainer compute in float32, and 0.1 where one
    of them computes in bfloat16."""
    command_timeout_s: Changeable[float] = 300.0
    """Longest wait for an iteration to end or weights to load before the engine is called dead."""

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(
            deterministic=True,
            max_running=self.max_running,
            max_context_tokens=self.max_context_tokens,
            is_colocated=self.colocated,
        )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}")
        positive = (
            "max_running",
            "kv_cache_bytes",
            "block_size_tokens",
            "prefill_chunk_tokens",
            "stream_interval_tokens",
            "logprob_tolerance",
            "command_timeout_s",
        )
        for key in positive:
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ValueError(f"{key} must be positive, got {getattr(self, key)}")
        for key, most in _MOST.items():
            if getattr(self, key) > most:
                raise ValueError(f"{key} must be at most {most}, got {getattr(self, key)}")
        if not 0 <= self.draft_rows <= self.max_running:
            raise ValueError(
                f"draft_rows must be from 0 to max_running = {self.max_running}, the most rows of an iteration, "
                f"got {self.draft_rows}"
            )
        if self.max_context_tokens is not None and self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens must be at least 2, got {self.max_context_tokens}")
        for key, allowed in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("cpu_kernels", ("auto", "compiled", "torch")),
            ("kv_on_update", ("recompute", "keep")),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, key)!r}")
        if self.colocated:
            check_colocated(self.kv_on_update)
