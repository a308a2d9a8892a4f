"""One end of a process group of torch.distributed through which tensors go from rank 0 to all others.

A lost peer must end the transfer, and never the process, which is a trainer's or a server's. PyTorch watches a group
over NCCL from a thread that ends the process when an operation fails or is late. A group that is made with
``TORCH_NCCL_BLOCKING_WAIT`` has no such thread: whoever waits for an operation looks for errors, and is given them.
Here each operation is waited for anyway. The variable is set only while a group is made, since the other groups of the
process, such as the ranks of a sharded trainer, must not block.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_MAKING = threading.Lock()


class BroadcastGroup:
    """A group of ``size`` ranks, which meet in ``store``. All methods but ``close`` block.

    Args:
        backend: "gloo", or "nccl".
        host: our own address, at which gloo listens for the others.
        device: the one on which tensors are sent and received, by PyTorch's name.
        timeout_s: the longest wait for the others.

    Raises ``RuntimeError``, as torch.distributed does, when the others do not come.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, backend: str, host: str, device: str, timeout_s: float
    ) -> None:
        from torch import distributed

        self._is_nccl = backend == "nccl"
        self._device = device
        self._is_closed = False
        timeout = timedelta(seconds=timeout_s)
        if self._is_nccl:
            nccl: Any = distributed.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            with _errors_for_those_who_wait():
                self._group: Any = nccl(store, rank, size, options)
            return
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timeout
        self._group = gloo(store, rank, size, options)

    def broadcast(self, tensor: Tensor, *, timeout_s: float) -> Tensor:
        """Send a tensor, or receive into it where this is not rank 0. Returns it, as it is on the device.

        Raises ``RuntimeError`` when a peer is lost or late, or the group is closed meanwhile.
        """
        from torch.distributed import BroadcastOptions

        self._refuse_if_closed()
        tensor = tensor.to(self._device).contiguous()
        limit = timedelta(seconds=timeout_s)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = limit
        # The operation is not bound to a name, which the traceback of an error would keep alive, and with it the
        # connections.
        if self._is_nccl:
            self._group.broadcast([tensor], options).wait(limit)
        else:
            self._group.broadcast([tensor], options).wait()
        self._refuse_if_closed()  # NCCL shows an operation that was aborted as done
        return tensor

    def close(self) -> None:
        """Give the group up, also while another thread waits in it."""
        self._is_closed = True
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the group was closed")


@contextmanager
def _errors_for_those_who_wait() -> Iterator[None]:
    """Set the variable while a group over NCCL is made, so that errors reach those who wait for its operations."""
    with _MAKING:
        before = os.environ.get(_BLOCKING_WAIT)
        os.environ[_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING_WAIT]
            else:
                os.environ[_BLOCKING_WAIT] = before
