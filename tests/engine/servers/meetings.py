"""Process groups within one process, for scripted servers: what the sender broadcasts is what their workers receive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import torch

from rollover.weights.groups import GroupPlan
from tests.speed import within

_DEADLINE_S = within(20.0)


class Seat:
    """The workers of one server in a meeting."""

    def __init__(self, meeting: Meeting, num_workers: int) -> None:
        self.num_workers = num_workers
        self.received: dict[str, torch.Tensor] = {}
        self.sent: list[torch.Tensor] = []
        self.has_left = False
        self._meeting = meeting

    async def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> str:
        meeting = self._meeting
        async with asyncio.timeout(_DEADLINE_S):
            while len(self.sent) < (1 if meeting.plan.is_flat else len(names)):
                if meeting.is_broken:
                    raise RuntimeError("connection closed by peer")
                await asyncio.sleep(0.001)
        if meeting.plan.is_flat:
            flat = self.sent.pop(0)
            start = 0
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                like = torch.empty(shape, dtype=getattr(torch, dtype))
                self.received[name] = flat[start : start + like.nbytes].view(like.dtype).reshape(shape)
                start += like.nbytes
            assert start == flat.numel()
        else:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensor = self.sent.pop(0)
                assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
                self.received[name] = tensor
        return f"sent {float(sum(t.float().sum() for t in self.received.values()))}"

    def leave(self) -> None:
        self.has_left = True


class Meeting:
    """The sender's side: a ``ProcessGroup``."""

    def __init__(self, plan: GroupPlan, number: int) -> None:
        self.plan = plan
        self.address: Mapping[str, Any] = {
            "group_name": f"{plan.name}/{number}",
            "rank_offset": 1,
            "world_size": 1 + plan.num_workers,
        }
        self.seats: list[Seat] = []
        self.offsets: list[int] = []
        self.closed = False
        self._changed = threading.Condition()

    @property
    def is_broken(self) -> bool:
        """Whether somebody who should take part does no more."""
        return self.closed or any(seat.has_left for seat in self.seats)

    def join(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.closed or self._are_there(), _DEADLINE_S)
        if self.closed:
            raise RuntimeError("the meeting place was closed")

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self.is_broken:
            raise RuntimeError("connection closed by peer")
        copies = [tensor.clone() for _ in self.seats]  # gives other threads a turn, so that all are made first
        for seat, copy in zip(self.seats, copies, strict=True):
            seat.sent.append(copy)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def sit(self, offset: int, num_workers: int) -> Seat:
        with self._changed:
            self.offsets.append(offset)
            self.seats.append(Seat(self, num_workers))
            self._changed.notify_all()
        return self.seats[-1]

    def _are_there(self) -> bool:
        return sum(seat.num_workers for seat in self.seats) == self.plan.num_workers


class Meetings:
    """All that were opened, in their order. ``open_group`` stands in for the one of ``rollover.weights.groups``."""

    def __init__(self) -> None:
        self.all: list[Meeting] = []

    def open_group(self, plan: GroupPlan) -> Meeting:
        self.all.append(Meeting(plan, len(self.all)))
        return self.all[-1]

    def meet(self, address: Mapping[str, Any], num_workers: int) -> Seat:
        (meeting,) = [m for m in self.all if m.address["group_name"] == address["group_name"]]
        assert address["world_size"] == meeting.address["world_size"]
        return meeting.sit(address["rank_offset"], num_workers)
