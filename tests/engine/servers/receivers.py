"""Servers without HTTP that receive weights over gloo, each a process of its own: what they hold can be looked at, and
they can be killed and stopped."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollover.engine.servers.weights.transfer import Receiver, TransferCalls
from rollover.errors import EngineError
from rollover.weights.groups import GroupPlan
from tests.trainer.rank_pool import fork_server

_ALL_S = 60.0
"""Deadline of a worker's own: as with real servers, far behind the sender's."""


def digest(tensor: torch.Tensor) -> str:
    """Name format, shape and content of a tensor."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


class ReceiverProcess:
    """One of them, as its client. ``held`` are the digests of what it serves.

    Args:
        refuses: it answers every bucket with a refusal, after it has received it.
        is_flat: buckets come as one tensor of bytes.
        keeps: it looks at what it receives; one that does not takes no time for it.
        on_bucket: called with the number of each bucket that it is told of, before it is.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        refuses: bool = False,
        is_flat: bool = False,
        keeps: bool = True,
        on_bucket: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.name = name
        self.held: dict[str, str] = {}
        self.num_meetings = 0
        self._plan = GroupPlan(
            meets="torch",
            backend="gloo",
            towards="http://127.0.0.1:9",
            name=name,
            num_workers=1,
            timeout_s=timeout_s,
            is_flat=is_flat,
        )
        self._on_bucket = on_bucket
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        context = fork_server()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, refuses, is_flat, keeps), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._reader: threading.Thread | None = None

    def receiver(self) -> Receiver:
        return Receiver(name=self.name, plan=self._plan, calls=self._calls, post=self._post, ping=self._ping)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _calls(self, address: Mapping[str, Any]) -> TransferCalls:
        self.num_meetings += 1
        numbers = itertools.count()

        def announce(bucket: Any, is_last: bool) -> tuple[str, Any]:
            self._on_bucket(next(numbers))
            return "receive", bucket.described("dtypes")

        return TransferCalls(
            meet=("meet", dict(address)),
            begin=("begin", None),
            announce=announce,
            finish=("finish", None),
            cancel=("cancel", None),
            leave=("leave", None),
        )

    async def _ping(self) -> None:
        await self._post("ping", None)

    async def _post(self, path: str, body: Any) -> None:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer = self._answers[number] = loop.create_future()
        self._loop = loop
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        try:
            self._connection.send((number, path, body))
            kind, value = await answer
        except OSError:
            raise EngineError(f"{self.name} cannot be reached") from None
        if kind == "refused":
            raise EngineError(f"{self.name} refused {path}: {value}")
        if path == "finish":
            self.held = value

    def _read(self) -> None:
        def take(number: int, answer: Any) -> None:
            waiting = self._answers.pop(number, None)
            if waiting is not None and not waiting.done():
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)

        def lose() -> None:
            for number in list(self._answers):
                take(number, EngineError(f"{self.name} cannot be reached"))

        try:
            while True:
                number, answer = self._connection.recv()
                with suppress(RuntimeError):  # nobody waits for it any more
                    self._loop.call_soon_threadsafe(take, number, answer)
        except (EOFError, OSError):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lose)


def _main(connection: Connection, refuses: bool, is_flat: bool, keeps: bool) -> None:
    worker = _Worker(refuses, is_flat, keeps)
    while True:
        try:
            number, path, body = connection.recv()
        except EOFError:
            return
        try:
            answer = "done", getattr(worker, path)(body)
        except Exception as e:
            answer = "refused", f"{type(e).__name__}: {e}"
        connection.send((number, answer))


class _Worker:
    def __init__(self, refuses: bool, is_flat: bool, keeps: bool) -> None:
        self._refuses, self._is_flat, self._keeps = refuses, is_flat, keeps
        self._group: Any = None
        self._received: dict[str, str] = {}

    def meet(self, address: Mapping[str, Any]) -> None:
        limit, name = timedelta(seconds=_ALL_S), address["group_name"]
        store: Any = TCPStore(address["master_address"], address["master_port"], is_master=False, timeout=limit)
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], limit
        self._group = gloo(store, address["rank_offset"], address["world_size"], options)

    def begin(self, body: Any) -> None:
        self._received = {}

    def receive(self, body: Mapping[str, Any]) -> None:
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
        ]
        if self._is_flat:
            flat = torch.empty(sum(tensor.nbytes for tensor in empty), dtype=torch.uint8)
            self._take(flat)
            for tensor, part in zip(empty, flat.split([tensor.nbytes for tensor in empty]), strict=True):
                tensor.copy_(part.view(tensor.dtype).reshape(tensor.shape))
        else:
            for tensor in empty:
                self._take(tensor)
        if self._refuses:
            raise RuntimeError("out of memory")
        if self._keeps:
            self._received |= {name: digest(tensor) for name, tensor in zip(body["names"], empty, strict=True)}

    def _take(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], BroadcastOptions()).wait()

    def finish(self, body: Any) -> dict[str, str]:
        return self._received

    def cancel(self, body: Any) -> None:
        self._received = {}

    def leave(self, body: Any) -> None:
        self._group = None

    def ping(self, body: Any) -> None:
        pass
