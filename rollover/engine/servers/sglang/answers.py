"""Answers of SGLang servers and routers, as far as they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollover.engine.servers.http.answer import Answer, Count, Event, Shown, TokenId


class ModelInfo(Answer):
    """The model that the server serves, and the label of its weights."""

    model_path: str
    is_generation: bool
    weight_version: str
    model_type: Shown | None = None
    preferred_sampling_params: Any = None


class SGLangServerInfo(Answer):
    """The server's settings."""

    max_req_input_len: Annotated[int, Field(ge=1, lt=1 << 31)]
    internal_states: list[Any]
    """States of its scheduler, without which there is no answer."""
    incremental_streaming_output: bool | None = None
    enable_memory_saver: bool = False
    tp_size: Annotated[int, Field(ge=1, lt=1 << 20)] = 1
    dp_size: Annotated[int, Field(ge=1, lt=1 << 20)] = 1
    pp_size: Annotated[int, Field(ge=1, lt=1 << 20)] = 1
    enable_lora: bool | None = None
    max_lora_rank: Count | None = None
    lora_target_modules: list[str] | None = None


class RankCalls(Answer):
    """The calls of one data-parallel rank."""

    num_running_reqs: Count
    num_waiting_reqs: Count


class CallCounts(Answer):
    """The calls of all ranks."""

    loads: list[RankCalls]


class UpdateOutcome(Answer):
    """The outcome of a change of weights."""

    success: bool
    message: Shown | None = None


class AdapterOutcome(Answer):
    """The outcome of loading or unloading an adapter."""

    success: bool
    error_message: Shown | None = None
    loaded_adapters: Mapping[str, Any] | None = None
    """Paths by the names of the adapters that are loaded now."""


class WeightSpan(Answer):
    """Tokens ``start`` to ``end`` of a call's output and the label of the weights that sampled them."""

    version: str
    start: Count
    end: Count


class ReportedEnd(Answer):
    """The reason why a call has ended, which may be a failure."""

    type: Shown
    message: Shown | None = None
    status_code: int | Shown | None = None
    err_type: Shown | None = None
    matched: int | str | None = None


class Meta(Answer):
    """The numbers of an event about its call."""

    completion_tokens: Count | None = None
    finish_reason: ReportedEnd | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] | None = None
    output_token_sampling_mask: list[list[TokenId]] | None = None
    """The tokens among which each one was drawn."""
    output_token_sampling_logprobs: list[float] | None = None
    """Log-probs among these."""
    routed_experts: str | None = None
    """Experts of each row from ``routed_experts_start_len`` on, int32 in base64; in the last event of a call only."""
    weight_versions: list[WeightSpan] | None = None
    cached_tokens: Count | None = None


class Generation(Event):
    """One event of a call's stream, or the answer to a call that does not stream."""

    output_ids: list[TokenId] = Field(default_factory=list)
    meta_info: Meta


class Worker(Answer):
    """A worker, as a router describes it."""

    url: str
    worker_type: Shown = "regular"


class Workers(Answer):
    """The workers of a router."""

    workers: list[str | Worker]


class WorkerUrls(Answer):
    """The workers, as slime's and older routers list them."""

    urls: list[str]
