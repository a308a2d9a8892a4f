"""Process groups through which this process, as rank 0, sends weights to the workers of servers.

``TorchGroup`` meets the workers as SGLang does, ``NCCLGroup`` as vLLM does. A group lives for one update, so a member
that was restarted, or that failed midway, needs no special case.
"""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Mapping
from ctypes import CDLL, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_void_p, string_at
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from rollover.errors import EngineError
from rollover.weights.broadcasts import BroadcastGroup

if TYPE_CHECKING:
    from torch import Tensor

_ID_BYTES = 128
_DATA_TYPES = {"torch.uint8": 1, "torch.float16": 6, "torch.float32": 7, "torch.bfloat16": 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t
_CLOSED = "the group through which weights were sent was closed"
_LEAST_S = 0.01
"""gloo interprets a timeout of 0 as no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A group that is to be formed, described for the process that will be its rank 0."""

    meets: Literal["torch", "nccl"]
    """Means of meeting: a store of torch.distributed, or an id of NCCL."""
    backend: Literal["gloo", "nccl"]
    towards: str
    """The URL of one of the servers, from which our own address is determined."""
    host: str | None = None
    """Our own address, if the user gives it."""
    name: str
    num_workers: int
    """Number of workers of all servers together; they are the ranks from 1 on."""
    timeout_s: float
    """Deadline of the whole transfer."""
    is_flat: bool = False
    """True if each bucket is sent as one tensor of bytes rather than tensor by tensor."""
    device: str | None = None
    """The sender's own device, by PyTorch's name."""

    @property
    def sends_from(self) -> str:
        """Return the device from which tensors are broadcast. The threads that do so would otherwise use the first GPU,
        which may be a server's.

        Example: over NCCL, the device of a trainer on "cuda:1", and "cuda:0" of one on the CPU; over gloo always "cpu".
        """
        if self.backend == "gloo":
            return "cpu"
        return self.device if self.device is not None and self.device.startswith("cuda") else "cuda:0"


class ProcessGroup(Protocol):
    """Rank 0 of a group whose other ranks are workers of servers. All methods but ``close`` block."""

    @property
    def address(self) -> Mapping[str, Any]:
        """Return where the group meets, as the workers' server expects it; ``rank_offset`` is the first server's."""
        ...

    def join(self) -> None:
        """Return when all workers have joined."""
        ...

    def broadcast(self, tensor: Tensor) -> None: ...

    def close(self) -> None:
        """Give up the group, even while another thread blocks in it, which then fails at once. Over NCCL, a thread that
        waits for workers to join cannot be released: it is left behind, and fails when they come or NCCL gives up."""
        ...


def open_group(plan: GroupPlan) -> ProcessGroup:
    """Open our end of a group. Raises ``EngineError`` if this process cannot."""
    if plan.backend == "nccl":
        check_nccl()
    if plan.meets == "nccl":
        return NCCLGroup(plan.num_workers, device=plan.sends_from)
    return TorchGroup(
        plan.backend,
        plan.host or address_towards(plan.towards),
        plan.name,
        num_workers=plan.num_workers,
        timeout_s=plan.timeout_s,
        device=plan.sends_from,
    )


def check_nccl() -> None:
    """Raise ``EngineError`` unless this process can be in a group over NCCL."""
    import torch
    from torch import distributed

    if not torch.cuda.is_available():
        raise EngineError("engine.weight_transfer 'nccl' needs a GPU in this machine: set it to 'folder'")
    if not (distributed.is_available() and distributed.is_nccl_available()):
        raise EngineError(
            "engine.weight_transfer 'nccl' needs a PyTorch with NCCL, and this one has none: install another, or set it"
            " to 'folder'"
        )


def address_towards(url: str) -> str:
    """Find our own address on the way to a server; it is the loopback address if the server is on this machine."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "the URLs of servers have hosts"
    return own_address(parts.hostname, parts.port or 80)


def is_loopback(url: str) -> bool:
    """Return whether a server is reached at an address that no other machine reaches."""
    try:
        address = ip_address(socket.getaddrinfo(urlsplit(url).hostname, None)[0][4][0])
        return address.is_loopback or address.is_unspecified
    except OSError:  # its name is not known here
        return False


def own_address(host: str, port: int) -> str:
    """Find our own address on the way to another one."""
    family, kind, _, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)  # sends nothing
        return str(probe.getsockname()[0])


class TorchGroup:
    """A group of torch.distributed, over gloo or NCCL. It listens on ``host`` only.

    Args:
        num_workers: of all servers; their ranks begin at 1.
        timeout_s: deadline of the whole transfer. Any wait for a worker then fails, and the others are released.
        device: the one from which tensors are broadcast.
    """

    def __init__(
        self, backend: str, host: str, name: str, *, num_workers: int, timeout_s: float, device: str = "cpu"
    ) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._backend = backend
        self._device = device
        self._host = host
        self._size = 1 + num_workers
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError as e:
            raise EngineError(f"no address {host!r} of this machine can be listened on: {e}") from None
        port = int(listener.getsockname()[1])
        timeout = timedelta(seconds=timeout_s)
        # The group uses a store of its own, so that any wait in it fails as soon as the meeting place is closed.
        self._meeting: Any = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        # As torch's own helper nests them; the workers look in the same place.
        kind = "cuda" if backend == "nccl" else "cpu"
        self._store = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._group: BroadcastGroup | None = None
        self.address = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": name,
            "backend": backend,
        }

    def join(self) -> None:
        self._group = BroadcastGroup(
            self._store,
            0,
            self._size,
            backend=self._backend,
            host=self._host,
            device=self._device,
            timeout_s=self._timeout_s,
        )

    def broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise EngineError(_CLOSED)
        self._group.broadcast(tensor, timeout_s=max(_LEAST_S, self._deadline_s - time.monotonic()))

    def close(self) -> None:
        group, self._group, self._meeting = self._group, None, None
        if group is not None:
            group.close()


class _UniqueId(Structure):
    _fields_ = (("bytes", c_char * _ID_BYTES),)


class NCCLGroup:
    """A group of NCCL itself; the library is the copy that PyTorch has loaded.

    The workers get the id of the group without a meeting place, so all must enter at the same time; right after that
    each takes part in an all-reduce of one number, and so must we. A communicator is aborted only once it is made:
    until then the thread that waits for the workers uses it.

    Args:
        device: the GPU from which tensors are broadcast.

    Raises ``EngineError`` if the library is not found.
    """

    def __init__(self, num_workers: int, *, device: str) -> None:
        try:
            self._nccl = CDLL("libnccl.so.2")
        except OSError as e:
            raise EngineError(f"engine.weight_transfer 'nccl' needs NCCL: {e}") from None
        self._nccl.ncclGetErrorString.restype = c_char_p
        self._nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, _UniqueId, c_int]
        self._size = 1 + num_workers
        self._device = device
        self._communicator: c_void_p | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._id = _UniqueId()
        self._call("ncclGetUniqueId", byref(self._id))
        self.address = {
            "nccl_unique_id_b64": base64.b64encode(string_at(byref(self._id), _ID_BYTES)).decode(),
            "rank_offset": 1,
            "world_size": self._size,
        }

    def join(self) -> None:
        import torch

        made = c_void_p()
        with torch.cuda.device(self._device):
            self._call("ncclCommInitRank", byref(made), c_int(self._size), self._id, c_int(0))
            with self._closing:
                self._communicator = made
            if self._is_closed:
                self.close()
            one = torch.zeros(1, device=self._device)
            here, stream = c_void_p(one.data_ptr()), c_void_p(torch.cuda.current_stream().cuda_stream)
            kind, operation = c_int(_DATA_TYPES[str(one.dtype)]), c_int(_SUM)
            self._call("ncclAllReduce", here, here, c_size_t(1), kind, operation, self._communicator, stream)
            self._wait()

    def broadcast(self, tensor: Tensor) -> None:
        import torch

        if (kind := _DATA_TYPES.get(str(tensor.dtype))) is None:
            raise EngineError(f"weights in {tensor.dtype} cannot be sent: set engine.weight_transfer to 'folder'")
        with torch.cuda.device(self._device):
            tensor = tensor.to(self._device).contiguous()
            here, stream = c_void_p(tensor.data_ptr()), c_void_p(torch.cuda.current_stream().cuda_stream)
            count = c_size_t(tensor.numel())
            self._call("ncclBroadcast", here, here, count, c_int(kind), c_int(0), self._communicator, stream)
            self._wait()

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                self._nccl.ncclCommAbort(communicator)

    def _wait(self) -> None:
        import torch

        torch.cuda.synchronize()
        if self._is_closed:  # an operation that was aborted looks as if it were done
            raise EngineError(_CLOSED)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._is_closed:
            raise EngineError(_CLOSED)
        if code := getattr(self._nccl, name)(*arguments):
            raise EngineError(f"{name}: {self._nccl.ncclGetErrorString(code).decode()}")
