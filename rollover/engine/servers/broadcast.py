"""Weights from this process into the workers of a server, through a process group of which we are rank 0.

What it keeps true: a group lives for one update, so a server that has been started anew, or that failed in the middle,
needs no special case; the server's answer and our share are waited for together, and when one of the two fails nobody
waits for the other.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from rollover.engine.servers.folder import TensorInfo, read_weight_infos
from rollover.errors import EngineError, EngineTimeout

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 1 << 30
"""What is announced to a server, and held by it, at a time."""


class ProcessGroup(Protocol):
    """Rank 0 of a group whose other ranks are a server's workers. All methods but ``close`` block."""

    @property
    def address(self) -> Mapping[str, Any]:
        """What the workers are told in order to find it, in the server's own words."""
        ...

    def join(self) -> None:
        """Return when everybody is there."""
        ...

    def broadcast(self, tensor: Tensor) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Weights that are sent in one go, in the order of ``infos``."""

    folder: Path
    infos: Mapping[str, TensorInfo]

    def tensors(self) -> Iterator[Tensor]:
        from safetensors import safe_open

        files = [safe_open(file, framework="pt") for file in sorted(self.folder.glob("*.safetensors"))]
        of_name = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        for name in self.infos:
            yield of_name[name].get_tensor(name)


def buckets(folder: Path, *, limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """All weights of a folder, in pieces of ``limit_bytes`` or a single tensor."""
    pieces: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in read_weight_infos(folder).items():
        if pieces[-1] and size + info.num_bytes > limit_bytes:
            pieces.append({})
            size = 0
        pieces[-1][name] = info
        size += info.num_bytes
    return [Bucket(folder=folder, infos=infos) for infos in pieces]


async def together(answer: Awaitable[Any], share: Callable[[], None], *, limit_s: float, what: str) -> Any:
    """The server's answer to a call during which ``share``, which blocks, does our part of it.

    Raises ``EngineError`` when either fails, ``EngineTimeout`` after ``limit_s``. Our part is then left to its own
    deadline: what it waits for will not come, and the group is not used again.
    """
    asked = asyncio.ensure_future(answer)
    ours = _in_thread(share)
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.wait([asked, ours], return_when=asyncio.FIRST_EXCEPTION)
            return (await asyncio.gather(asked, ours))[0]
    except EngineError:
        raise
    except TimeoutError:
        raise EngineTimeout(f"{what} took longer than {limit_s:g} s (engine.load_timeout_s)") from None
    except RuntimeError as e:  # torch.distributed raises nothing more special
        raise EngineError(f"{what} failed: {e}") from e
    finally:
        asked.cancel()
        ours.cancel()
        await asyncio.gather(asked, ours, return_exceptions=True)


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Of a daemon thread: one that hangs must not keep this process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except Exception as e:
            error = e
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return done


def address_towards(url: str) -> str:
    """Our own address on the way to a server: the loopback address where it is on this machine."""
    parts = urlsplit(url)
    family, kind, _, _, peer = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)  # sends nothing
        return str(probe.getsockname()[0])


class TorchGroup:
    """A group of torch.distributed, over gloo or NCCL. It listens on ``host`` alone.

    Args:
        num_workers: of the server; their ranks begin at 1.
        timeout_s: deadline of each step of ours.
    """

    def __init__(self, backend: str, host: str, name: str, *, num_workers: int, timeout_s: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._backend = backend
        self._host = host
        self._name = name
        self._size = 1 + num_workers
        self._timeout = timedelta(seconds=timeout_s)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self._port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        # As torch's own helper nests them; the workers look in the same place.
        device = "cuda" if backend == "nccl" else "cpu"
        self._store = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._group: Any = None

    @property
    def address(self) -> Mapping[str, Any]:
        return {
            "master_address": self._host,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._name,
            "backend": self._backend,
        }

    def join(self) -> None:
        from torch import distributed

        if self._backend == "nccl":
            nccl: Any = distributed.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = self._timeout
            self._group = nccl(self._store, 0, self._size, options)
            return
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        self._group = gloo(self._store, 0, self._size, options)

    def broadcast(self, tensor: Tensor) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        if self._backend == "nccl":
            tensor = tensor.cuda()
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor.contiguous()], options).wait()
        if self._backend == "nccl":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._group = None
