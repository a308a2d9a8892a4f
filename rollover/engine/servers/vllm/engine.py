"""vLLM: its ``/v1/completions`` stream and the control calls of its development mode.

What is peculiar to it:

* A request is aborted by the id that its completion call gives it, ``cmpl-<request_id>-0``. Any other id is
  answered with the same "aborted" and stops nothing, so the answer is never looked at.
* An empty list of ids means all requests: none is ever sent.
* Without ``ignore_eos`` it stops at end tokens of its own choice. Ours are all in ``stop_token_ids``.
* On a CPU a seeded call whose prompt is prefilled in parts is the end of it (vLLM 0.32): see ``seed_calls``.
* Cached blocks are found again by tokens and ``cache_salt``: with the label of the weights as the salt, no new call
  can hit a block that other weights have computed, whatever a reset of the cache could not free.
* A pause empties the caches of running calls as well, unless ``clear_cache`` says otherwise; later releases leave those
  of frozen calls alone whatever it says. So it is sent where caches are to be kept, and nowhere relied upon.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rollover.engine.servers.broadcast import ProcessGroup
from rollover.engine.servers.call import Delta, GenerationCall
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.launch import ServerProcess
from rollover.engine.servers.ownership import Ownership
from rollover.engine.servers.vllm.answers import (
    Checksums,
    Choice,
    Completion,
    Models,
    PauseState,
    Success,
    VLLMServerInfo,
    WeightInfo,
)
from rollover.engine.servers.vllm.checksums import MAX_BYTES, ChecksumRecord
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.vllm.transfer import NCCLGroup, send_weights
from rollover.errors import EngineError, EngineTimeout
from rollover.types import FinishReason

_RESET_RETRY_S = 0.05
_HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment and --logprobs-mode processed_logprobs (docs/engines.md)"
)


class VLLMEngine(ServerEngine):
    """One vLLM server."""

    def __init__(
        self,
        client: HTTPClient,
        config: VLLMConfig,
        folder: Path,
        *,
        process: ServerProcess | None = None,
        ownership: Ownership | None = None,
        checksums: ChecksumRecord | None = None,
    ) -> None:
        keeps = config.kv_on_update == "keep"
        super().__init__(
            client,
            config,
            folder,
            process=process,
            ownership=ownership,
            keeps_calls_over_update=keeps,
            keeps_cache_over_update=keeps,
        )
        self._settings = config
        self._model_name = config.served_model or ""
        self._seeds = config.seed_calls == "always"
        self._context = self.model.max_context_tokens
        self._checksums = checksums or ChecksumRecord()
        self._has_checksums = True
        """Until the server says that it has none."""

    @property
    def silence_s(self) -> float:
        return self._settings.drain_s

    async def _identify(self) -> None:
        served = await self.client.ask(Models, "GET", "/v1/models")
        models = {model.id: model for model in served.data}
        name = self._model_name or next(iter(models), "")
        if name not in models:
            there = self.client.reader.shown(", ".join(models)) or "no model"
            raise EngineError(f"{self} serves {there}, not engine.served_model = {name!r}")
        self._model_name = name
        self.model.check_served(models[name].root or "", self)
        self._context = models[name].max_model_len or self.model.max_context_tokens
        for path, kind in (("/is_paused", PauseState), ("/weight_info", WeightInfo)):
            try:
                await self.client.ask(kind, "GET", path)
            except EngineTimeout:
                raise
            except EngineError as e:
                raise EngineError(f"{self} has no {path}: {_HOW_TO_START} ({e})") from None

    async def _check_model(self) -> int:
        if self._settings.seed_calls == "auto":
            self._seeds = await self._bears_seeds()
        await self._check_vocabulary()
        return self._context

    async def _bears_seeds(self) -> bool:
        params, limit_s = {"config_format": "json"}, self._settings.load_timeout_s
        info = await self.client.ask(VLLMServerInfo, "GET", "/server_info", params=params, timeout_s=limit_s)
        device = info.vllm_config.device_config.device
        return isinstance(device, str) and not device.startswith("cpu")

    async def _check_vocabulary(self) -> None:
        """The last id of our vocabulary is one of its own, and the next is not."""
        last, name = self.model.vocab_size - 1, self.client.reader.shown(self._model_name)
        for token, known in ((last, True), (last + 1, False)):
            try:
                await self.client.call("POST", "/v1/completions", body=self._one_token(token))
            except EngineTimeout:
                raise
            except EngineError as e:
                if known:
                    raise EngineError(
                        f"{self} serves {name!r}, which does not take token {token} of"
                        f" {self.model.path} (vocabulary of {last + 1}): is it another model? {e}"
                    ) from None
            else:
                if not known:
                    raise EngineError(
                        f"{self} serves {name!r}, whose vocabulary is larger than the"
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

    async def _decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        stream = self.client.events(Completion, "/v1/completions", self._body(call), call.patience)
        async with aclosing(stream) as events:
            async for event in events:
                self._count_cached(call, event)
                if event.choices:
                    yield _delta(event.choices[0])

    def _body(self, call: GenerationCall) -> dict[str, Any]:
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
            "seed": call_seed(request.seed, len(request.response_ids)) if self._seeds else None,
            "stop": list(params.stop_strings),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": self._served.ownership.label(call.kv_version),
            "stream": True,
            "stream_options": {"include_usage": True},
            "stream_interval": 1 if self._keeps_cache else self._settings.stream_interval_tokens,
        }

    def _count_cached(self, call: GenerationCall, event: Completion) -> None:
        """The last event of a stream may say how much of the prompt was cached."""
        details = event.usage.prompt_tokens_details if event.usage is not None else None
        if details is not None and (cached := min(details.cached_tokens or 0, call.num_prompted_tokens)):
            self._prefilled_tokens -= cached
            self._reprefilled_tokens -= max(0, cached - len(call.request.prompt_ids))

    async def _ask_to_abort(self, request_ids: Collection[str]) -> None:
        ids = [f"cmpl-{request_id}-0" for request_id in request_ids]
        if ids:
            await self.client.call("POST", "/abort_requests", body={"request_ids": ids})

    async def _ask_to_abort_all(self) -> None:
        await self.client.call("POST", "/pause", params={"mode": "abort"})
        if self._running.is_set():
            await self._thaw()

    async def _freeze(self) -> None:
        keeps = {"clear_cache": "false"} if self._keeps_cache else {}
        await self.client.call("POST", "/pause", params={"mode": "keep", **keeps})

    async def _thaw(self) -> None:
        await self.client.call("POST", "/resume")

    async def replace_weights(self, label: str, folder: Path) -> None:
        limit_s = self._settings.load_timeout_s
        if self._settings.weight_transfer == "folder":
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
            await self.client.call("POST", "/collective_rpc", body=reload, timeout_s=limit_s)
        else:
            await send_weights(self.client, folder, label, open_group=self._open_group, limit_s=limit_s)
        await self._reset_prefix_cache()
        await self.set_label(label)

    async def label(self) -> str:
        return (await self.client.ask(WeightInfo, "GET", "/weight_info")).weight_version

    async def set_label(self, label: str) -> None:
        await self.client.call("POST", "/update_weight_version", body={"new_version": label})

    async def confirm(self, version: int, folder: Path) -> None:
        large = sum(info.num_bytes for info in self.model.weights.values()) > MAX_BYTES
        if not self._has_checksums or (large and version > 0):
            return
        body, limit_s = {"action": "checksum"}, self._settings.load_timeout_s
        try:
            found = await self.client.ask(Checksums, "POST", "/weight_checker", body=body, timeout_s=limit_s)
        except EngineTimeout:
            raise
        except EngineError:
            self._has_checksums = False  # an older release, or weights that it cannot hash
            return
        self._checksums.compare(folder, repr(self), found.checksums)

    def _open_group(self, num_workers: int) -> ProcessGroup:
        return NCCLGroup(num_workers)

    async def _reset_prefix_cache(self) -> None:
        """Free what was cached. Calls that are kept over the update hold their blocks; the salt keeps others
        off them. Those that were aborted hold theirs for a moment."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.control_timeout_s
        while not (await self.client.ask(Success, "POST", "/reset_prefix_cache")).success:
            if self._sent():
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise EngineTimeout(
                    f"{self} did not free its prefix cache within {self._settings.control_timeout_s:g} s"
                )
            await asyncio.sleep(_RESET_RETRY_S)

    async def _check_health(self, *, decode: bool, timeout_s: float) -> None:
        await self.client.call("GET", "/health", timeout_s=timeout_s)
        running = self._running.is_set()
        state = await self.client.ask(PauseState, "GET", "/is_paused", timeout_s=timeout_s)
        if state.is_paused and running and self._running.is_set():
            raise EngineError(f"{self} is paused, and not by us")
        if decode:
            await self.client.call("POST", "/v1/completions", body=self._one_token(0), timeout_s=timeout_s)


def _delta(choice: Choice) -> Delta:
    return Delta(
        token_ids=tuple(choice.token_ids),
        logprobs=() if choice.logprobs is None else tuple(choice.logprobs.token_logprobs),
        finish_reason=None if choice.finish_reason is None else FinishReason(choice.finish_reason),
    )


def call_seed(seed: int, num_decoded: int) -> int:
    """The seed of one generation call: a request that starts in mid-response must not draw again the noise of its
    beginning."""
    digest = hashlib.blake2b(f"{seed}/{num_decoded}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
