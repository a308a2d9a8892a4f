"""Answers of SGLang servers and routers, as far as they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollover.engine.servers.answer import Answer, Count, Event, Shown, TokenId


class ModelInfo(Answer):
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


class SchedulerLoad(Answer):
    num_running_reqs: Count
    num_waiting_reqs: Count


class SchedulerLoads(Answer):
    loads: list[SchedulerLoad]


class UpdateOutcome(Answer):
    success: bool
    message: Shown | None = None


class AdapterOutcome(Answer):
    success: bool
    error_message: Shown | None = None
    loaded_adapters: Mapping[str, Any] | None = None
    """Paths by the names of the adapters that are loaded now."""


class WorkerPlace(Answer):
    """The place of a worker among those of its server."""

    tp_rank: Count = 0
    tp_size: Annotated[int, Field(ge=1, lt=1 << 20)] = 1
    dp_rank: Count = 0


class WorkerChecksums(Answer):
    checksums: Mapping[str, str]
    """Checksums by the name of the tensor in the worker."""
    parallelism_info: Annotated[list[WorkerPlace], Field(min_length=1)]
    """The same for each model that it runs."""


class WeightChecks(Answer):
    ranks: list[WorkerChecksums]


class WeightSpan(Answer):
    """Tokens ``start`` to ``end`` of a call's output and the label of the weights that sampled them."""

    version: str
    start: Count
    end: Count


class ReportedEnd(Answer):
    """The reason why a call has ended; also that it has failed."""

    type: Shown
    message: Shown | None = None
    status_code: int | Shown | None = None
    err_type: Shown | None = None
    matched: int | str | None = None


class Meta(Answer):
    completion_tokens: Count | None = None
    finish_reason: ReportedEnd | None = None
    output_token_logprobs: list[tuple[float | None, TokenId, Any]] | None = None
    weight_versions: list[WeightSpan] | None = None
    cached_tokens: Count | None = None


class Generation(Event):
    """One event of a call's stream, or the answer to one that does not stream."""

    output_ids: list[TokenId] = Field(default_factory=list)
    meta_info: Meta


class Worker(Answer):
    """A worker, as a router describes it."""

    url: str
    worker_type: Shown = "regular"


class Workers(Answer):
    workers: list[str | Worker]


class WorkerUrls(Answer):
    """The workers, as older routers list them."""

    urls: list[str]
