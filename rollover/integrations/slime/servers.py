"""The servers of slime as an engine: lent for the duration of a rollout, with weights that change only between
rollouts.

::

    begin(step) ──▶ router: who are your workers? ──▶ each worker: which weights? ──▶ all agree ──▶ a pool of them
    generate, abort ──▶ the pool
    end() ──▶ each worker: is it idle? ──▶ the pool is gone

====================  ===================================  =================================================
call                  waits for                            is unblocked by
====================  ===================================  =================================================
``begin``             the router, every worker's label     ``control_timeout_s`` for each
``generate``          the pool (``engine.servers.pool``)   its deadlines; ``first_token_timeout_s``
``end``               calls that a worker still runs       their end; ``abort_timeout_s`` twice
====================  ===================================  =================================================

Invariants: between ``end`` and ``begin`` none of our calls is open and no request of ours reaches a server,
since slime may have taken its memory away; a token's version is that of the label which all workers had at the start
and which the answer repeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx

from rollover.clock import Clock
from rollover.engine.background import BackgroundTasks, attempt
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.servers.calls.abort import Aborter
from rollover.engine.servers.calls.open_calls import OpenCalls
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.open import worker_urls
from rollover.errors import EngineError, EngineTimeout, ModelError
from rollover.hf.config import read_config
from rollover.integrations.slime.dialect import LentDialect, LentLabel
from rollover.integrations.slime.labels import agreed, count
from rollover.weights.base import WeightPath, WeightSource
from rollover.weights.sources import FolderWeights

logger = logging.getLogger(__name__)

_FIRST_LOOK_S, _MAX_LOOK_S = 0.02, 1.0


def served_model(model: str, context: int | None = None) -> ModelFolder:
    """Return the sizes against which calls are checked; those of its text model if the model contains one. Raises
    ``ModelError`` if its config has no sizes.

    Args:
        model: a Hugging Face folder, or the name of one on the hub.
        context: the longest context of the servers, if slime has the setting; otherwise it is the model's.
    """
    config: Mapping[str, Any]
    if Path(model).exists():
        config = read_config(Path(model))
    else:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model, trust_remote_code=True).to_dict()
    for table in (config, config.get("text_config")):
        if isinstance(table, Mapping):
            vocab, longest = table.get("vocab_size"), table.get("max_position_embeddings")
            if isinstance(vocab, int) and isinstance(longest, int):
                return ModelFolder(
                    path=Path(model),
                    vocab_size=vocab,
                    max_context_tokens=context or longest,
                    tied_embeddings=False,
                    cache_numbers_per_token=0,
                    weights={},
                )
    raise ModelError(f"the config of {model} names no vocab_size and max_position_embeddings of a language model")


class LentWeights:
    """The weights of one server, as known at the start of a rollout.

    Example: with the label ``"3"`` for version 12, ``version_of("3", "g0.0#1")`` is 12, and ``"4"`` is refused.
    """

    def __init__(self, endpoint: LentLabel, client: HTTPClient, label: str) -> None:
        self.version = 0
        self.label = label
        self._endpoint = endpoint
        self._client = client
        self._changed: str | None = None

    def version_of(self, label: str | None, request_id: str) -> int:
        """Return the version of tokens with a label. Raises ``EngineError`` for any label other than the rollout's."""
        if label is not None and not self._is_ours(label):
            shown = self._client.reader.shown(label)
            raise EngineError(
                f"{request_id}: weights {shown!r} sampled its tokens, and the rollout began with {self.label!r} on"
                f" {self._client}: its weights were changed while calls were open"
            )
        return self.version

    def refuse_when_unknown(self) -> None:
        if self._changed is not None:
            raise EngineError(self._changed)

    async def check(self, still: Callable[[], bool]) -> None:
        """Raise ``EngineError`` when the server's weights have changed since the start of the rollout."""
        label = await self._endpoint.label()
        if still() and not self._is_ours(label):
            shown = self._client.reader.shown(label)
            self._changed = (
                f"{self._client} says that it serves weights {shown!r}, and the rollout began with {self.label!r}: its"
                " weights were changed in the middle of it, or it was restarted"
            )
        self.refuse_when_unknown()

    def _is_ours(self, label: str) -> bool:
        try:
            return count(label) == count(self.label)
        except EngineError:
            return False


