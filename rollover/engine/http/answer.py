"""What a server's JSON answer holds, checked as it is read."""

from __future__ import annotations

from typing import Any

from rollover.errors import EngineError


def field_of(answer: Any, key: str, kind: type) -> Any:
    """``answer[key]``. Raises ``EngineError`` where it is missing or of another type."""
    value = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise EngineError(f"expected {key!r} in the server's answer, got {str(answer)[:120]}")
    return value
