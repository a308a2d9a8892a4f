"""Answers of vLLM servers, as far as they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rollover.engine.servers.http.answer import Answer, Count, Event, TokenId


class Model(Answer):
    """A model that the server serves.

    Example: ``{"id": "qwen", "root": "/models/qwen3-0.6b", "max_model_len": 8192}``.
    """

    id: str
    root: str | None = None
    """The folder or hub id that it was loaded from."""
    max_model_len: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class Models(Answer):
    """All models that the server serves.

    Example: ``{"data": [{"id": "qwen"}]}``.
    """

    data: list[Model]


class DeviceConfig(Answer):
    """The device on which the server computes.

    Example: ``{"device": "cuda"}``.
    """

    device: Any = None
    """A name, where it is written as one."""


class ModelSettings(Answer):
    """The settings of the served model.

    Example: ``{"enable_sleep_mode": true}`` of a server that can give its memory back.
    """

    enable_sleep_mode: bool = False


class AdapterRoom(Answer):
    """The adapters that the server has room for.

    Example: ``{"max_lora_rank": 16}``.
    """

    max_lora_rank: Count


class EngineSettings(Answer):
    """The settings of the engine.

    Example: ``{"device_config": {"device": "cuda"}, "model_config": {}, "lora_config": {"max_lora_rank": 16}}``.
    """

    device_config: DeviceConfig
    model: ModelSettings = Field(default_factory=ModelSettings, alias="model_config")
    lora_config: AdapterRoom | None = None
    """Absent where it takes no adapters."""


class VLLMServerInfo(Answer):
    """The server's settings.

    Example: ``{"vllm_config": {"device_config": {"device": "cpu"}}}``.
    """

    vllm_config: EngineSettings


class PauseState(Answer):
    """The state of a server: paused or not.

    Example: ``{"is_paused": false}``.
    """

    is_paused: bool


class WeightInfo(Answer):
    """The label of the weights in force.

    Example: ``{"weight_version": "rollover:run-7:3"}``.
    """

    weight_version: str


class WorldSize(Answer):
    """The number of workers of a server.

    Example: ``{"world_size": 4}`` with two data-parallel ranks of two devices.
    """

    world_size: Annotated[int, Field(ge=1, lt=1 << 20)]


class Success(Answer):
    """The outcome of an action.

    Example: ``{"success": true}``.
    """

    success: bool


class Checksums(Answer):
    """Checksums of the weights that the workers hold.

    Example: ``{"checksums": {"dp0:pp0:pcp0:tp0:lm_head.weight": "1f3a9c02"}}``.
    """

    checksums: Mapping[str, str]
    """Checksums by the worker's place and the name of the tensor there."""


class Logprobs(Answer):
    """The log-probs of the tokens of an event.

    Example: ``{"token_logprobs": [-0.2, -1.1]}``.
    """

    token_logprobs: list[float]


class Choice(Answer):
    """The tokens that an event adds to the response.

    Example: ``{"token_ids": [31, 4], "logprobs": {"token_logprobs": [-0.2, -1.1]}, "finish_reason": "stop"}``.
    """

    token_ids: list[TokenId]
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None


class PromptDetails(Answer):
    """The part of the prompt that was found in the cache.

    Example: ``{"cached_tokens": 512}``.
    """

    cached_tokens: Count | None = None


class Usage(Answer):
    """Counts of a call.

    Example: ``{"prompt_tokens_details": {"cached_tokens": 512}}``.
    """

    prompt_tokens_details: PromptDetails | None = None


class Completion(Event):
    """One event of a completion's stream.

    Example: ``{"choices": [{"token_ids": [31], "finish_reason": null}]}``.
    """

    choices: list[Choice]
    usage: Usage | None = None
