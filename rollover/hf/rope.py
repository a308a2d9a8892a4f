"""The angles by which a decoder rotates queries and keys (Su et al., arXiv 2104.09864), from ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from rollover.errors import ModelError

_KINDS = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """Rotary angles per position of a head's pairs of numbers, and the factor that rotated pairs are multiplied by."""

    inv_freq: tuple[float, ...]
    """One for each of ``head_dim / 2`` pairs; 0 for a pair that is not rotated, which come last."""
    scale: float


def read_rope(config: Mapping[str, Any], head_dim: int, *, partial: bool) -> Rope:
    """Read the angles, scaled as the config asks. Raises ``ModelError`` for a kind that is not supported.

    Args:
        partial: the model can rotate the first numbers of a head alone.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rotary frequencies that differ from layer to layer are not supported")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    size = int(head_dim * share)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    plain = tuple(theta ** (-2 * i / size) for i in range(size // 2))
    inv_freq, scale = _scaled(plain, theta, size, rope, config)
    if not all(0 < frequency < math.inf for frequency in inv_freq):
        raise ModelError("rotary frequencies must be above 0: is rope_theta right?")
    return Rope(inv_freq + (0.0,) * (head_dim // 2 - len(inv_freq)), scale)


def _scaled(
    plain: tuple[float, ...], theta: float, size: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> Rope:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    key = "original_max_position_embeddings"
    context = config.get(key) or rope.get(key) or config["max_position_embeddings"]
    if kind == "default":
        return Rope(plain, 1.0)
    if kind == "linear":
        return Rope(tuple(f / rope["factor"] for f in plain), 1.0)
    if kind == "llama3":
        return Rope(tuple(_llama3(f, rope, context) for f in plain), 1.0)
    if kind == "yarn":
        factor = rope.get("factor") or config["max_position_embeddings"] / context
        first, last = _yarn_ramp(theta, size, rope, context)
        slowed = (min(1.0, max(0.0, (i - first) / (last - first))) for i in range(size // 2))
        return Rope(
            tuple(f * (1 - s) + f / factor * s for f, s in zip(plain, slowed, strict=True)), _yarn_scale(rope, factor)
        )
    raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(map(repr, _KINDS))}")


def _llama3(frequency: float, rope: Mapping[str, Any], context: int) -> float:
    """Scale a rotary frequency as Llama 3.1 does: long wavelengths are slowed by ``factor``, short ones kept, and those
    between interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequency / (2 * math.pi)
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - keep) * frequency / rope["factor"] + keep * frequency


def _yarn_ramp(theta: float, size: int, rope: Mapping[str, Any], context: int) -> tuple[float, float]:
    """Return the pair from which on frequencies are slowed, and the one from which on entirely (Peng et al., arXiv
    2309.00071)."""
    first, last = (
        size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return first, last + 0.001 * (first == last)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of rotated pairs, which makes up for longer contexts (the same paper)."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if (one := rope.get("mscale")) and (all_dims := rope.get("mscale_all_dim")):
        return of(one) / of(all_dims)
    return of(1.0)
