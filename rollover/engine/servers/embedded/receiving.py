"""The receiving end of a process group through which weights come: a rank above 0 (``TorchGroup`` is rank 0).

Invariants: whoever waits here waits no longer than ``TIMEOUT_S``; ``close`` releases it at once.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from rollover.engine.servers.embedded.messages import Announcement, GroupAddress
from rollover.errors import EngineError
from rollover.weights.broadcasts import BroadcastGroup
from rollover.weights.groups import check_nccl, own_address

TIMEOUT_S = 900.0
"""Longest wait for the sender. Its own deadline is shorter (``engine.load_timeout_s``); this one is for a sender that
is gone without a word."""


class ReceivingGroup:
    """A group that is joined when this returns. All methods but ``close`` block.

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
            self._group = BroadcastGroup(
                store,
                address.rank_offset,
                address.world_size,
                backend=address.backend,
                host=own_address(address.master_address, address.master_port),
                device=str(device),
                timeout_s=TIMEOUT_S,
            )
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
        """Give the group up, even while another thread waits in it."""
        self._group.close()

    def _flat(self, dtypes: list[torch.dtype], shapes: list[list[int]]) -> list[Tensor]:
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
        whole = self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8, device=self._device))
        pieces = whole.split(sizes)
        return [piece.view(dtype).view(shape) for piece, dtype, shape in zip(pieces, dtypes, shapes, strict=True)]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return self._group.broadcast(tensor, timeout_s=TIMEOUT_S)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
