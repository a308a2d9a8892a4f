"""Declares which settings may change when a run is resumed. Each setting says so in its type::

    stall_timeout_s: Changeable[float] = 600.0       what is learned does not depend on it
    micro_batch_tokens: Inexact[int] = 8192          nor on this, but for rounding and the order of events
    group_size: int = 8                              everything else stays as it was

A table can say it for all its keys; the declaration of a key takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")

Refusal = Callable[[Any, Any], str | None]
"""A function of the run's config and the one wanted on resume: the reason why the setting must not change, or
``None``."""


@dataclass(frozen=True)
class OnResume:
    """Says, inside ``Annotated``, whether a setting may change when a run is resumed."""

    refusal: Refusal
    note: str
    """The conditions under which it may change, in words for the documentation."""


def _never(before: Any, after: Any) -> str | None:
    return "what the run has learned depends on it"


def _inexact(before: Any, after: Any) -> str | None:
    return "deterministic = true promises identical results, and they depend on it" if after.deterministic else None


FIXED = OnResume(_never, "")
"""The declaration of every setting that says nothing."""

Fixed = Annotated[T, FIXED]
Changeable = Annotated[T, OnResume(lambda before, after: None, "may change on resume")]
Inexact = Annotated[T, OnResume(_inexact, "may change on resume, unless `deterministic = true`")]


def said_by(annotation: Any) -> OnResume | None:
    """Return the declaration in the type of a key or table; ``None`` if it has none."""
    return next((part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, OnResume)), None)
