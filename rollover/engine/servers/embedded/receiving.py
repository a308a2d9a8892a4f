"""The receiving end of a process group through which weights come: a rank above 0 (``TorchGroup`` is rank 0).

What it keeps true: whoever waits here waits no longer than ``TIMEOUT_S``; ``close`` releases it at once.
"""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from rollover.engine.servers.embedded.messages import Announcement, GroupAddress
from rollover.errors import EngineError
from rollover.weights.groups import check_nccl

TIMEOUT_S = 900.0
"""Longest wait for the sender. Its own deadline is shorter (``engine.load_timeout_s``); this one is for a sender that
is gone without a word."""


class ReceivingGroup:
    """A group that is joined when this returns. All methods but ``close`` block.

    Example: ``ReceivingGroup(address, torch.device("cpu")).receive(announced)["model.norm.weight"]`` is what rank 0
    broadcasts under that name.

    Raises ``EngineError`` when the others cannot be met.
    """

    def __init__(self, address: GroupAddress, device: torch.device) -> None:
        self._device = device
        timeout = timedelta(seconds=TIMEOUT_S)
        if (address.backend == "nccl") != (device.type == "cuda"):
            raise EngineError(
                f"weights cannot be received over {address.backend} on device {device.type!r}: set"
                f" engine.weight_transfer to {'nccl' if device.type == 'cuda' else 'gloo'!r}"
            )
        if address.backend == "nccl":
            check_nccl()
        try:
            meeting = TCPStore(address.master_address, address.master_port, is_master=False, timeout=timeout)
            name = address.group_name
            store = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, meeting)))
            self._group = self._joined(address, store, timeout)
        except RuntimeError as e:  # torch.distributed raises nothing more special
            raise EngineError(f"the group of {address.master_address} could not be joined: {_first_line(e)}") from e

    def receive(self, announced: Announcement) -> dict[str, Tensor]:
        """Return the tensors that rank 0 broadcasts next. Raises ``EngineError`` when they do not come."""
        dtypes = [getattr(torch, name) for name in announced.dtypes]
        try:
            if announced.is_flat:
                parts = self._flat(dtypes, announced.shapes)
            else:
                parts = [
                    self._broadcast(torch.empty(shape, dtype=dtype, device=self._device))
                    for shape, dtype in zip(announced.shapes, dtypes, strict=True)
                ]
            return dict(zip(announced.names, parts, strict=True))
        except ValueError as e:
            raise EngineError(f"an announcement names, types and shapes different numbers of tensors: {e}") from None
        except RuntimeError as e:
            raise EngineError(f"announced weights did not arrive: {_first_line(e)}") from e

    def close(self) -> None:
        """Give the group up, also while another thread waits in it."""
        with suppress(RuntimeError):
            self._group.abort()

    def _joined(self, address: GroupAddress, store: PrefixStore, timeout: timedelta) -> Any:
        if address.backend == "nccl":
            nccl: Any = distributed.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            return nccl(store, address.rank_offset, address.world_size, options)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_own_address(address))]
        options._timeout = timeout
        return gloo(store, address.rank_offset, address.world_size, options)

    def _flat(self, dtypes: list[torch.dtype], shapes: list[list[int]]) -> list[Tensor]:
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        whole = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self._device))
        pieces = whole.split(sizes)
        return [piece.view(dtype).view(shape) for piece, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return tensor


def _own_address(address: GroupAddress) -> str:
    """Return our own address on the way to the sender, which listens nowhere else."""
    family, kind, _, _, peer = socket.getaddrinfo(address.master_address, address.master_port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
