"""Measurements of a calibration. Seconds are medians over repetitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One decoding iteration.

    Example: ``Decode(batch=8, context=256.0, seconds=0.021, held_out=False)``.
    """

    batch: int
    context: float
    """Mean number of cached tokens per sample."""
    seconds: float
    held_out: bool
    """True if the point is only predicted, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt.

    Example: ``Prefill(tokens=512, seconds=0.11, held_out=False)``.
    """

    tokens: int
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step over sequences of equal length.

    Example: ``Step(sequences=8, prompt_tokens=128, response_tokens=128, seconds=1.4, held_out=True)`` trains 2,048
    tokens.
    """

    sequences: int
    prompt_tokens: int
    response_tokens: int
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one machine with one model.

    Example: an engine in bf16 has ``weight_bytes=2, kv_bytes=2``; a point of ``decodes`` is
    ``Decode(batch=8, context=256.0, seconds=0.021, held_out=False)``.
    """

    title: str
    """The device's name, as its driver reports it."""
    model: Mapping[str, Any]
    """The ``config.json`` of the measured model."""
    weight_bytes: float
    """Bytes per parameter in the engine."""
    kv_bytes: float
    """Bytes per cached scalar."""
    memory_bytes: float
    flops: float
    """FLOP/s of the largest product of two matrices, in the engine's number format."""
    copy_bytes_per_s: float
    """Bytes read and written per second by a copy within the device's memory."""
    link_bytes_per_s: float
    """The link, one way, to another device of this machine, or to the host if there is none."""
    link_latency_s: float
    decodes: tuple[Decode, ...]
    prefills: tuple[Prefill, ...]
    steps: tuple[Step, ...]
