"""An inference server as an engine: what every kind of server shares, above the calls that differ.

::

    generate ──▶ Call.stream ◀── reader task ◀── events of the server, one stream per call
    abort ─────▶ asks the server until each call has ended; believes the ends of the calls and nothing else
    pause ─────▶ holds new calls back here, freezes running ones there, waits until the streams are silent
    load ──────▶ checks the folder, replaces the weights, reads the version back; then labels tokens with it

What it keeps true: a token is labelled with a version only after the server has confirmed it; calls are sent
to a server only while it serves the weights we think it does (one that has been silent for ``RESTART_S`` is
asked first, since it may be a new process); every open call ends, whatever the server does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.engine.base import GPU_PREFILL_TOKENS, Capabilities, Chunk, EngineStats, GenerateRequest, WeightSource
from rollover.engine.embedded.stopping import StopStrings
from rollover.engine.http.call import Call, Delta
from rollover.engine.http.client import HTTPClient, Patience
from rollover.engine.http.config import ServerConfig
from rollover.engine.http.folder import ModelFolder
from rollover.engine.http.launch import ServerProcess
from rollover.errors import EngineError
from rollover.types import FinishReason, SamplingParams

logger = logging.getLogger(__name__)

RESTART_S = 2.0
"""No server loads a model in less time: one heard from within it is still the same process."""
_FIRST_RESEND_S, _MAX_RESEND_S = 0.05, 1.0


class ServerEngine(ABC):
    """Implements ``Engine`` and ``WeightTarget`` for one server; ``open`` it before use.

    Args:
        folder: the model it should serve, and its weights at version 0.
        process: the server, where it was started by us; closed with the engine.
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
        self._keeps_calls = keeps_calls_over_update
        self._keeps_cache = keeps_cache_over_update
        self._version = 0
        self._weights = folder
        """What the server serves under ``_version``."""
        self._unfit: str | None = f"{client} is not open yet"
        """Why no call may be sent: its weights are none that we know."""
        self._num_installs = 0
        self._calls: dict[str, Call] = {}
        self._used_ids: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._checking: asyncio.Task[None] | None = None
        """Asks the server for its version, for all calls that wait to be sent."""
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self._stop_strings: StopStrings | None = None
        self._last_token_s = 0.0
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    def __repr__(self) -> str:
        return repr(self.client)

    # -- what kinds of servers do differently ----------------------------------------------------------------

    @abstractmethod
    async def _check_server(self) -> int:
        """That the server is of the right kind, with the right model and settings. Returns its longest
        context.

        Raises ``EngineError`` saying what to change.
        """

    @abstractmethod
    def _decode(self, call: Call) -> AsyncGenerator[Delta, None]:
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
    async def _replace_weights(self, version: int, folder: Path) -> None:
        """Load the folder, forget what was cached for new calls, and set the version. Raises
        ``EngineError``."""

    @abstractmethod
    async def _served_version(self) -> str:
        """The version that the server says it serves."""

    @abstractmethod
    async def _check_health(self, *, decode: bool, timeout_s: float) -> None:
        """Raises ``EngineError`` unless the server answers and, with ``decode``, samples a token in time."""

    # -- opening, health, closing ----------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the server, give it the weights of version 0 and prove that it can be stopped.

        Raises ``EngineError`` naming what is wrong and how to start the server rightly.
        """
        context = min(self.model.max_context_tokens, await self._check_server())
        self.capabilities = replace(self.capabilities, max_context_tokens=context)
        await self._freeze()
        try:
            await self._install(self._version, self._weights)
        finally:
            await self._thaw()
        await self._prove_abort()
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    async def probe(self, *, decode: bool = False) -> None:
        """Raises ``EngineError`` unless the server is well and serves our weights; ``decode`` has it sample a
        token."""
        self._refuse_when_unfit()
        await self._check_health(decode=decode and self._running.is_set(), timeout_s=self._config.health_timeout_s)
        await self._check_version()

    async def revive(self) -> None:
        """Start the server again where we had started it and it has died. Raises ``EngineError``."""
        if self._process is not None and self._process.exited:
            self._unfit = f"{self} has been started anew and has no weights of ours yet"
            await self._process.start()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        calls = list(self._calls.values())
        sent = [call.request.request_id for call in calls if call.sent]
        for call in calls:
            self._end(call, FinishReason.ABORT)
        if sent and self._process is None:  # a server that goes on living should not go on decoding
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(self._config.abort_timeout_s):
                    await self._ask_to_abort(sent)
        tasks = [*self._background, *(call.reader for call in calls if call.reader is not None)]
        tasks += [self._checking] if self._checking is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        if self._process is not None:
            await self._process.stop()

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
                self._in_background(self._stop([call]))

    async def abort(self, request_ids: Collection[str]) -> None:
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest, also when the server is gone: a
        call that it does not hand over ends with what it has streamed."""
        calls = [call for request_id in request_ids if (call := self._calls.get(request_id)) is not None]
        await self._stop(calls)

    def stats(self) -> EngineStats:
        """As seen from here: what waits in the server's own queue counts as running. Prefilled tokens are
        those sent, unless the server says how many it had cached."""
        num_running = sum(call.sent for call in self._calls.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._calls) - num_running,
            policy_version=self._version,
            decoded_tokens=self._decoded_tokens,
            prefilled_tokens=self._prefilled_tokens,
            reprefilled_tokens=self._reprefilled_tokens,
        )

    # -- WeightTarget ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._refuse_when_closed("pause")
        self._running.clear()
        try:
            await self._freeze()
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
        if version < self._version:
            raise EngineError(f"{self}: weights cannot go back from version {self._version} to {version}")
        if not isinstance(source, Path):
            raise EngineError(f"{self} takes weights from a folder, not from this process's memory")
        self.model.check_fits(source)
        if not self._keeps_calls:
            await self._stop(self._sent())
        before = self._version, self._weights
        try:
            await self._install(version, source)
        except EngineError as e:
            with suppress(EngineError):  # what remains is said by ``_unfit``
                await self._install(*before)
            raise EngineError(f"{self} did not load weights version {version}: {e}") from e

    async def resume(self) -> None:
        self._refuse_when_closed("resume")
        try:
            await self._thaw()
        finally:
            self._running.set()
            for call in self._sent():
                call.patience.resume()

    # -- the inside ------------------------------------------------------------------------------------------

    def _refuse_when_closed(self, what: str) -> None:
        if self._closed:
            raise EngineError(f"{self} is closed; {what} came too late")

    def _refuse_when_unfit(self) -> None:
        if self._unfit is not None:
            raise EngineError(self._unfit)

    def _admit(self, request: GenerateRequest) -> Call:
        self._refuse_when_closed("generate")
        if request.request_id in self._used_ids:
            raise EngineError(f"request id {request.request_id!r} was used before; ids are unique per hop")
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
                f" {self.capabilities.max_context_tokens}; lower rollout.max_new_tokens or"
                " tasks.max_prompt_tokens"
            )
        if params.stop_strings and self._stop_strings is None:
            self._stop_strings = StopStrings(self.model.path)
        patience = Patience(first_s=self._config.first_token_timeout_s, between_s=self._config.token_timeout_s)
        call = Call(request, patience, self.model.vocab_size)
        self._used_ids.add(request.request_id)
        self._calls[request.request_id] = call
        return call

    async def _read(self, call: Call) -> None:
        """From sending a call to its end; after a stop string that only we have seen, on to the server's end
        of it."""
        try:
            await self._turn_to_send()
            call.send(self._version)
            self._prefilled_tokens += len(call.request.prompt_ids) + len(call.request.response_ids)
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

    def _take(self, call: Call, delta: Delta) -> None:
        stops = call.request.params.stop_strings

        def completes() -> bool:
            return bool(stops) and self._stop_strings is not None and self._stop_strings.complete(call.response, stops)

        version = self._version if delta.policy_version is None else delta.policy_version
        self._decoded_tokens += call.take(delta, version, cache_kept=self._keeps_cache, completes=completes)
        if delta.token_ids:
            self._last_token_s = asyncio.get_running_loop().time()
            call.patience.heard()
        if call.ended.is_set():
            self._calls.pop(call.request.request_id, None)
            if delta.finish_reason is None:  # the server does not know yet
                self._in_background(self._finish_off(call))

    def _end(self, call: Call, reason: FinishReason) -> None:
        """End a call from here; nothing more of its stream is read."""
        call.end(reason, self._version)
        self._calls.pop(call.request.request_id, None)
        if call.reader is not None:
            call.reader.cancel()

    def _sent(self) -> list[Call]:
        return [call for call in self._calls.values() if call.sent]

    async def _stop(self, calls: Collection[Call]) -> None:
        """Return when each of ``calls`` has ended; see ``abort``."""
        for call in calls:
            if not call.sent:
                self._end(call, FinishReason.ABORT)
        for ask in (self._keep_asking, self._ask_all):
            if late := [call for call in calls if not call.ended.is_set()]:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._config.abort_timeout_s / 2):
                        await ask(late)
        for call in calls:
            if not call.ended.is_set():
                logger.warning("%r did not hand over %s; it ends with what had come", self, call.request.request_id)
                self._end(call, FinishReason.ABORT)

    async def _keep_asking(self, calls: list[Call]) -> None:
        """A call that is still on its way to the server cannot be stopped there: ask again until all have
        ended."""
        wait_s = _FIRST_RESEND_S
        while late := [call for call in calls if not call.ended.is_set()]:
            with suppress(EngineError):  # a server that fails ends the calls in its own way, or not at all
                await self._ask_to_abort([call.request.request_id for call in late])
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await _all_ended(late)
            wait_s = min(2 * wait_s, _MAX_RESEND_S)

    async def _ask_all(self, calls: list[Call]) -> None:
        with suppress(EngineError):
            await self._ask_to_abort_all()
        await _all_ended(calls)

    async def _finish_off(self, call: Call) -> None:
        """Stop in the server a call that has ended here."""
        assert call.reader is not None
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._config.abort_timeout_s):
                await self._ask_to_abort([call.request.request_id])
                await asyncio.wait([call.reader])
        call.reader.cancel()

    async def _silence(self) -> None:
        """Return when no token has arrived for ``silence_s``."""
        loop = asyncio.get_running_loop()
        frozen_s = loop.time()
        while (left_s := max(frozen_s, self._last_token_s) + self.silence_s - loop.time()) > 0:
            await asyncio.sleep(left_s)

    @property
    @abstractmethod
    def silence_s(self) -> float:
        """How long after a pause a token that was sampled before it may still be on its way."""

    async def _install(self, version: int, folder: Path) -> None:
        self._unfit = f"{self} failed while its weights were replaced; it has none that are known"
        self._num_installs += 1
        await self._replace_weights(version, folder)
        self._version, self._weights, self._unfit = version, folder, None
        self._compare(await self._served_version())

    async def _turn_to_send(self) -> None:
        """Return when calls may be sent to a server that serves our weights."""
        while True:
            await self._running.wait()
            self._refuse_when_unfit()
            if asyncio.get_running_loop().time() - self.client.last_heard_s <= RESTART_S:
                return
            if self._checking is None or self._checking.done():  # one asks for all
                self._checking = asyncio.create_task(self._check_version())
                self._checking.add_done_callback(_looked_at)
            await asyncio.shield(self._checking)

    async def _check_version(self) -> None:
        """Raises ``EngineError`` when the server has other weights than we gave it. An answer that a load has
        overtaken says nothing."""
        before = self._num_installs
        served = await self._served_version()
        if before == self._num_installs and self._running.is_set():
            self._compare(served)

    def _compare(self, served: str) -> None:
        if served != str(self._version):
            self._unfit = (
                f"{self} says it serves weights {served!r}, though version {self._version} was loaded:"
                " it has been restarted, or somebody else changes its weights"
            )
            self._refuse_when_unfit()

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
                await self._keep_asking([call])
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


async def _all_ended(calls: Iterable[Call]) -> None:
    for call in calls:
        await call.ended.wait()
