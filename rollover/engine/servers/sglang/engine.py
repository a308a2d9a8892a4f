"""SGLang: its ``/generate`` stream and its control calls.

What is peculiar to it:

* A request is aborted with all others whose ids begin with its own: ours end in a delimiter that is nowhere else in
  them. Two seconds after a stream has ended its id is aborted once more, whoever has it then: ours begin with the name
  of the engine object, so that no other run can have used them. An abort is remembered with the request it was for,
  also where it came too early to work; aborting all is not.
* A pause is acknowledged before it has reached the scheduler; an answer that the scheduler itself gives afterwards
  shows that it has.
* An update that is refused may have changed the weights all the same, and a file that does not fit kills the server. So
  files are checked here first, and after a refusal the old weights are loaded again.
* ``ignore_eos`` switches all stop tokens off, ours included; without it the server stops at the end tokens of its own
  model folder as well, which is an error unless they are among ours.
* Log-probs are taken before ``top_p`` and ``top_k`` cut the distribution; such calls are refused.
* Cached blocks are found again by tokens and ``extra_key``. With the label of the weights as the key, no new
  call can hit a block that other weights have computed while running calls keep theirs. A call that is taken off the
  batch leaves blocks of new weights under its old key: so the cache is flushed at every other update, the first one
  among them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.broadcast import ProcessGroup, TorchGroup, address_towards
from rollover.engine.servers.call import Delta, GenerationCall
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.launch import ServerProcess
from rollover.engine.servers.ownership import Ownership
from rollover.engine.servers.sglang.answers import (
    Generation,
    ModelInfo,
    SchedulerLoads,
    SGLangServerInfo,
    UpdateOutcome,
)
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.reply import Reply
from rollover.engine.servers.sglang.transfer import send_weights
from rollover.errors import EngineError, EngineTimeout

DELIMITER = ";"
_DRAIN_S = 0.05
"""How long what was sampled before a pause may take from the scheduler to us. Labels do not depend on it."""
_SWEEP_S = 0.5


class SGLangEngine(ServerEngine):
    """One SGLang server (a worker, not a router)."""

    def __init__(
        self,
        client: HTTPClient,
        config: SGLangConfig,
        folder: Path,
        *,
        process: ServerProcess | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        super().__init__(
            client,
            config,
            folder,
            process=process,
            ownership=ownership,
            keeps_calls_over_update=True,
            keeps_cache_over_update=config.kv_on_update == "keep",
        )
        self._settings = config
        self._prefix = f"{secrets.token_hex(4)}/"
        self._incremental = False
        self._num_loads = 0
        self._cache_stays = False
        """What the last pause has decided for the update that follows."""
        self._opened = False
        self._aborting_all = asyncio.Lock()
        """No call is sent while it is held."""
        self._sweeping = False

    @property
    def silence_s(self) -> float:
        return _DRAIN_S

    async def open(self) -> None:
        await super().open()
        self._opened = True

    # -- checks ----------------------------------------------------------------------------------------------

    async def _identify(self) -> None:
        info = await self.client.ask(ModelInfo, "GET", "/model_info")
        if not info.is_generation:
            raise EngineError(f"{self} serves a model that does not generate text")
        if info.preferred_sampling_params is not None:
            raise EngineError(f"{self} changes how tokens are drawn: start it without --preferred-sampling-params")
        ours = json.loads((self.model.path / "config.json").read_text(encoding="utf-8")).get("model_type")
        if info.model_type not in (None, ours):
            raise EngineError(
                f"{self} serves a model of type {info.model_type!r}, but {self.model.path} is of type {ours!r}: it is"
                " another model"
            )
        self.model.check_served(info.model_path, self)

    async def _check_model(self) -> int:
        settings = await self._scheduler_answers()
        self._incremental = settings.incremental_streaming_output is True
        await self._check_vocabulary()
        await self._check_reports()
        return settings.max_req_input_len

    async def _check_vocabulary(self) -> None:
        """The last id of our vocabulary is one of its own, and the next is not."""
        last = self.model.vocab_size - 1
        for token, known in ((last, True), (last + 1, False)):
            try:
                await self._one_token(logit_bias={str(token): 0.0})
            except EngineTimeout:
                raise
            except EngineError as e:
                if known:
                    raise EngineError(
                        f"{self} does not know token {token} of {self.model.path} (vocabulary of {last + 1}):"
                        f" is it another model? {e}"
                    ) from None
            else:
                if not known:
                    raise EngineError(
                        f"{self} has a larger vocabulary than the {last + 1} of {self.model.path}: it is another model"
                    )

    async def _check_reports(self) -> None:
        if (await self._one_token()).meta_info.weight_versions is None:
            raise EngineError(
                f"{self} does not say which weights sampled which token (meta_info.weight_versions): use SGLang 0.5.23"
                " or later"
            )

    async def _one_token(self, *, timeout_s: float | None = None, **params: Any) -> Generation:
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, **params},
            "return_logprob": True,
        }
        return await self.client.ask(Generation, "POST", "/generate", body=body, timeout_s=timeout_s)

    async def _scheduler_answers(self, *, timeout_s: float | None = None) -> SGLangServerInfo:
        """The server's settings, which it does not give without its scheduler; that one takes calls in order."""
        return await self.client.ask(SGLangServerInfo, "GET", "/server_info", timeout_s=timeout_s)

    async def _check_health(self, *, decode: bool, timeout_s: float) -> None:
        """Not by ``/health``: a paused server fails that after a while."""
        await self._scheduler_answers(timeout_s=timeout_s)
        if decode:
            await self._one_token(timeout_s=timeout_s)

    # -- decoding --------------------------------------------------------------------------------------------

    async def _decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        """Tokens that come before any weights are loaded are those of the version in force; others wait for the
        server's word."""
        ownership = self._served.ownership
        reply = Reply(
            call.request,
            label=self._served.label,
            version_of=ownership.version,
            incremental=self._incremental,
            shown=self.client.reader.shown,
        )
        num_loads, first = self._num_loads, True
        stream = self.client.events(Generation, "/generate", self._body(call), call.patience)
        async with aclosing(stream) as events:
            async for event in events:
                before = reply.num_tokens
                deltas = reply.read(event, certain=self._num_loads == num_loads)
                if reply.num_tokens > before:
                    self._last_token_s = asyncio.get_running_loop().time()
                    call.patience.heard()
                    if first:
                        self._count_cached(call, event)
                        first = False
                for delta in deltas:
                    yield delta

    def _admit(self, request: GenerateRequest) -> GenerationCall:
        params = request.params
        if params.temperature > 0 and (params.top_p < 1 or params.top_k > 0):
            raise EngineError(
                f"{request.request_id}: SGLang reports log-probs from before top_p and top_k, not those of the"
                " distribution that it samples from: use rollout.top_p = 1 and rollout.top_k = 0, got"
                f" {params.top_p:g} and {params.top_k}"
            )
        if DELIMITER in request.request_id:
            raise EngineError(f"request id {request.request_id!r} must not contain {DELIMITER!r}")
        return super()._admit(request)

    def _body(self, call: GenerationCall) -> dict[str, Any]:
        """Every field that a server default could change is there."""
        request, params = call.request, call.request.params
        return {
            "rid": self._rid(request.request_id),
            "input_ids": [*request.prompt_ids, *request.response_ids],
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens - len(request.response_ids),
                "min_new_tokens": 0,
                "n": 1,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "sampling_seed": request.seed >> 1,
                "stop": list(params.stop_strings),
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": not params.stop_token_ids,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "stream_interval": self._settings.stream_interval_tokens,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "extra_key": self._served.ownership.label(call.kv_version),
            "stream": True,
        }

    def _count_cached(self, call: GenerationCall, event: Generation) -> None:
        cached = min(event.meta_info.cached_tokens or 0, call.num_prompted_tokens)
        self._prefilled_tokens -= cached
        self._reprefilled_tokens -= max(0, cached - len(call.request.prompt_ids))

    # -- stopping --------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str]) -> None:
        await super().abort(request_ids)
        if request_ids and not self._sweeping and not self._closed:
            self._sweeping = True
            self._in_background(self._sweep())

    async def _sweep(self) -> None:
        """See that the server runs no more calls than we have open: one whose connection was closed is decoded for
        nobody. Its load is told with some delay, so one look is not enough."""
        loop = asyncio.get_running_loop()
        give_up_s, num_clear = loop.time() + self._config.abort_timeout_s / 2, 0
        try:
            while num_clear < 2:
                surplus = await self._server_load() > len(self._sent())
                num_clear = 0 if surplus else num_clear + 1
                if surplus and loop.time() > give_up_s:
                    async with self._aborting_all:
                        if not self._sent():
                            await self._ask_to_abort_all()
                await asyncio.sleep(_SWEEP_S)
        except EngineError:
            return  # the pool's probes say more about it
        finally:
            self._sweeping = False

    async def _server_load(self) -> int:
        """Calls that the server runs or has queued, of all its ranks."""
        answer = await self.client.ask(SchedulerLoads, "GET", "/v1/loads", params={"include": "core"})
        return sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in answer.loads)

    def _rid(self, request_id: str) -> str:
        """The server's id of a call: no other one begins with it, and none is ever used again."""
        return f"{self._prefix}{request_id}{DELIMITER}"

    async def _turn_to_send(self) -> None:
        await super()._turn_to_send()
        while self._aborting_all.locked():
            async with self._aborting_all:
                pass
            await super()._turn_to_send()

    async def _ask_to_abort(self, request_ids: Collection[str]) -> None:
        """One by one, or at once where they are all that we have open there."""
        async with self._aborting_all:
            if self._opened and {call.request.request_id for call in self._sent()} <= set(request_ids):
                await self._ask_to_abort_all()
                return
        await asyncio.gather(*(self._abort_request(rid=self._rid(name)) for name in request_ids))

    async def _ask_to_abort_all(self) -> None:
        await self._abort_request(rid="", abort_all=True)

    async def _abort_request(self, *, rid: str, abort_all: bool = False) -> None:
        await self.client.call("POST", "/abort_request", body={"rid": rid, "abort_all": abort_all})

    # -- weights ---------------------------------------------------------------------------------------------

    async def _freeze(self) -> None:
        self._cache_stays = self._keeps_cache and bool(self._sent())
        mode = "in_place" if self._cache_stays else "retract"
        await self.client.call("POST", "/pause_generation", body={"mode": mode})
        await self._scheduler_answers()

    async def _thaw(self) -> None:
        await self.client.call("POST", "/continue_generation", body={"torch_empty_cache": False})

    async def replace_weights(self, label: str, folder: Path) -> None:
        self._num_loads += 1
        if self._settings.weight_transfer == "folder":
            await self._have_read(label, folder)
        else:
            await send_weights(
                self.client,
                folder,
                label,
                open_group=self._open_group,
                flush_cache=not self._cache_stays,
                limit_s=self._settings.load_timeout_s,
            )
        if not self._cache_stays:
            lost = sum(len(call.request.prompt_ids) + len(call.response) for call in self._sent())
            self._prefilled_tokens += lost
            self._reprefilled_tokens += lost

    async def _have_read(self, label: str, folder: Path) -> None:
        answer = await self.client.ask(
            UpdateOutcome,
            "POST",
            "/update_weights_from_disk",
            body={
                "model_path": str(folder.resolve()),
                "weight_version": label,
                "abort_all_requests": False,
                "flush_cache": not self._cache_stays,
            },
            timeout_s=self._settings.load_timeout_s,
        )
        if not answer.success:
            raise EngineError(f"{self} did not load {folder}: {answer.message or 'no reason given'}")

    def _open_group(self, num_workers: int) -> ProcessGroup:
        return TorchGroup(
            self._settings.weight_transfer,
            self._settings.transfer_host or address_towards(self.client.url),
            f"{self._prefix}{self._num_loads}",
            num_workers=num_workers,
            timeout_s=self._settings.load_timeout_s,
        )

    async def label(self) -> str:
        return (await self.client.ask(ModelInfo, "GET", "/model_info")).weight_version

    async def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self.client.call("POST", "/update_weight_version", body=body)
