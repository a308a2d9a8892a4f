"""vLLM: its ``/v1/completions`` stream and the control calls of its development mode.

What is peculiar to it:

* A request is aborted by the id that its completion call gives it, ``cmpl-<request_id>-0``. Any other id is
  answered with the same "aborted" and stops nothing, so the answer is never looked at.
* An empty list of ids means all requests: none is ever sent.
* Without ``ignore_eos`` it stops at end tokens of its own choice. Ours are all in ``stop_token_ids``.
* On a CPU a seeded call whose prompt is prefilled in parts is the end of it (vLLM 0.32): see ``seed_calls``.
* A pause empties the caches of running calls as well, unless ``clear_cache`` says otherwise; later releases leave those
  of frozen calls alone whatever it says. So it is sent where caches are to be kept, and nowhere relied upon.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from rollover.engine.background import refused
from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.calls.dialect import Traits, check_vocabulary
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.answer import Answer
from rollover.engine.servers.http.client import HTTPClient, meant_for
from rollover.engine.servers.vllm.answers import Completion, Models, PauseState, WeightInfo
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.weights import VLLMWeights
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.errors import EngineError
from rollover.types import AdapterShape, FinishReason

_HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment and --logprobs-mode processed_logprobs (docs/engines.md)"
)


class VLLMDialect:
    """Implements ``Dialect`` for one vLLM server."""

    def __init__(self, client: HTTPClient, config: VLLMConfig, model: ModelFolder, terms: WeightTerms) -> None:
        takes = terms.adapters is not None
        keeps = config.kv_on_update == "keep" and not takes
        self.traits = Traits(keeps_calls=keeps, keeps_kv=keeps, silence_s=config.drain_s, takes_adapters=takes)
        self.weights = VLLMWeights(client, config, model, terms)
        self._client = client
        self._config = config
        self._model = model
        self._model_name = config.served_model or ""
        self._context = model.max_context_tokens
        self._sends_seeds = config.seed_calls == "always"
        self._is_frozen = False
        """True while we have asked it to stand still."""
        self._is_stopping = False
        """True while we do not know that it has resumed after we had paused it to stop its calls."""

    # -- checks ----------------------------------------------------------------------------------------------

    async def identify(self) -> None:
        with meant_for("vllm", "vLLM servers"):
            served = await self._client.ask(Models, "GET", "/v1/models")
        models = {model.id: model for model in served.data}
        name = self._model_name or next(iter(models), "")
        if name not in models:
            there = self._client.reader.shown(", ".join(models)) or "no model"
            raise EngineError(f"{self._client} serves {there}, not engine.served_model = {name!r}")
        self._model_name = name
        self._model.check_served(models[name].root or "", self._client)
        self._context = models[name].max_model_len or self._model.max_context_tokens
        await self._find(PauseState, "/is_paused")
        await self._find(WeightInfo, "/weight_info")

    async def _find(self, kind: type[Answer], path: str) -> None:
        with refused(lambda e: EngineError(f"{self._client} has no {path}: {_HOW_TO_START} ({e})")):
            await self._client.ask(kind, "GET", path)

    async def check_model(self) -> int:
        info = await self.weights.settings()
        if (shape := self.weights.adapters) is not None:
            self._check_adapters(shape, info.max_lora_rank)
        if self._config.seed_calls == "auto":
            self._sends_seeds = isinstance(info.device, str) and not info.device.startswith("cpu")
        name = self._client.reader.shown(self._model_name)
        await check_vocabulary(
            f"{self._client}, which serves {name!r},",
            self._model,
            lambda token: self._client.call("POST", "/v1/completions", body=self._one_token(token)),
        )
        return self._context

    def _check_adapters(self, shape: AdapterShape, max_rank: int | None) -> None:
        if max_rank is None or max_rank < shape.rank:
            found = "no adapters" if max_rank is None else f"adapters up to rank {max_rank}"
            raise EngineError(
                f"{self._client} accepts {found}, but trainer.lora.publish = 'adapter' sends it adapters of rank"
                f" {shape.rank}; {self.weights.how_to_serve_adapters()}"
            )

    def _one_token(self, token: int) -> dict[str, Any]:
        return {
            "model": self.weights.adapter or self._model_name,
            "prompt": [token],
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
        }

    async def check_health(self, *, decode: bool, timeout_s: float) -> None:
        await self._client.call("GET", "/health", timeout_s=timeout_s)
        was_frozen = self._is_frozen
        state = await self._client.ask(PauseState, "GET", "/is_paused", timeout_s=timeout_s)
        if state.is_paused and not (was_frozen or self._is_frozen):
            if not self._is_stopping:
                raise EngineError(f"{self._client} was paused by another program")
            await self._client.call("POST", "/resume", timeout_s=timeout_s)
            self._is_stopping = False
        if decode:
            await self._client.call("POST", "/v1/completions", body=self._one_token(0), timeout_s=timeout_s)

    # -- calls -----------------------------------------------------------------------------------------------

    async def decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        stream = self._client.events(Completion, "/v1/completions", self._body(call), call.patience)
        async with aclosing(stream) as events:
            async for event in events:
                if event.cached_tokens is not None:
                    yield Delta(num_cached_tokens=event.cached_tokens)
                if event.choices:
                    choice = event.choices[0]
                    yield Delta(
                        token_ids=tuple(choice.token_ids),
                        logprobs=tuple(choice.logprobs),
                        finish_reason=None if choice.finish_reason is None else FinishReason(choice.finish_reason),
                    )

    def _body(self, call: GenerationCall) -> dict[str, Any]:
        """Name every field that a server default could change."""
        request, params = call.request, call.request.params
        return {
            "model": self.weights.adapter or self._model_name,
            "request_id": call.request_id,
            "prompt": [*request.prompt_ids, *request.response_ids],
            "add_special_tokens": False,
            "max_tokens": params.max_new_tokens - len(request.response_ids),
            "min_tokens": 0,
            "n": 1,
            "echo": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": call_seed(request.seed, len(request.response_ids)) if self._sends_seeds else None,
            "stop": list(params.stop_strings),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": call.label,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stream_interval": 1 if self.traits.keeps_kv else self._config.stream_interval_tokens,
        }

    async def ask_to_abort(self, request_ids: Collection[str]) -> None:
        ids = [f"cmpl-{request_id}-0" for request_id in request_ids]
        await self._client.call("POST", "/abort_requests", body={"request_ids": ids})

    async def ask_to_abort_all(self) -> None:
        self._is_stopping = True
        await self._client.call("POST", "/pause", params={"mode": "abort"})
        if not self._is_frozen:
            await self._client.call("POST", "/resume")
        self._is_stopping = False

    async def num_calls(self) -> int | None:
        return None

    async def freeze(self, *, keeps_kv: bool) -> None:
        self._is_frozen = True
        await self._client.call(
            "POST", "/pause", params={"mode": "keep", **({"clear_cache": "false"} if keeps_kv else {})}
        )

    async def thaw(self) -> None:
        self._is_frozen = False
        await self._client.call("POST", "/resume")
        self._is_stopping = False


def call_seed(seed: int, num_decoded: int) -> int:
    """Derive the seed of a call: a call that starts in mid-response must not draw the noise of the beginning again."""
    digest = hashlib.blake2b(f"{seed}/{num_decoded}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
