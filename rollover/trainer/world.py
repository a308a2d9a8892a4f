"""The world of a rank: the processes that train one model together, each with a part of it on a device of its own.

A step needs only a few collectives from the others; each has the deadline of the process group, and names the ranks
that it waited for. The progress of each rank is written where all can read it, so that a rank that hangs can be told
from the ranks that wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rollover.errors import RolloverError


class PeerLost(RolloverError, RuntimeError):
    """A collective failed because another rank has ended, hangs or does something else."""


def is_of_collective(error: BaseException) -> bool:
    """Return whether an error comes from an exchange with other ranks that PyTorch made by itself, as FSDP2 does in
    every pass: it is raised from ``torch.distributed``, and only PyTorch has been called from there.
    """
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    innermost = takewhile(lambda name: name.partition(".")[0] == "torch", reversed(frames))
    return any(name.startswith("torch.distributed") for name in innermost)


class World:
    """One rank among ``size`` of them, with a process group of torch.distributed if ``size`` is above 1.

    Args:
        progress: how much each rank has done, ``[size]``; this one increments its own entry.
        mesh: the devices of all ranks, in one dimension.
        timeout_s: the deadline of collectives among some of the ranks; others have their process group's.

    Example: on rank 1 of 2, ``world.sum(torch.tensor([1.0]), "ones")`` returns 2 on both.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        progress: NDArray[np.uint64] | None = None,
        mesh: DeviceMesh | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        assert 0 <= rank < size, f"there is no rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self.mesh = mesh
        self._progress = progress
        self._timeout_s = timeout_s
        self._neighbours: dict[int, dist.ProcessGroup] = {}

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def tick(self) -> None:
        """Record progress: a pass over a row, a tensor read or written."""
        if self._progress is not None:
            self._progress[self.rank] += 1

    def sum(self, values: Tensor, what: str) -> Tensor:
        """Return the sum of the tensors of all ranks, with the same bits on each of them. It may be ``values``
        itself."""
        if self.size > 1:
            self.together(what, lambda: dist.all_reduce(values))
        return values

    def gather(self, values_K: Tensor, what: str) -> Tensor:
        """Return the vectors of all ranks, which have the same length, as ``[size, K]``."""
        if self.size == 1:
            return values_K[None]
        parts = [torch.empty_like(values_K) for _ in range(self.size)]
        self.together(what, lambda: dist.all_gather(parts, values_K))
        return torch.stack(parts)

    def failed(self, here: bool, what: str) -> Sequence[int]:
        """Return the ranks on which ``here`` is true, so that all know of a failure before any raises."""
        if self.size == 1:
            return [0] if here else []
        device = "cpu" if self.mesh is None else self.mesh.device_type
        flags_W = self.gather(torch.tensor([float(here)], device=device), what)[:, 0]
        return [rank for rank, flag in enumerate(flags_W.tolist()) if flag]

    def neighbours(self, size: int) -> dist.ProcessGroup:
        """Return the process group of this rank among groups of ``size`` consecutive ranks. All ranks call it; ``size``
        divides their number."""
        if size not in self._neighbours:
            timeout = timedelta(seconds=self._timeout_s)
            for first in range(0, self.size, size):  # each group is created by all ranks, even by those outside it
                group = dist.new_group(list(range(first, first + size)), timeout=timeout)
                if first <= self.rank < first + size:
                    self._neighbours[size] = group
        return self._neighbours[size]

    def together(self, what: str, collective: Callable[[], Any], *, among: Sequence[int] | None = None) -> None:
        """Run an operation that involves other ranks: all of them, or the ranks in ``among``. Raises ``PeerLost``,
        naming the ranks that this one has waited for, when it fails."""
        self.tick()
        started_s = time.monotonic()
        try:
            collective()
        except torch.OutOfMemoryError:  # this rank's own failure
            raise
        except RuntimeError as error:  # errors of gloo and NCCL are of this type
            waited_s = time.monotonic() - started_s
            names = " and ".join(f"rank {rank}" for rank in self._behind(among or range(self.size)))
            reason = (str(error).splitlines() or [""])[0]
            raise PeerLost(f"{self} waited {waited_s:.0f} s for {names} ({what}): {reason}") from error
        self.tick()

    def _behind(self, among: Sequence[int]) -> list[int]:
        """Return the ranks that have done less than this one, or all others if none has."""
        others = [rank for rank in among if rank != self.rank]
        if self._progress is None:
            return others
        own = self._progress[self.rank]
        return [rank for rank in others if self._progress[rank] < own] or others


ALONE = World()
"""The world of a trainer without others; its collectives do nothing."""
