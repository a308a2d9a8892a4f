"""Runs the core, in a thread of its own or in lockstep with its consumers: two implementations of ``CoreLoop``.

A *command* is a function of the core that may return outputs. Commands run between iterations, in the order of
their submission; their outputs are delivered, on the event loop, before their future is done. What an
iteration gives is delivered in one call. A failed iteration fails every open call with ``EngineError``
(``ResourceError`` when memory ran out) and leaves the core empty and usable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from rollover.engine.base import EngineStats
from rollover.engine.embedded.core import EngineCore, Output
from rollover.errors import EngineError, ResourceError, RolloverError

Command = Callable[[EngineCore], list[Output] | None]
Deliver = Callable[[list[Output]], None]
Fail = Callable[[list[str], RolloverError], None]
_Executed = tuple[list[Output] | None, asyncio.Future[None], Exception | None]


class CoreLoop(Protocol):
    """Runs commands and iterations of the core. Used from one event loop at a time."""

    paused: bool

    def submit(self, command: Command) -> asyncio.Future[None]:
        """Queue a command. Raises nothing: an exception of the command goes to the future."""
        ...

    def processed(self, num_chunks: int) -> None:
        """Record that consumers are done with ``num_chunks`` delivered chunks."""
        ...

    def stats(self) -> EngineStats: ...

    def stop(self) -> None:
        """Run nothing after the command that calls this."""
        ...


class ThreadLoop:
    """Runs the core ahead of its consumers; the default.

    Consumes commands; produces calls on the event loop; waits for a command or, unless paused, for an open call.
    """

    def __init__(self, core: EngineCore, deliver: Deliver, fail: Fail) -> None:
        self._core, self._deliver, self._fail = core, deliver, fail
        self._commands: list[tuple[Command, asyncio.Future[None]]] = []
        self._wake = threading.Condition()
        self._stats = core.stats()
        self._stopped = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.paused = False
        self._thread = threading.Thread(target=self._run, name="rollover-engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> asyncio.Future[None]:
        self._event_loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = self._event_loop.create_future()
        with self._wake:
            self._commands.append((command, future))
            self._wake.notify()
        return future

    def processed(self, num_chunks: int) -> None:
        """Do nothing: the thread does not wait for its consumers."""

    def stats(self) -> EngineStats:
        return self._stats

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._commands or self._can_step())
                commands, self._commands = self._commands, []
            if commands:
                done = [self._executed(command, future) for command, future in commands]
                self._stats = self._core.stats()
                self._post(self._hand_out, done)  # at once: hundreds of calls may begin together
            if self._stopped:
                return
            if self._can_step():
                self._step()

    def _can_step(self) -> bool:
        return self._core.has_work and not self.paused

    def _executed(self, command: Command, future: asyncio.Future[None]) -> _Executed:
        try:
            return command(self._core), future, None
        except Exception as e:
            return None, future, e

    def _hand_out(self, done: list[_Executed]) -> None:
        for outputs, future, error in done:
            if outputs:
                self._deliver(outputs)
            if future.done():  # its caller was cancelled
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except Exception as e:
            ids, error = self._core.reset(), failure(e)
            self._stats = self._core.stats()
            self._post(self._fail, ids, error)
            return
        self._stats = self._core.stats()
        if outputs:
            self._post(self._deliver, outputs)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        assert self._event_loop is not None, "there is no work before the first command"
        with suppress(RuntimeError):  # it is closed, and nobody waits any more; the next one may use the engine
            self._event_loop.call_soon_threadsafe(callback, *args)


class LockstepLoop:
    """Runs the core on the event loop, one iteration per callback, and waits for its consumers.

    The law: an iteration starts only when every chunk delivered so far has been processed, that is, when the consumer
    of each has asked its iterator for the next one, or has closed it. A consumer that holds a chunk, awaiting a reward,
    say, holds the engine. Calls, aborts and weight loads made meanwhile take effect at once, in the order they are
    made, so before the next iteration. An idle engine starts after the loop's current turn: the calls of all tasks
    created in one turn are in the first batch. No clock and no thread has a say, so the same program over the same
    weights gives the same interleaving, chunk for chunk.
    """

    def __init__(self, core: EngineCore, deliver: Deliver, fail: Fail) -> None:
        self._core, self._deliver, self._fail = core, deliver, fail
        self._num_held = 0
        self._scheduled = False
        self.paused = False

    def submit(self, command: Command) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._hand_out(command(self._core) or [])
        except Exception as e:
            future.set_exception(e)
        else:
            future.set_result(None)
        self._schedule()
        return future

    def processed(self, num_chunks: int) -> None:
        self._num_held -= num_chunks
        self._schedule()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def stop(self) -> None:
        self.paused = True

    def _can_step(self) -> bool:
        return self._core.has_work and not self.paused and not self._num_held

    def _schedule(self) -> None:
        if self._can_step() and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._iterate)

    def _iterate(self) -> None:
        self._scheduled = False
        if not self._can_step():
            return
        try:
            outputs = self._core.step()
        except Exception as e:
            self._fail(self._core.reset(), failure(e))
            return
        self._hand_out(outputs)
        self._schedule()

    def _hand_out(self, outputs: list[Output]) -> None:
        self._num_held += len(outputs)
        self._deliver(outputs)


def failure(cause: Exception) -> RolloverError:
    """Make the error that open calls get when an iteration failed."""
    error: RolloverError
    if isinstance(cause, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(cause):
        error = ResourceError(
            "the engine ran out of memory during an iteration; lower engine.kv_cache_bytes, "
            "engine.prefill_chunk_tokens or engine.max_running"
        )
    elif isinstance(cause, RolloverError):
        return cause
    else:
        error = EngineError(f"the engine failed during an iteration: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
