"""A module that a second process cannot import."""

from __future__ import annotations

import os
from typing import Any

if "NOT_TO_BE_IMPORTED" in os.environ:
    raise RuntimeError("once was enough")


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0]