class LentServer:
    """One worker of slime, as a member of a pool. It is told when its weights have changed, and loads none itself."""

    takes: WeightPath = "memory"
    sleeper = None
    group = None

    def __init__(self, client: HTTPClient, config: SGLangConfig, model: ModelFolder, *, label: str) -> None:
        self.capabilities = _capabilities(config, model, num_workers=1)
        self._client = client
        self._health_timeout_s = config.health_timeout_s
        self._abort_timeout_s = config.abort_timeout_s
        self._dialect = LentDialect(client, response_timeout_s=config.first_token_timeout_s)
        self._tasks = BackgroundTasks()
        self._weights = LentWeights(self._dialect.weights, client, label)
        self._calls = OpenCalls(client, self._dialect, self._weights, model, config, self._tasks)
        self._aborter = Aborter(repr(client), self._dialect, self._calls, timeout_s=config.abort_timeout_s)
        self._closed = False

    def __repr__(self) -> str:
        return repr(self._client)

    async def open(self) -> None:
        """Check the server. Raises ``EngineError`` saying what is wrong."""
        await self._dialect.identify()
        longest = await self._dialect.check_model()
        self._calls.max_context_tokens = min(self.capabilities.max_context_tokens, longest)

    async def probe(self, *, decode: bool = False) -> None:
        """Raise ``EngineError`` unless the scheduler answers and the weights are the rollout's."""
        await self._dialect.check_health(decode=decode, timeout_s=self._health_timeout_s)
        await self._weights.check(lambda: not self._closed)

    async def revive(self) -> None:
        """Do nothing: slime restarts its servers itself."""

    async def hand_back(self) -> None:
        """Return when the server runs no call. One that does not answer is left to slime, with a line in the log, since
        its calls were resumed elsewhere. Raises ``EngineTimeout`` when it still runs calls although all were
        aborted."""
        loop, look_s = asyncio.get_running_loop(), _FIRST_LOOK_S
        give_up_s = loop.time() + 2 * self._abort_timeout_s
        num_calls: int | None = 0
        try:
            while num_calls := await self._dialect.num_calls():
                if loop.time() > give_up_s:
                    break
                await self._dialect.ask_to_abort_all()
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, _MAX_LOOK_S)
        except EngineError as error:
            logger.warning("%s does not answer at the end of the rollout and is left to its trainer: %s", self, error)
            return
        if num_calls:
            raise EngineTimeout(
                f"{self} still runs {num_calls} calls {2 * self._abort_timeout_s:g} s after all were aborted, and its"
                " weights must not change during a call"
            )

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Implement ``Engine.generate``. Raises ``EngineError`` when the server fails or changes its weights."""
        if self._closed:
            raise EngineError(f"{self} was given back to its trainer: the call came too late")
        call = self._calls.start(request)
        try:
            while True:
                item = await call.stream.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if not call.ended.is_set():
                self._tasks.start(self._aborter.abort([call]))

    async def abort(self, request_ids: Collection[str]) -> None:
        """Implement ``Engine.abort``. A call that the server does not hand over within ``abort_timeout_s`` ends with
        the tokens that it has sent, which are none if answers are not streamed."""
        await self._aborter.abort(self._calls.named(request_ids))

    def stats(self) -> EngineStats:
        return self._calls.stats()

    @property
    def usage(self) -> Counter[str]:
        return self._dialect.usage

    async def close(self) -> None:
        """End all calls. The server stays as it is."""
        if self._closed:
            return
        self._closed = True
        if sent := self._calls.end_all():
            await attempt(self._dialect.ask_to_abort([call.request_id for call in sent]), self._abort_timeout_s)
        await self._tasks.cancel()
        await self._client.close()

    # -- WeightTarget ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Do nothing: slime's weights change only between rollouts."""

    async def load(self, version: int, source: WeightSource) -> None:
        """Register ``version`` as that of the weights in force. Raises ``EngineError`` when they are no longer those
        that the rollout started with."""
        await self._weights.check(lambda: True)
        self._weights.version = version

    async def resume(self) -> None:
        """Do nothing, as in ``pause``."""


