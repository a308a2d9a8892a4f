"""Decides which sequences share a forward pass, and the position of each token in it.

Invariants: every sampled token of every sample is predicted in exactly one row, rows have no padding, a sample
is never split, and siblings in a row share the positions of their prompt. Positions are computed on the host; the rows
are tensors on the model's device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.trainer.context import ContextGroup, RowShare
from rollover.trainer.experts import RowRoutes
from rollover.trainer.kept_sets import KeptSets
from rollover.types import Trajectory

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One prompt and one response: the part of a trajectory that a forward pass needs. An episode whose turns form a
    tree has one for each path."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    is_sampled: tuple[bool, ...] = ()
    """True for each response token that was sampled and not observed; empty if all were sampled."""
    kept: tuple[bytes, ...] = ()
    """Kept set of each sampled token (``rollover.kept``); empty if all were drawn from the whole vocabulary."""
    routes: tuple[bytes, ...] = ()
    """Route of each token of prompt and response (``rollover.routes``) if they are replayed; an empty one if it is not
    known, as of tokens that were not sampled in this path or another."""
    places: tuple[int, ...] = ()
    """Place of each sampled token in the trajectory, counted from the number of tokens that are sampled in its earlier
    paths; empty if they are one after the other."""

    def __post_init__(self) -> None:
        assert len(self.is_sampled) in (0, len(self.response_ids)), "a response token of which nothing is known"
        assert len(self.kept) in (0, self.num_sampled), "a sampled token without its kept set"
        assert len(self.routes) in (0, len(self.prompt_ids) + len(self.response_ids)), "a token without its route"
        if not self.prompt_ids or not self.num_sampled:
            raise ValueError(
                f"a sample needs at least one prompt and one response token, "
                f"got {len(self.prompt_ids)} and {self.num_sampled}"
            )

    @classmethod
    def all_of(cls, trajectory: Trajectory, *, replays_routes: bool = False) -> tuple[TrainingSample, ...]:
        """Return what forward passes need of a trajectory, path by path. A turn of several paths is sampled in the
        first, and observed in the others; it has its routes in all. Tokens observed before the first sampled one belong
        to the prompt, and those observed after the last turn are left out, since nothing was sampled after them;
        routes, unless they are replayed."""
        turns, kept, routes = trajectory.turns, trajectory.kept, trajectory.routes if replays_routes else ()
        first = [0, *accumulate(map(len, turns))]
        found, seen, num_seen = list[TrainingSample](), set[int](), 0
        for path in trajectory.paths:
            ids, places = [*trajectory.prompt.token_ids], list[int]()
            is_sampled, routes_of_ids = [False] * len(ids), [b""] * len(ids)
            for turn in path:
                observed = trajectory.observations[turn - 1].token_ids if turn else ()
                ids += (*observed, *turns[turn])
                routes_of_ids += (*[b""] * len(observed), *routes[first[turn] : first[turn + 1]])
                is_sampled += [False] * len(observed) + [turn not in seen] * len(turns[turn])
                places += () if turn in seen else range(first[turn], first[turn + 1])
            seen.update(path)
            start, moved = is_sampled.index(True) if places else len(ids), tuple(place - num_seen for place in places)
            num_seen += len(places)
            found.append(
                cls(
                    prompt_ids=tuple(ids[:start]),
                    response_ids=tuple(ids[start:]),
                    is_sampled=() if all(is_sampled[start:]) else tuple(is_sampled[start:]),
                    kept=tuple(kept[place] for place in places) if kept else (),
                    routes=tuple(routes_of_ids) if routes else (),
                    places=() if moved == tuple(range(len(moved))) else moved,
                )
            )
        return tuple(found)

    @property
    def num_sampled(self) -> int:
        return sum(self.is_sampled) if self.is_sampled else len(self.response_ids)

    def sampled(self, values_R: Ints) -> Ints:
        """Return the values of the sampled tokens, given values of all response tokens."""
        return values_R[np.array(self.is_sampled)] if self.is_sampled else values_R

    @property
    def num_shared(self) -> int:
        """Return how many positions it shares with siblings: the positions of its prompt, without the last one if the
        route with which that one predicts the first response token is its own."""
        return len(self.prompt_ids) - bool(self.routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """``B`` samples in ``N`` input positions, each prompt followed by its responses without their last tokens (which
    predict nothing that is trained). ``T`` sampled tokens are predicted.

    Example: two siblings with a prompt of 3 tokens and responses of 2 and 3 take 6 positions, with ``position_ids_N``
    of ``(0, 1, 2, 3, 3, 4)`` and ``predict_T`` of ``(2, 3, 2, 4, 5)``.
    """

    samples_B: tuple[int, ...]
    """Indices of the samples in the batch."""
    input_ids_N: Tensor
    position_ids_N: Tensor
    """Counted from 0 in each sample."""
    predict_T: Tensor
    """Input position whose logits predict each sampled token, sample after sample; the position for the first token is
    the prompt's last, shared by siblings."""
    target_T: Tensor
    """The sampled tokens they predict."""
    token_T: Tensor
    """Index of each target among all sampled tokens of the batch, in the batch's own order."""
    sample_T: Tensor
    """Index of the sample, among the B, to which each target belongs."""
    buckets: tuple[Tensor, ...]
    """Attention layout: each ``[S, L]`` block lists, for S samples of similar length, the input positions of prompt and
    response. A shorter one repeats its last position to the right, where causal attention cannot look."""
    unpad_N: Tensor
    """Index of each input position in the flattened, concatenated blocks."""
    kept: KeptSets | None = None
    """Kept sets of the targets, unless all were drawn from the whole vocabulary."""
    routes: RowRoutes | None = None
    """Routes of the positions that predict, if they are replayed."""
    share: RowShare | None = None
    """This rank's part of the row, when several share it; the fields above describe the whole row."""


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Return bins of indices whose lengths sum to at most ``budget``; a longer item has a bin of its own.

    Longest first, each into the first bin with room (at most 11/9 of the optimal number of bins, plus one).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if lengths[index] <= free), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return tuple(tuple(b) for b in bins)


