"""An inference server as an engine: one ``Dialect`` and what all kinds of servers share.

::

    generate ──▶ call.stream ◀── calls: one reader for each call ◀── dialect: events of the server
    abort ─────▶ aborter: asks until each call has ended
    pause ─────▶ calls.gate: holds new calls back here; dialect: freezes running ones there
    load ──────▶ served: replaces the weights, reads their label back; tokens then have the new version

Invariants: a token is labelled with a version only after the server has confirmed it; every wait ends; a server
that another run uses is left as it is (``ownership``); a server that we have frozen resumes, however we end.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollover.engine.background import BackgroundTasks, attempt, within
from rollover.engine.base import GPU_PREFILL_TOKENS, Capabilities, Chunk, EngineStats, GenerateRequest, Sleeps
from rollover.engine.servers.calls.abort import Aborter
from rollover.engine.servers.calls.dialect import ServerDialect
from rollover.engine.servers.calls.open_calls import OpenCalls
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.answer import ServerBusy
from rollover.engine.servers.http.client import HTTPClient, Unreachable
from rollover.engine.servers.start.places import StartedServer
from rollover.engine.servers.weights.ownership import Ownership
from rollover.engine.servers.weights.served import MemoryHeld, ServedWeights
from rollover.engine.servers.weights.transfer import GroupMember, Receiver, TransferFailed, send_to_all
from rollover.errors import EngineError, EngineTimeout
from rollover.types import SamplingParams
from rollover.weights.adapters import AdapterSource
from rollover.weights.base import WeightPath, WeightSource
from rollover.weights.sending import SentByHolder

_ALIVE_S = 2.0
"""Seconds for which a token shows that a server decodes."""


class ServerEngine:
    """Implements ``Engine`` and ``WeightTarget`` for one server; ``open`` it before use.

    Args:
        model: what it should serve, and its weights at version 0.
        ownership: of the run that uses it.
        process: the server, if we have started it; closed with the engine.
    """

    def __init__(
        self,
        client: HTTPClient,
        config: ServerConfig,
        model: ModelFolder,
        dialect: ServerDialect,
        *,
        ownership: Ownership,
        process: StartedServer | None = None,
    ) -> None:
        traits = dialect.traits
        self.capabilities = Capabilities(
            max_running=config.running(client.url),
            max_context_tokens=model.max_context_tokens,
            in_flight_update=traits.keeps_calls,
            seeded=traits.is_seeded,
            number_format=model.dtype or "unknown",
            prefill_tokens_per_iteration=math.inf if traits.keeps_kv else GPU_PREFILL_TOKENS,
        )
        self._client = client
        self._config = config
        self._model = model
        self._dialect = dialect
        self._process = process
        self._tasks = BackgroundTasks()
        self._served = ServedWeights(dialect.weights, client, ownership, model.path)
        self._calls = OpenCalls(client, dialect, self._served, model, config, self._tasks)
        self._aborter = Aborter(repr(client), dialect, self._calls, timeout_s=config.abort_timeout_s)
        self._may_be_frozen = False
        """We have stopped the server and do not know that it has resumed."""
        self._keeps_kv = False
        """The calls that are frozen now keep their cache over the update that follows."""
        self._closed = False

    def __repr__(self) -> str:
        return repr(self._client)

    # -- opening, health, closing ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the server, give it the weights of version 0 and see that a call can be aborted.

        Raises ``EngineError`` naming what is wrong and how to start the server rightly.
        """
        await self._dialect.identify()
        await self._served.refuse_when_taken()
        if self._config.colocated:
            await self._dialect.weights.check_memory()
        await self._served.find_memory()  # a run that was killed in a step may have left it asleep
        if self._served.is_asleep:
            await self._served.install(0, self._model.path, keeps_kv=False)
        await self._thaw()  # a run that was killed in an update may have left it paused
        context = min(self._model.max_context_tokens, await self._dialect.check_model())
        self._calls.max_context_tokens = context
        can, traits = self.capabilities, self._dialect.traits
        self.capabilities = replace(
            can,
            max_context_tokens=context,
            number_format=traits.number_format or can.number_format,
            prefill_tokens_per_iteration=traits.prefill_tokens_per_iteration or can.prefill_tokens_per_iteration,
        )
        await self._freeze()
        try:
            await self._install(self._served.version, self._model.path)
        finally:
            await self._thaw()
        await self._check_abort()
        self._calls.count_from_zero()

    async def probe(self, *, decode: bool = False) -> None:
        """Raise ``EngineError`` unless the server is well and serves our weights; ``decode`` has it sample a token."""
        self._served.refuse_when_unknown()
        timeout_s = self._config.health_timeout_s
        # A server that decodes need not show it by a token that waits for its other calls.
        decode = decode and self._calls.gate.is_set() and self._calls.silent_s > _ALIVE_S
        try:
            await self._dialect.check_health(decode=decode, timeout_s=timeout_s)
        except ServerBusy:
            if self._calls.gate.is_set():
                raise
            return  # it answers 503 because it stands still for us
        await self._calls.check_weights()

    async def revive(self) -> None:
        """Start the server again if we had started it and it has died. Raises ``EngineError``."""
        if self._process is not None and await self._process.gone():
            self._served.forget(f"{self} has been restarted and does not have the run's weights yet")
            await self._process.start()

    async def close(self) -> None:
        """End all calls and give the server back, decoding again. Returns after two ``abort_timeout_s`` at the latest,
        even when the server is gone."""
        if self._closed:
            return
        self._closed = True
        sent, limit_s = self._calls.end_all(), self._config.abort_timeout_s
        if self._process is None:  # a server that lives on should neither decode nor stand still
            if sent:
                await attempt(self._dialect.ask_to_abort([call.request_id for call in sent]), limit_s)
            await attempt(self._give_back(), limit_s)
        await self._tasks.cancel()
        await self._client.close()
        if self._process is not None:
            await self._process.stop()
        self._served.release()

    async def _give_back(self) -> None:
        """Thaw the server if we had frozen it, and say that it is free; unless it is another run's by now. One that
        has given its memory back is left so: it has no weights to sample from, and the next run finds it asleep."""
        if self._may_be_frozen and not self._served.is_asleep and await self._served.is_ours():
            await self._thaw()
        await self._served.give_back()

    async def _check_abort(self) -> None:
        """Start a long call and abort it by its id. Raises ``EngineError`` when that does not end it."""
        name = f"abort-check-{secrets.token_hex(8)}."
        call = self._calls.start(
            GenerateRequest(
                request_id=name,
                sample_key=name,
                prompt_key=name,
                prompt_ids=(1,),
                params=SamplingParams(max_new_tokens=self.capabilities.max_context_tokens - 1),
                seed=0,
            )
        )
        if isinstance(first := await call.stream.get(), Exception):
            raise first
        await self._aborter.check(call)
        while not call.stream.empty():
            item = call.stream.get_nowait()
            if isinstance(item, Exception):
                raise item

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` for a request that cannot run and when the server fails,
        ``EngineTimeout`` when it is silent for too long."""
        self._refuse_when_closed("generate")
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
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest, even when the server is gone: a call
        that it does not hand over ends with what it has streamed."""
        await self._aborter.abort(self._calls.named(request_ids))
        if request_ids and not self._closed:
            self._tasks.start(self._aborter.sweep())

    def stats(self) -> EngineStats:
        return self._calls.stats()

    # -- Sleeps ----------------------------------------------------------------------------------------------

    @property
    def sleeper(self) -> Sleeps:
        return self

    async def sleep(self) -> None:
        """See ``Sleeps.sleep``. One that we have started is stopped if it does not do so, and started again when it
        is its turn.

        Raises ``EngineError`` when it is gone, ``MemoryHeld`` when it may hold its memory still.
        """
        self._refuse_when_closed("give its memory back")
        self._calls.gate.clear()
        limit_s = self._config.sleep_timeout_s
        try:
            async with within(limit_s, f"{self} did not give its memory back within {limit_s:g} s"):
                await self._aborter.abort(self._calls.sent)
                await self._freeze()
                await self._served.release_memory()
        except EngineError as e:
            if self._process is None and not isinstance(e, Unreachable):
                raise MemoryHeld(f"the trainer needs the memory of {self}, which may still hold it: {e}") from e
            if self._process is not None:
                await self._process.stop()
            raise

    # -- WeightTarget ----------------------------------------------------------------------------------------

    @property
    def takes(self) -> WeightPath:
        config = self._config
        reads = config.weight_transfer == "folder" or config.colocated
        return "folder" if reads else "group"

    @property
    def group(self) -> GroupMember | None:
        return self if self.takes == "group" else None

    @property
    def formats(self) -> Mapping[str, str]:
        return {name: info.dtype for name, info in self._model.weights.items()}

    async def pause(self) -> None:
        self._refuse_when_closed("pause")
        if self._served.is_asleep:  # it stands still, if it is still there
            await self._served.refuse_when_taken()
            return
        await self._served.refuse_when_taken()
        self._calls.gate.clear()
        try:
            await self._freeze()
        except BaseException:
            self._calls.gate.set()
            raise
        calls = self._calls.sent
        for call in calls:
            call.patience.suspend()
        if calls:
            await self._calls.wait_for_silence()

    async def load(self, version: int, source: WeightSource) -> None:
        """See ``WeightTarget.load``; the server sees the folder of ``source`` under the same path, if it has one.
        After a failure with weights that were sent by their holder, the earlier ones are gone: the server refuses calls
        until it is given others."""
        if source.folder is None and self.takes == "group" and isinstance(source, SentByHolder):
            try:
                await send_to_all([await self.prepare(version, source)], source, self.formats, self._config)
            except TransferFailed as e:
                raise EngineError(f"{self} did not load weights version {version}: {e}") from e
            await self.settle(version)
            return
        self._check_load(version)
        if source.folder is None:
            raise EngineError(f"{self} takes weights from a folder, not from this process's memory")
        takes = self._dialect.traits.takes_adapters and source.manifest.kind == "adapter"
        if takes and isinstance(source, AdapterSource):
            source.manifest.require_adapter(version, self, base_version=0)
            self._model.check_adapters(source)
        else:
            source.manifest.require_full(version, self)
            self._model.check_fits(source.folder)
        if self._served.is_asleep:
            await self._served.install(version, source.folder, keeps_kv=False)
            return
        await self._abort_unless_kept()
        before = self._served.version, self._served.source
        try:
            await self._install(version, source.folder)
        except EngineTimeout:  # it does not answer: it would not take the old ones either
            raise
        except EngineError as e:
            if before[1] is not None:
                with suppress(EngineError):  # the next call is told what remains
                    await self._install(before[0], before[1])
            raise EngineError(f"{self} did not load weights version {version}: {e}") from e

    async def prepare(self, version: int, source: SentByHolder) -> Receiver:
        """Make the paused server ready to receive weights in a group, and say how. Raises ``EngineError`` for weights
        that are not of its model, and when it does not answer."""
        self._check_load(version)
        source.manifest.require_full(version, self)
        shapes = {spec.name: spec.shape for spec in source.manifest.tensors}
        self._model.check_shapes(shapes, f"weights of version {version}")
        await self._abort_unless_kept()
        return await self._served.receive(version, keeps_kv=self._keeps_kv)

    async def settle(self, version: int) -> None:
        """Serve the weights that were received. Raises ``EngineError``; what the server has is unknown then."""
        await self._served.settle(version, keeps_kv=self._keeps_kv)
        if not self._keeps_kv:
            self._calls.count_lost_kv()

    def _check_load(self, version: int) -> None:
        self._refuse_when_closed("load")
        if version < self._served.version:
            raise EngineError(f"{self}: weights cannot go back from version {self._served.version} to {version}")

    async def _abort_unless_kept(self) -> None:
        if not self._dialect.traits.keeps_calls:
            await self._aborter.abort(self._calls.sent)

    async def resume(self) -> None:
        self._refuse_when_closed("resume")
        try:
            if self._may_be_frozen:
                await self._thaw()
        finally:
            self._calls.gate.set()
            for call in self._calls.sent:
                call.patience.resume()

    async def _install(self, version: int, source: Path) -> None:
        await self._served.install(version, source, keeps_kv=self._keeps_kv)
        if not self._keeps_kv:
            self._calls.count_lost_kv()

    async def _freeze(self) -> None:
        self._may_be_frozen = True  # even when the answer does not come
        self._keeps_kv = self._dialect.traits.keeps_kv and bool(self._calls.sent)
        await self._dialect.freeze(keeps_kv=self._keeps_kv)

    async def _thaw(self) -> None:
        await self._dialect.thaw()
        self._may_be_frozen = False

    def _refuse_when_closed(self, what: str) -> None:
        if self._closed:
            raise EngineError(f"{self} is closed; {what} came too late")
