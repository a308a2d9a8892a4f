"""The embedded engine behind HTTP, spoken to in its own words (``messages``).

What is peculiar to it:

* Each event says which weights sampled its tokens and which computed their cache, so running calls continue over an
  update and nothing depends on when an event arrives.
* A request id is never used twice on a server, whoever used it before: ours begin with the name of the dialect object.
* A call whose connection is closed is aborted there, so the server decodes no call that was given up.
"""

from __future__ import annotations

import secrets
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.calls.dialect import Traits
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import GENERATE_REQUEST, ServerInfo, TokensEvent
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient, Patience, meant_for
from rollover.engine.servers.weights.endpoint import WeightEndpoint, WeightTerms
from rollover.engine.servers.weights.transfer import TransferCalls
from rollover.errors import EngineError
from rollover.token_bytes import split_bytes
from rollover.types import SamplingParams
from rollover.weights.groups import GroupPlan

_DRAIN_S = 0.02
"""Longest time that tokens sampled before a pause may take to reach us. Labels do not depend on it."""


class EmbeddedServerWeights(WeightEndpoint[EmbeddedServerConfig]):
    """Implements ``WeightEndpoint``. A load from a folder is all or nothing; a load through a group that fails in the
    middle leaves a server that must be given all weights again. The server merges adapters into the model of a folder.
    """

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        await self._load(label, folder, keeps_kv=keeps_kv)

    async def _send_adapter(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Have the server merge adapters into the run's model."""
        await self._load(label, source, base=str(self._base.resolve()), keeps_kv=keeps_kv)

    async def _load(self, label: str, folder: Path, *, keeps_kv: bool, base: str | None = None) -> None:
        body = {"folder": str(folder.resolve()), "base": base, "label": label, "keeps_kv": keeps_kv}
        await self._post("/load_weights", body)

    async def _transfer(
        self, label: str, *, keeps_kv: bool
    ) -> tuple[GroupPlan, Callable[[Mapping[str, Any]], TransferCalls]]:
        config = self._config
        plan = self._torch_plan(config.weight_transfer, config.transfer_host, num_workers=1, is_flat=True)

        def calls(address: Mapping[str, Any]) -> TransferCalls:
            return TransferCalls(
                meet=("/group/join", dict(address)),
                begin=("/group/begin", {}),
                announce=lambda bucket, _: ("/group/receive", {**bucket.described("dtypes"), "is_flat": True}),
                finish=("/group/finish", {"label": label, "keeps_kv": keeps_kv}),
                leave=("/group/leave", {}),
            )

        return plan, calls

    async def release_memory(self) -> None:
        await self._post("/sleep", {})


class EmbeddedServerDialect:
    """Implements ``Dialect`` for one server of the embedded engine."""

    def __init__(
        self, client: HTTPClient, config: EmbeddedServerConfig, model: ModelFolder, terms: WeightTerms
    ) -> None:
        self.traits = Traits(
            keeps_calls=True,
            keeps_kv=config.kv_on_update == "keep",
            silence_s=_DRAIN_S,
            is_seeded=True,
            takes_adapters=True,
        )
        self.weights = EmbeddedServerWeights(client, config, model, terms)
        self._client = client
        self._model = model
        self._prefix = f"{secrets.token_hex(4)}/"

    async def identify(self) -> None:
        info = await self._info()
        if info.vocab_size != self._model.vocab_size:
            raise EngineError(
                f"{self._client} serves {info.model_path!r} with a vocabulary of {info.vocab_size}, and"
                f" {self._model.path} has one of {self._model.vocab_size}: it is another model"
            )
        self._model.check_served(info.model_path, self._client)

    async def check_model(self) -> int:
        info = await self._info()
        keeps_kv = self.traits.keeps_kv
        self.traits = replace(
            self.traits,
            number_format=info.number_format,
            prefill_tokens_per_iteration=None if keeps_kv else info.prefill_tokens_per_iteration,
        )
        return info.max_context_tokens

    async def check_health(self, *, decode: bool, timeout_s: float) -> None:
        await self._client.call("GET", "/health", timeout_s=timeout_s)
        if not decode:
            return
        name = f"health-{secrets.token_hex(8)}"
        request = GenerateRequest(
            request_id=name,
            sample_key=name,
            prompt_key=name,
            prompt_ids=(0,),
            params=SamplingParams(max_new_tokens=1),
            seed=0,
        )
        patience = Patience(first_s=timeout_s, between_s=timeout_s)
        async with aclosing(self._events(request, patience)) as events:
            async for _ in events:
                pass

    async def decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        request, is_first = call.request, True
        async with aclosing(self._events(request, call.patience)) as events:
            async for event in events:
                yield Delta(
                    token_ids=tuple(event.token_ids),
                    logprobs=tuple(event.logprobs),
                    finish_reason=event.finish_reason,
                    label=event.label,
                    kv_label=event.kv_label,
                    num_prefilled_tokens=event.num_prefilled_tokens if is_first else None,
                    kept=self._beside(event.kept, len(event.token_ids)),
                    routes=self._beside(event.routes, len(event.token_ids)),
                )
                is_first = False

    def _beside(self, joined: str, num_tokens: int) -> tuple[bytes, ...]:
        try:
            return split_bytes(b64decode(joined, validate=True), num_tokens)
        except ValueError as e:
            raise EngineError(f"{self._client} sent kept sets or routes that cannot be read: {e}") from None

    async def ask_to_abort(self, request_ids: Collection[str]) -> None:
        body = {"request_ids": [self._prefix + request_id for request_id in request_ids]}
        await self._client.call("POST", "/abort", body=body)

    async def ask_to_abort_all(self) -> None:
        await self._client.call("POST", "/abort", body={"all": True})

    async def num_calls(self) -> None:
        """Return ``None``: a call that was given up is not decoded."""

    async def freeze(self, *, keeps_kv: bool) -> None:
        await self._client.call("POST", "/pause", body={})

    async def thaw(self) -> None:
        await self._client.call("POST", "/resume", body={})

    def _events(self, request: GenerateRequest, patience: Patience) -> AsyncGenerator[TokensEvent, None]:
        named = replace(
            request,
            request_id=self._prefix + request.request_id,
            sample_key=self._prefix + request.sample_key,
            prompt_key=self._prefix + request.prompt_key,
        )
        body = GENERATE_REQUEST.dump_python(named, mode="json")
        return self._client.events(TokensEvent, "/generate", body, patience)

    async def _info(self) -> ServerInfo:
        with meant_for("embedded_server", "servers started with rollover serve"):
            return await self._client.ask(ServerInfo, "GET", "/info")