def length_buckets(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group indices of similar length, for attention blocks.

    A new block starts below 3/4 of the longest length minus 8 tokens, so that there are few blocks (each costs kernel
    launches) and at most about a quarter of the attention is spent on discarded positions.
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not buckets or lengths[index] < 0.75 * lengths[buckets[-1][0]] - 8:
            buckets.append([])
        buckets[-1].append(index)
    return tuple(tuple(b) for b in buckets)


def families(samples: Sequence[TrainingSample], members: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Group members with the same prompt and its routes, which a row holds once; a group is cut if it would exceed
    the ``budget``."""
    siblings: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[list[int]]] = {}
    for index in members:
        sample = samples[index]
        parts = siblings.setdefault((sample.prompt_ids, sample.routes[: len(sample.prompt_ids)]), [[]])
        if parts[-1] and num_positions(samples, (*parts[-1], index)) > budget:
            parts.append([])
        parts[-1].append(index)
    return tuple(tuple(part) for parts in siblings.values() for part in parts)


def pack(
    samples: Sequence[TrainingSample],
    budget: int,
    *,
    members: Sequence[int] | None = None,
    device: torch.device | None = None,
    shares_prompts: bool = True,
) -> tuple[PackedRow, ...]:
    """Pack all samples of a batch, or only its ``members``, into rows of at most ``budget`` input positions (a longer
    sample is a row of its own). Samples and tokens keep their indices in the batch. The rows are on the CPU unless a
    ``device`` is given. Without ``shares_prompts`` each sample has its prompt to itself, as padded models compute it.
    """
    chosen = range(len(samples)) if members is None else members
    parts = families(samples, chosen, budget) if shares_prompts else [(i,) for i in chosen]
    bins = first_fit_decreasing([num_positions(samples, part) for part in parts], budget)
    return rows_of(samples, [[parts[i] for i in b] for b in bins], device=device)


def rows_of(
    samples: Sequence[TrainingSample],
    rows: Sequence[Sequence[tuple[int, ...]]],
    *,
    device: torch.device | None = None,
) -> tuple[PackedRow, ...]:
    """Build rows, each of these families."""
    first_token_B = np.cumsum([0] + [s.num_sampled for s in samples])
    return tuple(_row(samples, parts, first_token_B, device) for parts in rows)


def shared(row: PackedRow, context: ContextGroup | None) -> PackedRow:
    """Return the row with this rank's share of it, if several ranks share rows."""
    if context is None:
        return row
    share = RowShare.of(
        context,
        input_ids_N=row.input_ids_N,
        position_ids_N=row.position_ids_N,
        predict_T=row.predict_T,
        target_T=row.target_T,
    )
    return replace(row, share=share)


def num_positions(samples: Sequence[TrainingSample], family: Sequence[int]) -> int:
    """Count the input positions of siblings that share their prompt; the last response token is not an input."""
    prompt, shared = len(samples[family[0]].prompt_ids), samples[family[0]].num_shared
    return shared + sum(prompt - shared + len(samples[i].response_ids) - 1 for i in family)


def _row(
    samples: Sequence[TrainingSample],
    parts: Sequence[tuple[int, ...]],
    first_token_B: Ints,
    device: torch.device | None,
) -> PackedRow:
    def put(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    input_ids: list[int] = []
    position_ids: list[Ints] = []
    lines: list[Ints] = []
    predict: list[Ints] = []
    for family in parts:
        prompt_ids, num_shared = samples[family[0]].prompt_ids, samples[family[0]].num_shared
        shared_P = np.arange(len(input_ids), len(input_ids) + num_shared)
        input_ids.extend(prompt_ids[:num_shared])
        position_ids.append(np.arange(num_shared))
        for index in family:
            fed_ids = prompt_ids[num_shared:] + samples[index].response_ids[:-1]
            line = np.concatenate([shared_P, np.arange(len(input_ids), len(input_ids) + len(fed_ids))])
            input_ids.extend(fed_ids)
            position_ids.append(np.arange(num_shared, len(line)))
            lines.append(line)
            predict.append(samples[index].sampled(line[len(prompt_ids) - 1 :]))
    members = tuple(i for family in parts for i in family)
    buckets, unpad_N = _attention_layout(lines, len(input_ids))
    answers = [samples[i].num_sampled for i in members]
    targets = [samples[i].sampled(np.array(samples[i].response_ids, dtype=np.int64)) for i in members]
    tokens = [first_token_B[i] + np.array(samples[i].places or range(samples[i].num_sampled)) for i in members]
    kept = [k for i, n in zip(members, answers, strict=True) for k in samples[i].kept or (b"",) * n]
    return PackedRow(
        samples_B=members,
        input_ids_N=put(np.array(input_ids, dtype=np.int64)),
        position_ids_N=put(np.concatenate(position_ids)),
        predict_T=put(np.concatenate(predict)),
        target_T=put(np.concatenate(targets)),
        token_T=put(np.concatenate(tokens)),
        sample_T=put(np.repeat(np.arange(len(members)), answers)),
        buckets=tuple(map(put, buckets)),
        unpad_N=put(unpad_N),
        kept=KeptSets.of(kept, put) if any(kept) else None,
        routes=_routes([samples[i].routes[1:] for i in members], lines, len(input_ids), put),
    )


def _routes(
    routes: Sequence[Sequence[bytes]],
    lines: Sequence[Ints],
    num_positions: int,
    put: Callable[[NDArray[Any]], Tensor],
) -> RowRoutes | None:
    """Lay the routes of samples over the positions that predict their tokens, all but the first."""
    if not any(routes):
        return None
    width = max(len(route) for of_sample in routes for route in of_sample)
    bytes_NB, is_known_N = np.zeros((num_positions, width), dtype=np.uint8), np.zeros(num_positions, dtype=np.bool_)
    for of_sample, line in zip(routes, lines, strict=True):
        for route, place in zip(of_sample, line, strict=bool(of_sample)):
            if route:
                bytes_NB[place], is_known_N[place] = np.frombuffer(route, dtype=np.uint8), True
    return RowRoutes(bytes_NB=put(bytes_NB), is_known_N=put(is_known_N))


def _attention_layout(lines: Sequence[Ints], num_positions: int) -> tuple[tuple[Ints, ...], Ints]:
    unpad_N = np.empty(num_positions, dtype=np.int64)
    blocks: list[Ints] = []
    offset = 0
    for bucket in length_buckets([len(line) for line in lines]):
        width = len(lines[bucket[0]])
        block = np.empty((len(bucket), width), dtype=np.int64)
        for slot, line in enumerate(lines[i] for i in bucket):
            block[slot, : len(line)] = line
            block[slot, len(line) :] = line[-1]
            # All siblings attend alike over their prompt, so the last one provides its outputs.
            unpad_N[line] = offset + slot * width + np.arange(len(line))
        blocks.append(block)
        offset += block.size
    return tuple(blocks), unpad_N
