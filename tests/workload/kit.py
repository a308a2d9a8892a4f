"""Traces and samples to test with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollover.workload.base import Workload
from rollover.workload.law import LengthLaw
from rollover.workload.trace import Trace, TracePrompt

LAW = LengthLaw(median_tokens=2000, sigma=0.8, icc=0.5, loop_probability=0.03, cap_tokens=8192, min_tokens=64)


def lengths_of(workload: Workload, num_prompts: int, group_size: int = 8, first: int = 0) -> NDArray[np.int64]:
    """(prompts, samples)"""
    return np.array([workload.group_lengths(i, group_size) for i in range(first, first + num_prompts)])


def drawn(law: LengthLaw, num_prompts: int, group_size: int = 8, seed: int = 1) -> Trace:
    """A trace drawn from the law."""
    rows = lengths_of(law.workload(seed), num_prompts, group_size).tolist()
    prompts = tuple(
        TracePrompt(prompt_id=f"p{i}", prompt_tokens=100 + i % 3, lengths=tuple(row)) for i, row in enumerate(rows)
    )
    return Trace(name="drawn", cap_tokens=law.cap_tokens, prompts=prompts)


def standard_error(values_PS: NDArray[Any]) -> float:
    """Of the mean over all samples when siblings are alike: from the spread of the prompts' means."""
    return float(values_PS.mean(axis=1).std(ddof=1) / np.sqrt(len(values_PS)))
