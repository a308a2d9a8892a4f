"""Answers of vLLM servers, as far as they are used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasPath, Field

from rollover.engine.servers.http.answer import Answer, Count, Event, TokenId


class Model(Answer):
    """A model that the server serves."""

    id: str
    root: str | None = None
    """The folder or hub id that it was loaded from."""
    max_model_len: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class Models(Answer):
    """All models that the server serves."""

    data: list[Model]


class VLLMServerInfo(Answer):
    """The server's settings, as far as they are used."""

    device: Any = Field(default=None, validation_alias=AliasPath("vllm_config", "device_config", "device"))
    """The name of the device on which it computes, if it is written as one."""
    enable_sleep_mode: bool = Field(
        default=False, validation_alias=AliasPath("vllm_config", "model_config", "enable_sleep_mode")
    )
    """It can give its memory back."""
    max_lora_rank: Count | None = Field(
        default=None, validation_alias=AliasPath("vllm_config", "lora_config", "max_lora_rank")
    )
    """The largest rank of adapters that it has room for; ``None`` if it takes no adapters."""


class PauseState(Answer):
    """The state of a server: paused or not."""

    is_paused: bool


class WeightInfo(Answer):
    """The label of the weights in force."""

    weight_version: str


class WorldSize(Answer):
    """The number of workers of a server."""

    world_size: Annotated[int, Field(ge=1, lt=1 << 20)]


class Success(Answer):
    """The outcome of an action."""

    success: bool


class Choice(Answer):
    """The tokens that an event adds to the response."""

    token_ids: list[TokenId]
    logprobs: list[float] = Field(default=[], validation_alias=AliasPath("logprobs", "token_logprobs"))
    finish_reason: Literal["stop", "length", "abort"] | None = None


class Completion(Event):
    """One event of a completion's stream."""

    choices: list[Choice]
    cached_tokens: Count | None = Field(
        default=None, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )
    """Tokens of the prompt that were found in the cache; the last event may say."""
