"""Turns a config into plain data, from which ``schema.build`` makes it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def resolved(config: Any) -> dict[str, Any]:
    """Return a config with all its defaults as plain dicts, lists and scalars; unset keys are ``None``."""
    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def plain(value: Any) -> Any:
    """Return a value of a config in the form that ``resolved`` gives it."""
    if dataclasses.is_dataclass(value):
        return resolved(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