class LentServers:
    """Implements ``Engine`` over the workers behind slime's router, from ``begin`` to ``end`` of each rollout.

    Args:
        config: its only url is the router's; ``first_token_timeout_s`` is the longest wait for a whole response
            if answers are not streamed.
        num_workers: their number, which determines how many samples are decoded at the same time.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        config: SGLangConfig,
        model: ModelFolder,
        clock: Clock,
        *,
        num_workers: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.capabilities = _capabilities(config, model, num_workers=num_workers)
        self._config = config
        self._model = model
        self._clock = clock
        self._transport = transport
        self._members: list[LentServer] = []
        self._pool: EnginePool | None = None
        self._totals = EngineStats(num_running=0, num_waiting=0, policy_version=0)
        self.usage: Counter[str] = Counter()
        """Sums over the calls of the newest rollout that has ended, see ``LentDialect.usage``."""

    def __repr__(self) -> str:
        return f"the servers behind {self._config.urls[0]}"

    async def begin(self) -> str:
        """Find the workers and return the label of the weights that all of them serve. Raises ``EngineError`` when a
        worker cannot be used, or they disagree."""
        assert self._pool is None, "the rollout before has not ended"
        urls = await workers(self._config, self._transport)
        clients = [HTTPClient(url, self._config, transport=self._transport) for url in urls]
        try:
            labels = await _labels(clients, self._config.urls[0])
            label = agreed({client.url: found for client, found in labels.items()})
            self._members = [LentServer(client, self._config, self._model, label=label) for client in labels]
            await asyncio.gather(*(member.open() for member in self._members))
            await asyncio.gather(*(client.close() for client in clients if client not in labels))
        except BaseException:
            self._members = []
            await asyncio.gather(*(client.close() for client in clients))
            raise
        return label

    async def serves(self, version: int) -> None:
        """Register ``version`` as the version of the workers' weights; from now on they take calls."""
        weights = FolderWeights(version, self._model.path)
        self._pool = EnginePool(self._members, weights, self._clock, self._config)
        await self._pool.open()
        await self._pool.load(version, weights)

    async def end(self) -> None:
        """Hand the servers back, idle. See ``LentServer.hand_back``."""
        members, self._members = self._members, []
        pool, self._pool = self._pool, None
        try:
            if pool is not None:
                self._totals = _sum(self._totals, pool.stats())
                await asyncio.gather(*(member.hand_back() for member in members))
        finally:
            await _close(pool, members)
            self.usage = sum((member.usage for member in members), Counter())

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Implement ``Engine.generate``. Raises ``EngineError`` between rollouts."""
        if self._pool is None:
            raise EngineError(f"{self} are lent for rollouts only, and {request.request_id} came between two of them")
        async for chunk in self._pool.generate(request):
            yield chunk

    async def abort(self, request_ids: Collection[str]) -> None:
        if self._pool is not None:
            await self._pool.abort(request_ids)

    def stats(self) -> EngineStats:
        return self._totals if self._pool is None else _sum(self._totals, self._pool.stats())

    async def close(self) -> None:
        """Hand the servers back, whatever state they are in."""
        members, self._members = self._members, []
        pool, self._pool = self._pool, None
        await _close(pool, members)


async def workers(config: SGLangConfig, transport: httpx.AsyncBaseTransport | None = None) -> tuple[str, ...]:
    """List the addresses of the workers behind slime's router. Raises ``EngineError`` when it has none, or some that
    only prefill or only decode."""
    router = HTTPClient(config.urls[0], config, transport=transport)
    try:
        return await worker_urls([router])
    finally:
        await router.close()


def _capabilities(config: SGLangConfig, model: ModelFolder, *, num_workers: int) -> Capabilities:
    """Return the capabilities of lent servers. Their caches are gone after each weight update, and those of colocated
    ones along with their memory, so stopped samples are prefilled again."""
    return Capabilities(
        max_running=config.running() * num_workers, max_context_tokens=model.max_context_tokens, number_format="unknown"
    )


async def _labels(clients: Collection[HTTPClient], router: str) -> dict[HTTPClient, str]:
    """Return the label of each worker that answers. Raises ``EngineError`` when none does."""
    found = await asyncio.gather(*(LentLabel(client).label() for client in clients), return_exceptions=True)
    labels: dict[HTTPClient, str] = {}
    silent: list[str] = []
    for client, label in zip(clients, found, strict=True):
        if isinstance(label, str):
            labels[client] = label
        elif isinstance(label, EngineError):
            silent.append(str(label))
            logger.warning("this rollout continues without %s: %s", client, label)
        else:
            raise label
    if not labels:
        raise EngineError(f"no worker behind {router} answers: {'; '.join(silent)}")
    return labels


async def _close(pool: EnginePool | None, members: Collection[LentServer]) -> None:
    if pool is not None:
        await pool.close()
    await asyncio.gather(*(member.close() for member in members))


def _sum(one: EngineStats, other: EngineStats) -> EngineStats:
    sums = {f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(EngineStats)}
    return replace(EngineStats(**sums), policy_version=other.policy_version)
