"""An inference server as an engine: what every kind of server shares, above the calls that differ.

::

    generate ──▶ GenerationCall.stream ◀── reader task ◀── events of the server, one stream per call
    abort ─────▶ asks the server until each call has ended; believes the ends of the calls and nothing else
    pause ─────▶ holds new calls back here, freezes running ones there, waits until the streams are silent
    load ──────▶ checks the folder, replaces the weights, reads the version back; then labels tokens with it

What it keeps true: a token is labelled with a version only after the server has confirmed it; calls are sent
to a server only while it serves the weights we think it does (one that has been silent for ``RESTART_S`` is
asked first, since it may be a new process); every open call ends, whatever the server does; a server that another
run uses is left as it is (``ownership``); one that we have frozen goes on, whatever becomes of us.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.base import GPU_PREFILL_TOKENS, Capabilities, Chunk, EngineStats, GenerateRequest, WeightSource
from rollover.engine.servers.abort import Stopper
from rollover.engine.servers.call import Delta, GenerationCall
from rollover.engine.servers.client import HTTPClient, Patience
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.launch import ServerProcess
from rollover.engine.servers.ownership import Ownership
from rollover.engine.servers.served_weights import ServedWeights
from rollover.engine.stop_strings import StopStrings
from rollover.errors import EngineError, EngineTimeout
from rollover.types import FinishReason, SamplingParams

RESTART_S = 2.0
"""No server loads a model in less time: one heard from within it is still the same process."""


class ServerEngine(ABC):
    """Implements ``Engine`` and ``WeightTarget`` for one server; ``open`` it before use.

    Args:
        folder: the model it should serve, and its weights at version 0.
        process: the server, where it was started by us; closed with the engine.
        ownership: of the run that it serves; of one that nobody else is when left out.
        keeps_calls_over_update: running calls go on after a weight load.
        keeps_cache_over_update: they do so with the cache that they had.
    """

    def __init__(
        self,
        client: HTTPClient,
        config: ServerConfig,
        folder: Path,
        *,
        process: ServerProcess | None = None,
        ownership: Ownership | None = None,
        keeps_calls_over_update: bool = False,
        keeps_cache_over_update: bool = False,
    ) -> None:
        self.client = client
        self.model = ModelFolder.read(folder)
        self.capabilities = Capabilities(
            max_running=config.running(client.url),
            max_context_tokens=self.model.max_context_tokens,
            in_flight_update=keeps_calls_over_update,
            number_format=self.model.dtype or "unknown",
            prefill_tokens_per_iteration=math.inf if keeps_cache_over_update else GPU_PREFILL_TOKENS,
        )
        self._config = config
        self._process = process
        self._served = ServedWeights(self, client, ownership or Ownership(), folder)
        self._keeps_calls = keeps_calls_over_update
        self._keeps_cache = keeps_cache_over_update
        self._frozen = False
        """Whether we may have stopped the server and not let it go on."""
        self._calls: dict[str, GenerationCall] = {}
        self._used_ids: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None
        """Asks the server for its version, for all calls that wait to be sent."""
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self._stopper = Stopper(
            self,
            ask=self._ask_to_abort,
            ask_all=self._ask_to_abort_all,
            open_calls=self._sent,
            end=lambda call: self._end(call, FinishReason.ABORT),
            timeout_s=config.abort_timeout_s,
        )
        self._stop_strings: StopStrings | None = None
        self._last_token_s = 0.0
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    def __repr__(self) -> str:
        return repr(self.client)

    # -- what kinds of servers do differently ----------------------------------------------------------------

    @abstractmethod
    async def _identify(self) -> None:
        """That the server is of the right kind and can be controlled. Changes nothing there, and decodes nothing.

        Raises ``EngineError`` saying what to change.
        """

    @abstractmethod
    async def _check_model(self) -> int:
        """That the server, which is ours and goes on, has the right model and settings. Returns its longest
        context.

        Raises ``EngineError`` saying what to change.
        """

    @abstractmethod
    def _decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        """Send the call and stream what comes. Raises ``EngineError``."""

    @abstractmethod
    async def _ask_to_abort(self, request_ids: Collection[str]) -> None:
        """Ask to stop some calls, at least one. That it has worked shows in their streams."""

    @abstractmethod
    async def _ask_to_abort_all(self) -> None:
        """Ask in a stronger way to stop every call of the server."""

    @abstractmethod
    async def _freeze(self) -> None:
        """Stop sampling, keep running calls."""

    @abstractmethod
    async def _thaw(self) -> None: ...

    @abstractmethod
    async def replace_weights(self, label: str, folder: Path) -> None:
        """Load the folder, forget what was cached for new calls, and set the label. Raises ``EngineError``."""

    @abstractmethod
    async def label(self) -> str:
        """What the server calls the weights that it serves."""

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Call the weights that it serves otherwise."""

    async def confirm(self, version: int, folder: Path) -> None:
        """That the weights just loaded are those of ``folder``, where the server can show more than a label.

        Raises ``EngineError`` when they are not.
        """
        return

    @abstractmethod
    async def _check_health(self, *, decode: bool, timeout_s: float) -> None:
        """Raises ``EngineError`` unless the server answers and, with ``decode``, samples a token in time."""

    # -- opening, health, closing ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the server, give it the weights of version 0 and prove that it can be stopped.

        Raises ``EngineError`` naming what is wrong and how to start the server rightly.
        """
        await self._identify()
        await self._served.refuse_when_taken()
        await self._go_on()  # a run that was killed in an update may have left it paused
        context = min(self.model.max_context_tokens, await self._check_model())
        self.capabilities = replace(self.capabilities, max_context_tokens=context)
        await self._stand_still()
        try:
            await self._served.install(self._served.version, self._served.folder)
        finally:
            await self._go_on()
        await self._prove_abort()
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    async def probe(self, *, decode: bool = False) -> None:
        """Raises ``EngineError`` unless the server is well and serves our weights; ``decode`` has it sample a
        token."""
        self._served.refuse_when_unfit()
        await self._check_health(decode=decode and self._running.is_set(), timeout_s=self._config.health_timeout_s)
        await self._check_version()

    async def revive(self) -> None:
        """Start the server again where we had started it and it has died. Raises ``EngineError``."""
        if self._process is not None and self._process.exited:
            self._served.lost(f"{self} has been started anew and has no weights of ours yet")
            await self._process.start()

    async def close(self) -> None:
        """End all calls and give the server back, going on. Returns after two ``abort_timeout_s`` at the latest, also
        when the server is gone."""
        if self._closed:
            return
        self._closed = True
        calls = list(self._calls.values())
        sent = [call.request.request_id for call in calls if call.sent]
        for call in calls:
            self._end(call, FinishReason.ABORT)
        if self._process is None:  # a server that goes on living should not go on decoding, or standing still
            if sent:
                await self._in_time(self._ask_to_abort(sent))
            await self._in_time(self._give_back())
        tasks = [*self._background, *(call.reader for call in calls if call.reader is not None)]
        tasks += [self._checking] if self._checking is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self._process is not None:
            await self._process.stop()
        self._served.ownership.release()

    async def _in_time(self, goodbye: Coroutine[Any, Any, None]) -> None:
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._config.abort_timeout_s):
                await goodbye

    async def _give_back(self) -> None:
        """Let the server go on where we had stopped it, and say that it is free; unless it is another run's by now."""
        if self._frozen and await self._served.is_ours():
            await self._go_on()
        await self._served.give_back()

    # -- Engine ----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` for a request that cannot run and when the server
        fails, ``EngineTimeout`` when it is silent for too long."""
        call = self._admit(request)
        call.reader = asyncio.create_task(self._read(call))
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
                self._in_background(self._stopper.stop([call]))

    async def abort(self, request_ids: Collection[str]) -> None:
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest, also when the server is gone: a
        call that it does not hand over ends with what it has streamed."""
        calls = [call for request_id in request_ids if (call := self._calls.get(request_id)) is not None]
        await self._stopper.stop(calls)

    def stats(self) -> EngineStats:
        """As seen from here: what waits in the server's own queue counts as running. Prefilled tokens are
        those sent, unless the server says how many it had cached."""
        num_running = sum(call.sent for call in self._calls.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._calls) - num_running,
            policy_version=self._served.version,
            decoded_tokens=self._decoded_tokens,
            prefilled_tokens=self._prefilled_tokens,
            reprefilled_tokens=self._reprefilled_tokens,
        )

    # -- WeightTarget ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._refuse_when_closed("pause")
        await self._served.refuse_when_taken()
        self._running.clear()
        try:
            await self._stand_still()
        except BaseException:
            self._running.set()
            raise
        calls = self._sent()
        for call in calls:
            call.patience.suspend()
        if calls:
            await self._silence()

    async def load(self, version: int, source: WeightSource) -> None:
        """See ``WeightTarget.load``; ``source`` is a folder that the server sees under the same path."""
        self._refuse_when_closed("load")
        if version < self._served.version:
            raise EngineError(f"{self}: weights cannot go back from version {self._served.version} to {version}")
        if not isinstance(source, Path):
            raise EngineError(f"{self} takes weights from a folder, not from this process's memory")
        self.model.check_fits(source)
        if not self._keeps_calls:
            await self._stopper.stop(self._sent())
        before = self._served.version, self._served.folder
        try:
            await self._served.install(version, source)
        except EngineTimeout:  # it does not answer: it would not take the old ones either
            raise
        except EngineError as e:
            with suppress(EngineError):  # what remains is said by ``_served``
                await self._served.install(*before)
            raise EngineError(f"{self} did not load weights version {version}: {e}") from e

    async def resume(self) -> None:
        self._refuse_when_closed("resume")
        try:
            if self._frozen:  # else it does not stand still for us
                await self._go_on()
        finally:
            self._running.set()
            for call in self._sent():
                call.patience.resume()

    # -- the inside ------------------------------------------------------------------------------------------

    def _refuse_when_closed(self, what: str) -> None:
        if self._closed:
            raise EngineError(f"{self} is closed; {what} came too late")

    def _admit(self, request: GenerateRequest) -> GenerationCall:
        self._refuse_when_closed("generate")
        if request.request_id in self._used_ids:
            raise EngineError(f"request id {request.request_id!r} was used before; ids are unique per generation call")
        params = request.params
        if len(request.response_ids) >= params.max_new_tokens:
            raise EngineError(
                f"{request.request_id}: its response has {len(request.response_ids)} tokens already,"
                f" of at most {params.max_new_tokens}"
            )
        size = len(request.prompt_ids) + params.max_new_tokens
        if size > self.capabilities.max_context_tokens:
            raise EngineError(
                f"{request.request_id}: prompt and response may reach {size} tokens, but {self} takes"
                f" {self.capabilities.max_context_tokens}; start it with a longer context"
            )
        if params.stop_strings and self._stop_strings is None:
            self._stop_strings = StopStrings(self.model.path)
        patience = Patience(first_s=self._config.first_token_timeout_s, between_s=self._config.token_timeout_s)
        call = GenerationCall(request, patience, self.model.vocab_size)
        self._used_ids.add(request.request_id)
        self._calls[request.request_id] = call
        return call

    async def _stand_still(self) -> None:
        self._frozen = True  # also when the answer does not come
        await self._freeze()

    async def _go_on(self) -> None:
        await self._thaw()
        self._frozen = False

    async def _read(self, call: GenerationCall) -> None:
        """From sending a call to its end; after a stop string that only we have seen, on to the server's end
        of it."""
        try:
            await self._turn_to_send()
            call.send(self._served.version)
            self._prefilled_tokens += call.num_prompted_tokens
            self._reprefilled_tokens += len(call.request.response_ids)
            async with aclosing(self._decode(call)) as deltas:
                async for delta in deltas:
                    if not call.ended.is_set():
                        self._take(call, delta)
            if not call.ended.is_set():
                raise EngineError(f"{self}: the stream of {call.request.request_id} ended without a finish reason")
        except Exception as e:
            call.fail(e)
        finally:
            self._calls.pop(call.request.request_id, None)

    def _take(self, call: GenerationCall, delta: Delta) -> None:
        stops = call.request.params.stop_strings

        def completes() -> bool:
            return bool(stops) and self._stop_strings is not None and self._stop_strings.complete(call.response, stops)

        version = self._served.version if delta.policy_version is None else delta.policy_version
        unasked = delta.finish_reason is FinishReason.ABORT and not call.asked_to_stop
        delta = replace(delta, finish_reason=None) if unasked else delta
        self._decoded_tokens += call.take(delta, version, cache_kept=self._keeps_cache, completes=completes)
        if delta.token_ids:
            self._last_token_s = asyncio.get_running_loop().time()
            call.patience.heard()
        if unasked and not call.ended.is_set():
            raise EngineError(
                f"{self} stopped {call.request.request_id} after {len(call.response)} tokens, which nobody asked for"
            )
        if call.ended.is_set():
            self._calls.pop(call.request.request_id, None)
            if delta.finish_reason is None:  # the server does not know yet
                self._in_background(self._finish_off(call))

    def _end(self, call: GenerationCall, reason: FinishReason) -> None:
        """End a call from here; nothing more of its stream is read."""
        call.end(reason, self._served.version)
        self._calls.pop(call.request.request_id, None)
        if call.reader is not None:
            call.reader.cancel()

    def _sent(self) -> list[GenerationCall]:
        return [call for call in self._calls.values() if call.sent]

    async def _finish_off(self, call: GenerationCall) -> None:
        """Stop in the server a call that has ended here."""
        assert call.reader is not None
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._config.abort_timeout_s):
                await self._ask_to_abort([call.request.request_id])
                await asyncio.wait([call.reader])
        call.reader.cancel()

    async def _silence(self) -> None:
        """Return when no token has arrived for ``silence_s``. Raises ``EngineTimeout`` when they go on coming."""
        loop = asyncio.get_running_loop()
        frozen_s, limit_s = loop.time(), self._config.control_timeout_s
        while (left_s := max(frozen_s, self._last_token_s) + self.silence_s - loop.time()) > 0:
            if loop.time() - frozen_s > limit_s:
                raise EngineTimeout(f"{self} goes on sampling {limit_s:g} s after it was paused")
            await asyncio.sleep(left_s)

    @property
    @abstractmethod
    def silence_s(self) -> float:
        """How long after a pause a token that was sampled before it may still be on its way."""

    async def _turn_to_send(self) -> None:
        """Return when calls may be sent to a server that serves our weights."""
        while True:
            await self._running.wait()
            self._served.refuse_when_unfit()
            if asyncio.get_running_loop().time() - self.client.last_heard_s <= RESTART_S:
                return
            if self._checking is None or self._checking.done():  # one asks for all
                self._checking = asyncio.create_task(self._check_version())
                self._checking.add_done_callback(_looked_at)
            await asyncio.shield(self._checking)

    async def _check_version(self) -> None:
        await self._served.check(self._running.is_set)

    async def _prove_abort(self) -> None:
        """Start a long call, abort it by its id and see it end for that reason.

        Raises ``EngineError``: on such a server, work that is stopped would go on and be lost.
        """
        call = self._admit(
            GenerateRequest(
                request_id=f"prove-abort-{secrets.token_hex(4)}.",
                sample_key="prove-abort",
                prompt_key="prove-abort",
                prompt_ids=(1,),
                params=SamplingParams(max_new_tokens=self.capabilities.max_context_tokens - 1),
                seed=0,
            )
        )
        call.reader = asyncio.create_task(self._read(call))
        if isinstance(first := await call.stream.get(), Exception):
            raise first
        half_s = self._config.abort_timeout_s / 2
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(half_s):
                await self._stopper.ask_by_id([call])
        if not call.ended.is_set():
            with suppress(TimeoutError, EngineError):
                async with asyncio.timeout(half_s):
                    await self._ask_to_abort_all()
            self._end(call, FinishReason.ABORT)
            raise EngineError(
                f"{self} does not stop a call by its id within {half_s:g} s:"
                " this version of the server cannot be used for partial rollouts"
            )
        while not call.stream.empty():
            item = call.stream.get_nowait()
            if isinstance(item, Exception):
                raise item

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _looked_at(task: asyncio.Task[None]) -> None:
    """Those who wait for it may all have been cancelled; its error is then nobody's."""
    if not task.cancelled():
        task.exception()
