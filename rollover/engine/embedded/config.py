"""Settings of the embedded engine. Importing this module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from rollover.engine.config import DeclaredCapabilities, EngineConfig, EngineDemands, check_colocated
from rollover.engine.devices import device_here, numbered
from rollover.settings.changes import Changeable, Inexact

_MOST = {"max_running": 2**16, "block_size_tokens": 2**16, "prefill_chunk_tokens": 2**24}
"""Upper bounds of settings that determine the size of tables and buffers allocated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig(EngineConfig):
    """Settings of the embedded engine. Sampling parameters come with each request.

    Example: ``EmbeddedConfig(device="cuda", kv_cache_bytes=8_000_000_000, max_context_tokens=4096)``
    """

    kind: Literal["embedded"] = "embedded"
    """``"embedded"`` selects this engine; it is the default."""
    device: Inexact[str] = "auto"
    """``cpu``, ``cuda`` or ``cuda:N``; ``auto`` takes the first GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and cache; ``auto`` is bfloat16 on a GPU and float32 on a CPU, where half precision is
    slow."""
    max_running: Inexact[int] = 64
    """Samples decoded at the same time. A higher number uses the machine better until the cache becomes too small for
    them."""
    max_context_tokens: Changeable[int | None] = None
    """Longest prompt plus response; the sum of ``tasks.max_prompt_tokens`` and ``max_new_tokens`` when left out."""
    kv_cache_bytes: Inexact[int] = 512 * 2**20
    """Memory for the key-value cache of running samples, parked samples and prompts. It is never exceeded: blocks of
    finished responses are evicted first, then the least recently used blocks of parked samples and prompts, and finally
    the youngest running sample is preempted. Evicted blocks are recomputed when they are needed."""
    block_size_tokens: Inexact[int] = 32
    """Tokens per block of the key-value cache, the unit in which it is shared and evicted. Smaller blocks waste less at
    the end of each sample; larger ones cost less per step. On a GPU, other numbers than powers of two from 16 are slow:
    each token then copies as many blocks as the longest context has."""
    prefill_chunk_tokens: Inexact[int] = 2048
    """Maximum number of tokens, padding included, that are prefilled between two decode iterations. It limits how long
    a long prompt can delay the running samples."""
    cpu_kernels: Inexact[Literal["auto", "compiled", "torch"]] = "auto"
    """Kernels used on a CPU: ``compiled`` builds them with the machine's C compiler (a few seconds at startup),
    ``torch`` uses PyTorch's operations, several times slower, and ``auto`` compiles if it can. The compiled kernels
    compute and cache in float32, whatever the type of the weights. This setting has no effect on a GPU."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Treatment of cached tokens in a weight update. ``recompute`` drops them, so that every token is sampled from
    exactly the policy it is labelled with; ``keep`` costs nothing, and samples from new weights over the old cache."""
    colocated: Changeable[bool] = False
    """The trainer trains on the same device, and the engine gives back the memory of its weights and cache while it
    does. The cache is then recomputed, and strategies that generate during training cannot be used."""
    stream_interval_tokens: Inexact[int] = 16
    """Tokens per streamed chunk, which is also the most that is lost when the process dies. 1 streams every token."""
    logprob_tolerance: Changeable[float | None] = None
    """Largest mean difference, in nats, between the log-probs that the engine reports and the trainer's for the same
    weights. It is measured on a few tokens at startup and, unless ``rollout.accept_truncation_bias`` is set, on every
    batch; the run stops when it is exceeded. When left out, it is 0.002 if engine and trainer both compute in float32,
    and 0.1 if one of them computes in bfloat16."""
    command_timeout_s: Changeable[float] = 300.0
    """Longest wait for an iteration to end or weights to load before the engine is considered dead."""

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(
            keeps_kv=self.kv_on_update == "keep",
            gives_kept=True,
            gives_routes=True,
            deterministic=True,
            max_running=self.max_running,
            max_context_tokens=self.max_context_tokens,
            is_colocated=self.colocated,
            in_process=True,
        )

    def devices(self) -> Sequence[str]:
        return (numbered(device_here(self.device)),)

    def memory(
        self, num_parameters: int, model: Mapping[str, Any], *, on_gpu: bool, capacity: int | None
    ) -> Mapping[str, int]:
        from rollover.hf.config import num_experts

        del capacity
        is_half = self.dtype == "bfloat16" or (self.dtype == "auto" and on_gpu)
        parts = {"weights": num_parameters * (2 if is_half else 4), "cache": self.kv_cache_bytes}
        if num_experts(model):
            parts["rows of experts"] = self._rows_of_experts(model, not on_gpu and self.cpu_kernels != "torch")
        return parts

    def _rows_of_experts(self, model: Mapping[str, Any], is_compiled: bool) -> int:
        """Return the bytes of the rows that are copied for their experts in an iteration: a row per token and expert.

        Compiled kernels keep room for inputs, later outputs, and inner numbers in float32. PyTorch's operations take 12
        bytes for each number of the outputs in any format: inputs and outputs, and the products with their weights in
        float32. Scores and their order take 16 bytes for each expert of a token.
        """
        from rollover.hf.architecture import Architecture

        experts, hidden = Architecture.from_config(model).experts, int(model["hidden_size"])
        assert experts is not None
        tokens = max(self.max_running, self.prefill_chunk_tokens)
        if is_compiled:
            return 4 * tokens * (experts.per_token * (hidden + experts.intermediate_size) + experts.num)
        return tokens * (12 * experts.per_token * hidden + 16 * experts.num)

    def mismatch_remedy(self, number_format: str) -> str:
        finer = "" if number_format == "float32" else "set engine.dtype = 'float32', or "
        return f"{finer}use engine.kind 'vllm' or 'sglang' for this model"

    def refusals(self, demands: EngineDemands) -> Iterator[str]:
        yield from EngineConfig.refusals(self, demands)
        if demands.deterministic and self.kv_on_update == "keep":
            yield (
                "deterministic = true needs engine.kv_on_update 'recompute': a cache kept across an update cannot be"
                " rebuilt after a restart"
            )

    def fitted(self, num_tokens: int, num_positions: int) -> Self:
        """Return these settings with room for a prompt and response of ``num_tokens`` where they name no length, unless
        a model of ``num_positions`` cannot have it."""
        if self.max_context_tokens is not None or num_tokens > num_positions:
            return self
        return replace(self, max_context_tokens=num_tokens)

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
