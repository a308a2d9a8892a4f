"""Checks the arguments of a call against the annotations of the tool, from which its description is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError


def fitted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in the types that ``function`` wants. What pydantic converts may stand for a
    value, and a text for the value that it is the JSON of; an integer is a float already.

    Example: for ``def add(a: int, b: int)``, ``{"a": "3", "b": 4.0}`` becomes ``{"a": 3, "b": 4}``.

    Raises:
        TypeError: an argument has another type, which the message says to the model.
    """
    wanted = (_adapters if isinstance(function, Hashable) else _adapters.__wrapped__)(function)
    return {name: _fit(name, value, wanted[name]) if name in wanted else value for name, value in arguments.items()}


def _fit(name: str, value: Any, wanted: TypeAdapter[Any]) -> Any:
    try:
        fit = wanted.validate_python(value)
        return value if fit == value and isinstance(value, int) and isinstance(fit, float) else fit
    except ValidationError as error:
        if isinstance(value, str):
            with suppress(ValidationError):
                return wanted.validate_json(value)
        errors = error.errors(include_url=False, include_context=False)
        why = " or ".join(dict.fromkeys(f"{found['msg']}, got {found['input']!r:.80}" for found in errors[:4]))
        raise TypeError(f"argument {name!r}: {why}") from None


@lru_cache(maxsize=1024)
def _adapters(function: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    """Return what checks each argument, if its annotation is a type that pydantic knows."""
    found = {}
    with suppress(Exception):  # Python knows no parameters, or cannot evaluate their annotations
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            annotation: Any = Any if parameter.annotation is parameter.empty else parameter.annotation
            with suppress(Exception):
                wanted = TypeAdapter(annotation | None if parameter.default is None else annotation)
                if wanted.pydantic_complete:
                    found[name] = wanted
    return found
