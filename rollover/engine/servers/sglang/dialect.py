"""SGLang: its ``/generate`` stream and its control calls.

What is peculiar to it:

* A request is aborted with all others whose ids begin with its own: ours end in a delimiter that is nowhere else in
  them. Two seconds after a stream has ended its id is aborted once more, whoever has it then: ours begin with the name
  of the dialect object, so that no other run can have used them. An abort is remembered with the request it was for,
  even if it came too early to work; aborting all is not.
* A pause is acknowledged before it has reached the scheduler; an answer that the scheduler itself gives afterwards
  shows that it has. ``/health`` answers 503 after a pause of 20 s and is not asked.
* ``ignore_eos`` switches all stop tokens off, ours included; without it the server stops at the end tokens of its own
  model folder as well, which is an error unless they are among ours.
* Log-probs are taken before ``top_p``, ``top_k`` and ``min_p`` cut the distribution, but for calls that want kept sets.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.calls.dialect import Traits, check_vocabulary
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient, meant_for
from rollover.engine.servers.sglang.answers import CallCounts, Generation, ModelInfo, SGLangServerInfo
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.reply import Reply
from rollover.engine.servers.sglang.weights import SGLangWeights
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.errors import EngineError
from rollover.hf.config import num_experts, read_config
from rollover.types import AdapterShape

DELIMITER = ";"
_DRAIN_S = 0.05
"""Longest time that tokens sampled before a pause may take from the scheduler to us. Labels do not depend on it."""


def generate_body(rid: str, request: GenerateRequest) -> dict[str, Any]:
    """Return the body of a call. It names every field that a server default could change."""
    params = request.params
    return {
        "rid": rid,
        "input_ids": [*request.prompt_ids, *request.response_ids],
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens - len(request.response_ids),
            "min_new_tokens": 0,
            "n": 1,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(params.stop_strings),
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": True,
    }


class NamedCalls:
    """The calls of this process on one server, by their ids there: no other id begins with one of them, since older
    servers abort all calls whose ids begin with the given one, and none is ever used again."""

    def __init__(self, client: HTTPClient) -> None:
        self._client = client
        self._prefix = f"{secrets.token_hex(4)}/"

    async def ask_to_abort(self, request_ids: Collection[str]) -> None:
        await asyncio.gather(*(self._abort_request(rid=self._rid(name)) for name in request_ids))

    async def ask_to_abort_all(self) -> None:
        await self._abort_request(rid="", abort_all=True)

    async def _abort_request(self, *, rid: str, abort_all: bool = False) -> None:
        await self._client.call("POST", "/abort_request", body={"rid": rid, "abort_all": abort_all})

    def _rid(self, request_id: str) -> str:
        if DELIMITER in request_id:
            raise EngineError(f"request id {request_id!r} must not contain {DELIMITER!r}")
        return f"{self._prefix}{request_id}{DELIMITER}"


class SGLangDialect(NamedCalls):
    """Implements ``Dialect`` for one SGLang server (a worker, not a router)."""

    def __init__(self, client: HTTPClient, config: SGLangConfig, model: ModelFolder, terms: WeightTerms) -> None:
        super().__init__(client)
        takes = terms.adapters is not None
        self.traits = Traits(
            keeps_calls=not takes,
            keeps_kv=config.kv_on_update == "keep" and not takes,
            silence_s=_DRAIN_S,
            aborts_all_at_once=True,
            takes_adapters=takes,
        )
        self.weights = SGLangWeights(client, config, model, terms)
        self._config = config
        self._model = model
        self._num_experts = num_experts(read_config(model.path))
        self._is_incremental = False

    # -- checks ----------------------------------------------------------------------------------------------

    async def identify(self) -> None:
        with meant_for("sglang", "SGLang servers"):
            info = await self._client.ask(ModelInfo, "GET", "/model_info")
        if not info.is_generation:
            raise EngineError(f"{self._client} serves a model that does not generate text")
        if info.preferred_sampling_params is not None:
            raise EngineError(
                f"{self._client} changes the sampling parameters: start it without --preferred-sampling-params"
            )
        ours = read_config(self._model.path).get("model_type")
        if info.model_type not in (None, ours):
            raise EngineError(
                f"{self._client} serves a model of type {info.model_type!r}, but {self._model.path} is of type {ours!r}"
                ": it is another model"
            )
        self._model.check_served(info.model_path, self._client)

    async def check_model(self) -> int:
        info = await self._scheduler_answers()
        self._is_incremental = info.incremental_streaming_output is True
        if (shape := self.weights.adapters) is not None:
            self._check_adapters(shape, info)
        await check_vocabulary(
            str(self._client), self._model, lambda token: self._one_token(logit_bias={str(token): 0.0})
        )
        if (await self._one_token()).meta_info.weight_versions is None:
            raise EngineError(
                f"{self._client} does not say which weights sampled which token (meta_info.weight_versions): use"
                " SGLang 0.5.23 or later"
            )
        return info.max_req_input_len

    def _check_adapters(self, shape: AdapterShape, info: SGLangServerInfo) -> None:
        rank, there = info.max_lora_rank or 0, info.lora_target_modules or ()
        missing = [] if "all" in there else [target for target in shape.targets if target not in there]
        if info.enable_lora and rank >= shape.rank and not missing:
            return
        found = "no adapters" if not info.enable_lora else f"adapters up to rank {rank}, beside {', '.join(there)},"
        raise EngineError(
            f"{self._client} accepts {found} but trainer.lora.publish = 'adapter' sends it adapters of rank"
            f" {shape.rank} beside {', '.join(shape.targets)}; {self.weights.how_to_serve_adapters()}"
        )

    async def _one_token(self, *, timeout_s: float | None = None, **params: Any) -> Generation:
        body = {
            "input_ids": [0],
            **self._adapter(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, **params},
            "return_logprob": True,
        }
        return await self._client.ask(Generation, "POST", "/generate", body=body, timeout_s=timeout_s)

    async def _scheduler_answers(self, *, timeout_s: float | None = None) -> SGLangServerInfo:
        """Ask for the settings, which only the scheduler can give; it takes calls in order."""
        return await self._client.ask(SGLangServerInfo, "GET", "/server_info", timeout_s=timeout_s)

    async def check_health(self, *, decode: bool, timeout_s: float) -> None:
        await self._scheduler_answers(timeout_s=timeout_s)
        if decode:
            await self._one_token(timeout_s=timeout_s)

    # -- calls -----------------------------------------------------------------------------------------------

    async def decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        """Send a call and stream what comes back. Tokens that come before any weights are sent belong to the label
        in force; others wait for the server's word."""
        shown = self._client.reader.shown
        reply = Reply(
            call.request,
            label=call.label,
            incremental=self._is_incremental,
            num_experts=self._num_experts,
            shown=shown,
        )
        num_sends, is_first = self.weights.num_sends, True
        stream = self._client.events(Generation, "/generate", self._body(call), call.patience)
        async with aclosing(stream) as events:
            async for event in events:
                before = reply.num_tokens
                deltas = reply.read(event, certain=self.weights.num_sends == num_sends)
                if num_new := reply.num_tokens - before:
                    cached = event.meta_info.cached_tokens or 0
                    yield Delta(num_held_tokens=num_new, num_cached_tokens=cached if is_first else 0)
                    is_first = False
                for delta in deltas:
                    yield delta

    def _body(self, call: GenerationCall) -> dict[str, Any]:
        request, params = call.request, call.request.params
        body = generate_body(self._rid(call.request_id), request)
        body["sampling_params"] |= {
            "sampling_seed": request.seed >> 1,
            "stream_interval": self._config.stream_interval_tokens,
        }
        # Leaves out the rows before the row that gives the first token of the call.
        from_last_row = {"routed_experts_start_len": len(request.prompt_ids) + len(request.response_ids) - 1}
        return {
            **body,
            "extra_key": call.label,
            **({"return_sampling_mask": True} if params.returns_kept else {}),
            **({"return_routed_experts": True, **from_last_row} if params.returns_routes else {}),
            **self._adapter(),
        }

    def _adapter(self) -> dict[str, str]:
        return {} if (name := self.weights.adapter) is None else {"lora_path": name}

    async def num_calls(self) -> int:
        """See ``Dialect.num_calls``; of all ranks."""
        answer = await self._client.ask(CallCounts, "GET", "/v1/loads", params={"include": "core"})
        return sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in answer.loads)

    async def freeze(self, *, keeps_kv: bool) -> None:
        mode = "in_place" if keeps_kv else "retract"
        await self._client.call("POST", "/pause_generation", body={"mode": mode})
        await self._scheduler_answers()

    async def thaw(self) -> None:
        await self._client.call("POST", "/continue_generation", body={"torch_empty_cache": False})
