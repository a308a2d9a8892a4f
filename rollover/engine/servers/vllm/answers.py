"""Answers of vLLM servers, as far as they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rollover.engine.servers.answer import Answer, Count, Event, TokenId


class Model(Answer):
    id: str
    root: str | None = None
    """The folder or hub id that it was loaded from."""
    max_model_len: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class Models(Answer):
    data: list[Model]


class DeviceConfig(Answer):
    device: Any = None
    """A name, where it is written as one."""


class ModelSettings(Answer):
    enable_sleep_mode: bool = False


class AdapterRoom(Answer):
    max_lora_rank: Count


class EngineSettings(Answer):
    device_config: DeviceConfig
    model: ModelSettings = Field(default_factory=ModelSettings, alias="model_config")
    lora_config: AdapterRoom | None = None
    """Absent where it takes no adapters."""


class VLLMServerInfo(Answer):
    vllm_config: EngineSettings


class PauseState(Answer):
    is_paused: bool


class WeightInfo(Answer):
    weight_version: str


class WorldSize(Answer):
    world_size: Annotated[int, Field(ge=1, lt=1 << 20)]


class Success(Answer):
    success: bool


class Checksums(Answer):
    checksums: Mapping[str, str]
    """Checksums by the worker's place and the name of the tensor there."""


class Logprobs(Answer):
    token_logprobs: list[float]


class Choice(Answer):
    token_ids: list[TokenId]
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None


class PromptDetails(Answer):
    cached_tokens: Count | None = None


class Usage(Answer):
    prompt_tokens_details: PromptDetails | None = None


class Completion(Event):
    """One event of a completion's stream."""

    choices: list[Choice]
    usage: Usage | None = None
