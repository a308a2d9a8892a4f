"""Turns a config into plain data, from which ``schema.build`` makes it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def resolved(config: Any, *, for_file: bool = False) -> dict[str, Any]:
    """Return a config with all its defaults as plain dicts, lists and scalars. Unset keys are ``None``, or for a file
    ``"none"`` if they have another default, which a file without the key would mean."""
    data = {}
    for field in dataclasses.fields(config):
        value = plain(getattr(config, field.name), for_file=for_file)
        has_default = (
            field.default not in (None, dataclasses.MISSING) or field.default_factory is not dataclasses.MISSING
        )
        data[field.name] = "none" if for_file and value is None and has_default else value
    return data


def plain(value: Any, *, for_file: bool = False) -> Any:
    """Return a value of a config in the form that ``resolved`` gives it."""
    if dataclasses.is_dataclass(value):
        return resolved(value, for_file=for_file)
    if isinstance(value, Mapping):
        return {key: plain(inner, for_file=for_file) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, for_file=for_file) for inner in value]
    return value
