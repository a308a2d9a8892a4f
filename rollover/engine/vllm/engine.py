"""vLLM: its ``/v1/completions`` stream and the control calls of its development mode.

What is peculiar to it:

* A request is aborted by the id that its completion call gives it, ``cmpl-<request_id>-0``. Any other id is
  answered with the same "aborted" and stops nothing, so the answer is never looked at.
* An empty list of ids means all requests: none is ever sent.
* Without ``ignore_eos`` it stops at end tokens of its own choice. Ours are all in ``stop_token_ids``.
* On a CPU a seeded call whose prompt is prefilled in parts is the end of it (vLLM 0.32): see ``seed_calls``.
* Cached blocks are found again by tokens and ``cache_salt``: with the version as the salt, no new call can
  hit a block that older weights have computed, whatever a reset of the cache could not free.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rollover.engine.http.answer import field_of
from rollover.engine.http.broadcast import Group
from rollover.engine.http.call import Call, Delta
from rollover.engine.http.client import HTTPClient
from rollover.engine.http.engine import ServerEngine
from rollover.engine.http.launch import ServerProcess
from rollover.engine.vllm.config import VLLMConfig
from rollover.engine.vllm.transfer import NCCLGroup, send_weights
from rollover.errors import EngineError, EngineTimeout
from rollover.types import FinishReason

_RESET_RETRY_S = 0.05
_REASONS = {reason.value: reason for reason in FinishReason}
_HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment and --logprobs-mode processed_logprobs (docs/engines.md)"
)


class VLLMEngine(ServerEngine):
    """One vLLM server."""

    def __init__(
        self, client: HTTPClient, config: VLLMConfig, folder: Path, *, process: ServerProcess | None = None
    ) -> None:
        keeps = config.kv_on_update == "keep"
        super().__init__(
            client, config, folder, process=process, keeps_calls_over_update=keeps, keeps_cache_over_update=keeps
        )
        self._settings = config
        self._model_name = config.served_model or ""
        self._seeds = config.seed_calls == "always"

    @property
    def silence_s(self) -> float:
        return self._settings.drain_s

    async def _check_server(self) -> int:
        served = await self.client.call("GET", "/v1/models")
        models = {
            card["id"]: card for card in field_of(served, "data", list) if isinstance(card, dict) and "id" in card
        }
        name = self._model_name or next(iter(models), "")
        if name not in models:
            raise EngineError(f"{self} serves {', '.join(models) or 'no model'}, not engine.served_model = {name!r}")
        self._model_name = name
        self.model.check_served(str(models[name].get("root") or ""), self)
        for path in ("/is_paused", "/weight_info"):
            try:
                await self.client.call("GET", path)
            except EngineTimeout:
                raise
            except EngineError as e:
                raise EngineError(f"{self} has no {path}: {_HOW_TO_START} ({e})") from None
        if self._settings.seed_calls == "auto":
            self._seeds = await self._bears_seeds()
        await self._thaw()  # a run that was killed in an update may have left it paused
        await self._check_vocabulary()
        context = models[name].get("max_model_len")
        return context if isinstance(context, int) else self.model.max_context_tokens

    async def _bears_seeds(self) -> bool:
        info = await self.client.call(
            "GET", "/server_info", params={"config_format": "json"}, timeout_s=self._settings.load_timeout_s
        )
        device = field_of(field_of(info, "vllm_config", dict), "device_config", dict).get("device")
        return isinstance(device, str) and not device.startswith("cpu")

    async def _check_vocabulary(self) -> None:
        """The last id of our vocabulary is one of its own, and the next is not."""
        last = self.model.vocab_size - 1
        for token, known in ((last, True), (last + 1, False)):
            try:
                await self.client.call("POST", "/v1/completions", body=self._one_token(token))
            except EngineTimeout:
                raise
            except EngineError as e:
                if known:
                    raise EngineError(
                        f"{self} serves {self._model_name!r}, which does not take token {token} of"
                        f" {self.model.path} (vocabulary of {last + 1}): is it another model? {e}"
                    ) from None
            else:
                if not known:
                    raise EngineError(
                        f"{self} serves {self._model_name!r}, whose vocabulary is larger than the"
                        f" {last + 1} of {self.model.path}: it is another model"
                    )

    def _one_token(self, token: int) -> dict[str, Any]:
        return {
            "model": self._model_name,
            "prompt": [token],
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
        }

    async def _decode(self, call: Call) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.client.events("/v1/completions", self._body(call), call.patience)) as events:
            async for event in events:
                self._count_cached(call, event)
                if choices := field_of(event, "choices", list):
                    yield self._delta(choices[0])

    def _body(self, call: Call) -> dict[str, Any]:
        """Every field that a server default could change is there."""
        request, params = call.request, call.request.params
        return {
            "model": self._model_name,
            "request_id": request.request_id,
            "prompt": [*request.prompt_ids, *request.response_ids],
            "add_special_tokens": False,
            "max_tokens": params.max_new_tokens - len(request.response_ids),
            "min_tokens": 0,
            "n": 1,
            "echo": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": hop_seed(request.seed, len(request.response_ids)) if self._seeds else None,
            "stop": list(params.stop_strings),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"v{call.kv_version}",
            "stream": True,
            "stream_options": {"include_usage": True},
            "stream_interval": 1 if self._keeps_cache else self._settings.stream_interval_tokens,
        }

    def _delta(self, choice: Any) -> Delta:
        token_ids = field_of(choice, "token_ids", list)
        logprobs = field_of(choice.get("logprobs") or {"token_logprobs": []}, "token_logprobs", list)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _REASONS:
            raise EngineError(
                f"{self} ended a call with finish_reason {reason!r}, which is none of {', '.join(_REASONS)}"
            )
        if not all(type(t) is int for t in token_ids) or not all(isinstance(p, int | float) for p in logprobs):
            raise EngineError(f"{self} sent tokens {token_ids[:8]} with log-probs {logprobs[:8]}")
        return Delta(
            token_ids=tuple(token_ids),
            logprobs=tuple(map(float, logprobs)),
            finish_reason=None if reason is None else _REASONS[reason],
        )

    def _count_cached(self, call: Call, event: dict[str, Any]) -> None:
        """The last event of a stream may say how much of the prompt was cached."""
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if cached := details.get("cached_tokens"):
            self._prefilled_tokens -= cached
            self._reprefilled_tokens -= max(0, cached - len(call.request.prompt_ids))

    async def _ask_to_abort(self, request_ids: Collection[str]) -> None:
        ids = [f"cmpl-{request_id}-0" for request_id in request_ids]
        if ids:
            await self.client.call("POST", "/abort_requests", body={"request_ids": ids})

    async def _ask_to_abort_all(self) -> None:
        await self.client.call("POST", "/pause", params={"mode": "abort", "clear_cache": "false"})
        if self._running.is_set():
            await self._thaw()

    async def _freeze(self) -> None:
        await self.client.call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"})

    async def _thaw(self) -> None:
        await self.client.call("POST", "/resume")

    async def _replace_weights(self, version: int, folder: Path) -> None:
        limit_s = self._settings.load_timeout_s
        if self._settings.weight_transfer == "folder":
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
            await self.client.call("POST", "/collective_rpc", body=reload, timeout_s=limit_s)
        else:
            await send_weights(self.client, folder, version, open_group=self._open_group, limit_s=limit_s)
        await self._reset_prefix_cache()
        await self.client.call("POST", "/update_weight_version", body={"new_version": str(version)})

    def _open_group(self, num_workers: int) -> Group:
        return NCCLGroup(num_workers)

    async def _reset_prefix_cache(self) -> None:
        """Free what was cached. Calls that are kept over the update hold their blocks; the salt keeps others
        off them. Those that were aborted hold theirs for a moment."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.control_timeout_s
        while not field_of(await self.client.call("POST", "/reset_prefix_cache"), "success", bool):
            if self._sent():
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise EngineTimeout(
                    f"{self} did not free its prefix cache within {self._settings.control_timeout_s:g} s"
                )
            await asyncio.sleep(_RESET_RETRY_S)

    async def _served_version(self) -> str:
        return str(field_of(await self.client.call("GET", "/weight_info"), "weight_version", str))

    async def _check_health(self, *, decode: bool, timeout_s: float) -> None:
        await self.client.call("GET", "/health", timeout_s=timeout_s)
        running = self._running.is_set()
        paused = field_of(await self.client.call("GET", "/is_paused", timeout_s=timeout_s), "is_paused", bool)
        if paused and running and self._running.is_set():
            raise EngineError(f"{self} is paused, and not by us")
        if decode:
            await self.client.call("POST", "/v1/completions", body=self._one_token(0), timeout_s=timeout_s)


def hop_seed(seed: int, num_decoded: int) -> int:
    """The seed of one hop: a request that starts in mid-response must not draw again the noise of its
    beginning."""
    digest = hashlib.blake2b(f"{seed}/{num_decoded}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
