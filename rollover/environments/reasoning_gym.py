"""Opens reasoning-gym datasets: endless rows, entries that survive JSON, and errors that say what to do.

Row r is item ``r % CHUNK`` of the dataset built with ``seed + (r - r % CHUNK)``. The library seeds item i
of a dataset with ``seed + i``, so for nearly all datasets this is item r of one endless dataset; the few
that draw their items when they are built (their ``size`` bounds the index) get a fresh draw per chunk.

The training seed and the evaluation seed lie in different halves of 32 bits and a role uses fewer than 2**30 rows, so
no generator is seeded alike for both. (A dataset of few distinct questions can still pose the same one twice.)

NOTE: a handful of datasets iterate over sets of strings (in 0.1.25: isomorphic_strings, knight_swap,
polynomial_multiplication, ransom_note); their items depend on PYTHONHASHSEED as well.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollover.errors import DataError, nearest

CHUNK = 1000
_OPEN_CHUNKS = 4
MAX_ROWS = 2**30


class GymDataset:
    """Generates and verifies the items of one reasoning-gym dataset under one configuration.

    Raises ``DataError`` for an unknown dataset, an unknown parameter or a value the library refuses.
    """

    def __init__(self, name: str, config: Mapping[str, Any], seed: int = 0) -> None:
        self.name = name
        self._chunk = lru_cache(maxsize=_OPEN_CHUNKS)(lambda n: _create(name, dict(config), seed + n * CHUNK))
        _check_parameters(name, config)
        self._chunk(0)

    def entry(self, row: int) -> dict[str, Any]:
        """Generate the item, with at least ``question``, ``answer`` and ``metadata``."""
        assert 0 <= row < MAX_ROWS
        try:
            return dict(self._chunk(row // CHUNK)[row % CHUNK])
        except Exception as error:  # generators raise errors of any type
            raise DataError(
                f"reasoning-gym dataset {self.name!r} could not generate item {row}: "
                f"{type(error).__name__}: {error}; change its config"
            ) from error

    def score(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        return float(self._chunk(0).score_answer(answer, dict(entry)))


def gym_seed(role: str, name: str, seed: int) -> int:
    """Choose where the rows of a source start: below 2**31 for training, at or above it for evaluation."""
    digest = hashlib.sha256(f"{role}/{name}/{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**30 + (2**31 if role == "eval" else 0)


def freeze(value: Any) -> Any:
    """Convert ``value`` to JSON values. Tuples, sets and mappings with keys other than strings are tagged: verifiers
    compare them, and JSON has none of them."""
    if isinstance(value, tuple):
        return {"__tuple__": [freeze(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"__set__": [freeze(item) for item in sorted(value, key=repr)]}
    if isinstance(value, list):
        return [freeze(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: freeze(item) for key, item in value.items()}
        return {"__mapping__": [[freeze(key), freeze(item)] for key, item in value.items()]}
    if isinstance(value, (str, int, float)) or value is None:
        return value
    raise DataError(f"a reasoning-gym entry holds a {type(value).__name__}, which cannot be stored as JSON")


def thaw(value: Any) -> Any:
    """Convert the result of ``freeze`` back."""
    if isinstance(value, list):
        return [thaw(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(thaw(item) for item in value["__tuple__"])
    if value.keys() == {"__set__"}:
        return {thaw(item) for item in value["__set__"]}
    if value.keys() == {"__mapping__"}:
        return {thaw(key): thaw(item) for key, item in value["__mapping__"]}
    return {key: thaw(item) for key, item in value.items()}


def _check_parameters(name: str, config: Mapping[str, Any]) -> None:
    import reasoning_gym  # noqa: F401  (its import fills the registry)
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no dataset {name!r}{nearest(name, DATASETS)}")
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in config:
        if key not in fields:
            hint = nearest(key, fields)
            known = "" if hint.startswith("; known") else f" (known: {', '.join(sorted(fields))})"
            raise DataError(f"reasoning-gym dataset {name!r} has no parameter {key!r}{hint}{known}")


def _create(name: str, config: dict[str, Any], seed: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, **config, seed=seed, size=CHUNK)
    except Exception as error:  # parameters are validated with assert, and constructors raise errors of any type
        raise DataError(
            f"reasoning-gym dataset {name!r} rejects its config {config}: {error or type(error).__name__}"
        ) from error
