"""Lets several ranks share a row along the sequence, for contexts that one device cannot hold.

Each of C ranks has the same number of a row's positions, and computes all token-wise operations for these alone. Around
attention, two exchanges turn that into all positions of 1 / C of the heads, and back (Ulysses, arXiv 2309.14509). The
log-probs of all ranks are combined at the end: each rank computes the loss of the whole row, in which a sequence on
several ranks is one, and takes the gradient of only its own log-probs. The sum over ranks is then the gradient of the
whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rollover.trainer.experts import RowRoutes
from rollover.trainer.world import World


class ContextGroup:
    """The ranks that share a row: ``size`` neighbours among the ranks of a world, from the viewpoint of one of them."""

    def __init__(self, world: World, size: int) -> None:
        self.size = size
        self.place = world.rank % size
        """Index of this rank's part of each row."""
        self.number = world.rank // size
        """Index of this group among the groups."""
        self._world = world
        self._group = world.neighbours(size)
        first = self.number * size
        self._ranks = range(first, first + size)

    def exchange(self, parts_C: Tensor) -> Tensor:
        """Send ``parts_C[c]`` to the rank at place ``c``, and return what the others have sent, ordered by their
        places."""
        parts_C = parts_C.contiguous()
        out_C = torch.empty_like(parts_C)
        self._world.together(
            "exchange of a row", lambda: dist.all_to_all_single(out_C, parts_C, group=self._group), among=self._ranks
        )
        return out_C

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, ``[C, ...]``, which have the same shape."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        self._world.together(
            "log-probs of a row",
            lambda: dist.all_gather(parts, values.contiguous(), group=self._group),
            among=self._ranks,
        )
        return torch.stack(parts)


def open_context(world: World, size: int) -> ContextGroup | None:
    """Return the group of this rank if ``size`` ranks share each row; ``None`` if rows are not shared. All ranks call
    it. ``size`` divides the number of ranks."""
    return None if size == 1 else ContextGroup(world, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """The share of one of C ranks in a row of N positions with T targets: ``n = ceil(N / C)`` positions, of which those
    past the end are padding to which nothing attends, and the ``t`` targets that these predict.
    """

    context: ContextGroup
    input_ids_N: Tensor
    """Input ids of this rank, ``[n]``."""
    position_ids_N: Tensor
    """Position ids of this rank, ``[n]``."""
    predict_T: Tensor
    """Index of the position, among the n, that predicts each of the t targets."""
    target_T: Tensor
    """The t targets of this rank."""
    own_T: Tensor
    """Indices of the t targets among the row's T."""
    found_T: Tensor
    """Place of each of the row's T targets among the targets of all ranks, when each rank pads its own to ``width``."""
    width: int
    """The largest number of targets on a rank."""
    num_padding: int
    """Positions of padding on all ranks."""

    @classmethod
    def of(
        cls, context: ContextGroup, *, input_ids_N: Tensor, position_ids_N: Tensor, predict_T: Tensor, target_T: Tensor
    ) -> RowShare:
        """Build this rank's share of a row; see ``PackedRow`` for its tensors."""
        num, size, place = len(input_ids_N), context.size, context.place
        each = -(-num // size)
        num_padding = each * size - num
        own = slice(place * each, (place + 1) * each)
        place_T = predict_T // each
        counts_C = torch.bincount(place_T, minlength=size)
        # Number the targets of each rank, in their order in the row.
        order_T = torch.argsort(place_T, stable=True)
        within_T = torch.empty_like(order_T)
        within_T[order_T] = (
            torch.arange(len(order_T), device=order_T.device) - (counts_C.cumsum(0) - counts_C)[place_T[order_T]]
        )
        width = int(counts_C.max())
        own_T = (place_T == place).nonzero()[:, 0]
        return cls(
            context=context,
            input_ids_N=F.pad(input_ids_N, (0, num_padding))[own],
            position_ids_N=F.pad(position_ids_N, (0, num_padding))[own],
            predict_T=predict_T[own_T] - place * each,
            target_T=target_T[own_T],
            own_T=own_T,
            found_T=place_T * width + within_T,
            width=width,
            num_padding=num_padding,
        )

    def whole_rows(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Exchange heads for positions: each ``[n, H, D]`` becomes ``[C n, H / C, D]``, of any ``H`` and ``D``."""
        size = self.context.size
        parts_CnF = torch.cat([x.unflatten(1, (size, -1)).flatten(2) for x in own], dim=2).transpose(0, 1)
        rows: Tensor = _Exchange.apply(self.context, parts_CnF)
        of_each = rows.flatten(0, 1).split([x[0].numel() // size for x in own], dim=1)
        return [row.unflatten(1, (-1, x.shape[2])) for row, x in zip(of_each, own, strict=True)]

    def own_positions(self, row: Tensor) -> Tensor:
        """Exchange positions for heads: ``[N, H / C, D]`` becomes ``[n, H, D]``."""
        row = torch.cat([row, row[:1].expand(self.num_padding, -1, -1)])
        parts: Tensor = _Exchange.apply(self.context, row.unflatten(0, (self.context.size, -1)))
        return parts.transpose(0, 1).flatten(1, 2)

    def own_routes(self, routes: RowRoutes) -> RowRoutes:
        """Return the routes of this rank's positions; routes of padding are not known."""
        num = len(self.input_ids_N)
        own = slice(self.context.place * num, (self.context.place + 1) * num)
        return RowRoutes(
            bytes_NB=F.pad(routes.bytes_NB, (0, 0, 0, self.num_padding))[own],
            is_known_N=F.pad(routes.is_known_N, (0, self.num_padding))[own],
        )

    def gathered(self, values_T: Tensor) -> Tensor:
        """Combine the values of each rank's targets, ``[t, ...]``, into ``[T, ...]``."""
        whole: Tensor = _Gather.apply(self, values_T)
        return whole


class _Exchange(torch.autograd.Function):
    """``ContextGroup.exchange`` with its gradient, which takes the same way back."""

    @staticmethod
    def forward(ctx: Any, context: ContextGroup, parts_C: Tensor) -> Tensor:
        ctx.context = context
        return context.exchange(parts_C)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.context.exchange(grads[0])


class _Gather(torch.autograd.Function):
    """``RowShare.gathered`` with its gradient. All ranks use the result alike, so each already has the gradient of its
    own part."""

    @staticmethod
    def forward(ctx: Any, share: RowShare, values_T: Tensor) -> Tensor:
        ctx.share = share
        padded = values_T.new_zeros((share.width, *values_T.shape[1:]))
        padded[: len(values_T)] = values_T
        return share.context.gather(padded).flatten(0, 1)[share.found_T]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0][ctx.share.own_T]
