"""The generation calls of one server: checked, sent, read to their end, and counted.

::

    start ──▶ a reader task for each call ──▶ the gate ──▶ dialect.decode ──▶ call.stream

Invariants: a request id is used once; every call ends, whatever the server does; a token is labelled with the
version of the weights that sampled it; a call that the server ends although we did not ask for it is a failure. No call
is sent while the server is paused, while all its calls are being aborted, or while it serves weights that we do not
know. A server that has been silent for ``RESTART_S`` may be a new process behind the same address, so it is asked for
the label of its weights first, once for all calls that wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Protocol

from rollover.engine.background import BackgroundTasks
from rollover.engine.base import EngineStats, GenerateRequest
from rollover.engine.ends import check_limits
from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.calls.dialect import Dialect
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient, Patience
from rollover.engine.stop_strings import StopStrings
from rollover.engine.used_ids import UsedIds
from rollover.errors import CallDisplaced, EngineError, EngineTimeout
from rollover.types import FinishReason

RESTART_S = 2.0
"""No server loads a model in less time: one heard from within it is still the same process."""


class KnownWeights(Protocol):
    """The weights of a server, as far as its calls have to know them."""

    @property
    def version(self) -> int:
        """Return the version of the weights in force."""
        ...

    @property
    def label(self) -> str:
        """Return the name that the server has for them."""
        ...

    def version_of(self, label: str | None, request_id: str) -> int:
        """Return the version of weights that sampled tokens of a call; the weights in force if the server names none.
        Raises ``EngineError`` for weights that are not known."""
        ...

    def refuse_when_unknown(self) -> None:
        """Raise ``EngineError`` unless it is known which weights the server has."""
        ...

    async def check(self, still: Callable[[], bool]) -> None:
        """Ask the server. Raises ``EngineError`` when it has others, unless ``still`` says that the answer is no longer
        wanted."""
        ...


class OpenCalls:
    """All calls of a server that have not ended, and the totals of all that were ever sent."""

    def __init__(
        self,
        client: HTTPClient,
        dialect: Dialect,
        served: KnownWeights,
        model: ModelFolder,
        config: ServerConfig,
        tasks: BackgroundTasks,
    ) -> None:
        self.max_context_tokens = model.max_context_tokens
        self.gate = asyncio.Event()
        """Not set from the begin of a pause to its end."""
        self.gate.set()
        self.held = asyncio.Lock()
        """Held while no call may be sent, because all are being aborted."""
        self._client = client
        self._dialect = dialect
        self._served = served
        self._model = model
        self._config = config
        self._tasks = tasks
        self._open: dict[str, GenerationCall] = {}
        self._used_ids = UsedIds(self._open)
        self._stop_strings: StopStrings | None = None
        self._check_of_weights: asyncio.Task[None] | None = None
        self._last_token_s = -math.inf
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    @property
    def sent(self) -> list[GenerationCall]:
        """Open calls that the server may know of."""
        return [call for call in self._open.values() if call.sent]

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last token of any call."""
        return asyncio.get_running_loop().time() - self._last_token_s

    def named(self, request_ids: Collection[str]) -> list[GenerationCall]:
        return [call for request_id in request_ids if (call := self._open.get(request_id)) is not None]

    def start(self, request: GenerateRequest) -> GenerationCall:
        """Open a call and send it as soon as the gate allows. Raises ``EngineError`` for a request that cannot run."""
        self._used_ids.check(request.request_id)
        check_limits(request, self.max_context_tokens, self._client)
        stops = None
        if request.params.stop_strings:
            stops = self._stop_strings = self._stop_strings or StopStrings(self._model.path)
        patience = Patience(first_s=self._config.first_token_timeout_s, between_s=self._config.token_timeout_s)
        call = GenerationCall(request, patience, self._model.vocab_size, stops)
        self._used_ids.claim(request.request_id)
        self._open[request.request_id] = call
        call.reader = self._tasks.start(self._read(call))
        return call

    def end(self, call: GenerationCall) -> None:
        """End a call from here as aborted; nothing more of its stream is read."""
        call.abort(self._served.version)
        self._open.pop(call.request_id, None)
        if call.reader is not None:
            call.reader.cancel()

    def end_all(self) -> list[GenerationCall]:
        """End every call from here. Returns the calls that the server may still decode."""
        sent = self.sent
        for call in list(self._open.values()):
            self.end(call)
        return sent

    async def wait_for_silence(self) -> None:
        """Return when no token has arrived for ``Traits.silence_s``. Raises ``EngineTimeout`` when tokens keep
        coming."""
        loop = asyncio.get_running_loop()
        frozen_s, limit_s, silence_s = loop.time(), self._config.control_timeout_s, self._dialect.traits.silence_s
        while (left_s := max(frozen_s, self._last_token_s) + silence_s - loop.time()) > 0:
            if loop.time() - frozen_s > limit_s:
                raise EngineTimeout(f"{self._client} still samples {limit_s:g} s after it was paused")
            await asyncio.sleep(left_s)

    # -- totals ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Report what is seen from here: a call in the server's own queue counts as running. Prefilled tokens are those
        sent, less the tokens that the server reports as cached."""
        num_running = len(self.sent)
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._open) - num_running,
            policy_version=self._served.version,
            decoded_tokens=self._decoded_tokens,
            prefilled_tokens=self._prefilled_tokens,
            reprefilled_tokens=self._reprefilled_tokens,
        )

    def count_from_zero(self) -> None:
        self._decoded_tokens = self._prefilled_tokens = self._reprefilled_tokens = 0

    def count_lost_kv(self) -> None:
        """Count the loss of the caches of all running calls, which the server computes again."""
        lost = sum(len(call.request.prompt_ids) + len(call.response) for call in self.sent)
        self._prefilled_tokens += lost
        self._reprefilled_tokens += lost

    # -- one call --------------------------------------------------------------------------------------------

    async def _read(self, call: GenerationCall) -> None:
        """Send a call and read it to its end; after a stop string that only we have seen, to the server's end of it."""
        try:
            await self._until_one_may_be_sent()
            call.send(self._served.version, self._served.label)
            self._prefilled_tokens += call.num_input_tokens
            self._reprefilled_tokens += len(call.request.response_ids)
            async with aclosing(self._dialect.decode(call)) as deltas:
                async for delta in deltas:
                    cached = min(delta.num_cached_tokens, call.num_input_tokens)
                    self._prefilled_tokens -= cached
                    self._reprefilled_tokens -= max(0, cached - len(call.request.prompt_ids))
                    if not call.ended.is_set():
                        self._take(call, delta)
            if call.asked_to_stop and len(call.response) == len(call.request.response_ids):
                call.abort(self._served.version)  # vLLM 0.32 says nothing of a call that it aborts before a token
            if not call.ended.is_set():
                raise EngineError(f"{self._client}: the stream of {call.request_id} ended without a finish reason")
        except Exception as e:
            if call.is_displaced and isinstance(e, EngineError):
                e = CallDisplaced(f"{self._client} had to stop all its calls, since one did not end")
            call.fail(e)
        finally:
            self._open.pop(call.request_id, None)

    def _take(self, call: GenerationCall, delta: Delta) -> None:
        version, kv_version = self._served.version_of(delta.label, call.request_id), None
        if delta.kv_label is not None:
            kv_version = self._served.version_of(delta.kv_label, call.request_id)
        unasked = delta.finish_reason is FinishReason.ABORT and not call.asked_to_stop
        delta = replace(delta, finish_reason=None) if unasked else delta
        kv_kept = self._dialect.traits.keeps_kv
        self._decoded_tokens += call.take(delta, version, kv_kept=kv_kept, kv_version=kv_version)
        if delta.token_ids or delta.num_held_tokens:
            self._last_token_s = asyncio.get_running_loop().time()
            call.patience.heard()
        if unasked and not call.ended.is_set():
            raise EngineError(
                f"{self._client} stopped {call.request_id} after {len(call.response)} tokens without being asked to"
            )
        if call.ended.is_set():
            self._open.pop(call.request_id, None)
            if delta.finish_reason is None:  # the server does not know yet
                self._tasks.start(self._end_in_server(call))

    async def _end_in_server(self, call: GenerationCall) -> None:
        """Abort in the server a call that has ended here."""
        assert call.reader is not None
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._config.abort_timeout_s):
                await self._dialect.ask_to_abort([call.request_id])
                await asyncio.wait([call.reader])
        call.reader.cancel()

    # -- the gate --------------------------------------------------------------------------------------------

    async def check_weights(self) -> None:
        """Raise ``EngineError`` when the server serves other weights than it was given."""
        await self._served.check(still=self.gate.is_set)

    async def _until_one_may_be_sent(self) -> None:
        """Return when a call may be sent. Raises ``EngineError`` when the server does not serve our weights."""
        await self._until_ready()
        while self.held.locked():
            async with self.held:
                pass
            await self._until_ready()

    async def _until_ready(self) -> None:
        while True:
            await self.gate.wait()
            self._served.refuse_when_unknown()
            if asyncio.get_running_loop().time() - self._client.last_heard_s <= RESTART_S:
                return
            if self._check_of_weights is None or self._check_of_weights.done():
                self._check_of_weights = self._tasks.start(self.check_weights())
                # All who wait for it may be cancelled, and asyncio complains of an error that nobody retrieves.
                self._check_of_weights.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._check_of_weights)
