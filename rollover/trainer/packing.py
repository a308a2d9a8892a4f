"""Which sequences share a forward pass, and where each token lies in it.

Pure: numbers in, numpy arrays out. Kept true: every response token of every sample appears in exactly one
row, rows hold no padding, and a sample is never split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One prompt and one response: what a forward pass sees of a trajectory."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise ValueError(
                f"a sample needs at least one prompt and one response token, "
                f"got {len(self.prompt_ids)} and {len(self.response_ids)}"
            )

    @property
    def num_inputs(self) -> int:
        """Tokens fed to the model: all but the last, which predicts nothing that trains."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """``B`` samples laid end to end: ``N`` input positions, of which ``T`` predict response tokens."""

    samples_B: tuple[int, ...]
    """Which samples, by their number in the batch."""
    input_ids_N: Ints
    position_ids_N: Ints
    """Counted from 0 in each sample."""
    predict_T: Ints
    """Input positions whose logits predict a response token, sample after sample."""
    target_T: Ints
    """The response tokens they predict."""
    token_T: Ints
    """Number of each target among all response tokens of the batch, counted in the batch's own order."""
    sample_T: Ints
    """Which of the B samples each target belongs to."""
    buckets: tuple[Ints, ...]
    """Attention layout: each ``[S, L]`` block lists the input positions of S samples of similar length; a
    shorter one repeats its last position to the right, where causal attention cannot look."""
    unpad_N: Ints
    """Where each input position stands in the flattened, concatenated blocks."""


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Bins of indices whose lengths sum to at most ``budget``; a longer one has a bin of its own.

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
    """Indices of similar length, for attention blocks.

    A new block starts below 3/4 of the longest, less 8 tokens: few blocks (each costs kernel launches) and at
    most about a quarter of the attention spent on positions that are thrown away.
    """
    buckets: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not buckets or lengths[index] < 0.75 * lengths[buckets[-1][0]] - 8:
            buckets.append([])
        buckets[-1].append(index)
    return tuple(tuple(b) for b in buckets)


def pack(
    samples: Sequence[TrainingSample], budget: int, *, members: Sequence[int] | None = None
) -> tuple[PackedRow, ...]:
    """Rows of at most ``budget`` input positions (a longer sample is a row of its own), of all samples of a
    batch or of ``members`` alone; samples and tokens keep their numbers in the batch."""
    chosen = range(len(samples)) if members is None else members
    first_token_B = np.cumsum([0] + [len(s.response_ids) for s in samples])
    bins = first_fit_decreasing([samples[i].num_inputs for i in chosen], budget)
    return tuple(_row(samples, tuple(chosen[j] for j in b), first_token_B) for b in bins)


def _row(samples: Sequence[TrainingSample], members: tuple[int, ...], first_token_B: Ints) -> PackedRow:
    parts = [samples[i] for i in members]
    lengths = np.array([s.num_inputs for s in parts])
    starts = np.cumsum(lengths) - lengths
    answers = [len(s.response_ids) for s in parts]
    prompts = [len(s.prompt_ids) for s in parts]
    buckets, unpad_N = _attention_layout(lengths, starts)
    return PackedRow(
        samples_B=members,
        input_ids_N=np.array(
            [t for s in parts for t in (*s.prompt_ids, *s.response_ids[:-1])], dtype=np.int64
        ),
        position_ids_N=_ranges([0] * len(parts), lengths),
        predict_T=_ranges(starts + np.array(prompts) - 1, answers),
        target_T=np.array([t for s in parts for t in s.response_ids], dtype=np.int64),
        token_T=_ranges([first_token_B[i] for i in members], answers),
        sample_T=np.repeat(np.arange(len(parts), dtype=np.int64), answers),
        buckets=buckets,
        unpad_N=unpad_N,
    )


def _attention_layout(lengths: Ints, starts: Ints) -> tuple[tuple[Ints, ...], Ints]:
    unpad_N = np.empty(int(lengths.sum()), dtype=np.int64)
    blocks: list[Ints] = []
    offset = 0
    for bucket in length_buckets(lengths.tolist()):
        members = np.array(bucket)
        columns = np.arange(int(lengths[members[0]]))
        blocks.append(starts[members, None] + np.minimum(columns, lengths[members, None] - 1))
        real = columns < lengths[members, None]
        unpad_N[blocks[-1][real]] = offset + np.flatnonzero(real)
        offset += real.size
    return tuple(blocks), unpad_N


def _ranges(starts: Sequence[int] | Ints, lengths: Sequence[int] | Ints) -> Ints:
    """``[s, s + 1, ..., s + n - 1]`` for each start and length, concatenated."""
    return np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in zip(starts, lengths, strict=True)])
