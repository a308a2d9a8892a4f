"""Tools and environments for tests."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

from rollover.environments.episodes.base import Action


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "waited"


def fail() -> float:
    """Fail."""
    return 1 / 0


def unexplained(x: int) -> int:
    return x


def leave(code: int) -> None:
    """End the process.

    Args:
        code: its exit code
    """
    os._exit(code)


def stop_here() -> None:
    """Raise SystemExit."""
    sys.exit(3)


def plus(text: str) -> list[Any]:
    left, _, right = text.partition("+")
    return [("add", {"a": int(left), "b": int(right)})] if right else []


class Says:
    """Returns what the turn says, as Python."""

    def reset(self, row: Any, seed: int) -> None:
        pass

    def step(self, action: Action) -> Any:
        return eval(action.text)


class Dice:
    def reset(self, row: Any, seed: int) -> None:
        random.random()

    async def step(self, action: Action) -> str:
        return f"{action.text}{random.random()}"


class Opens:
    """Returns what the row says, as Python, and counts turns."""

    def reset(self, row: Any, seed: int) -> Any:
        self.turns = 0
        return eval(row["opening"])

    def step(self, action: Action) -> str:
        self.turns += 1
        return f"{self.turns}"


class Counter:
    def reset(self, row: Any, seed: int) -> None:
        self.number = row["start"]

    def step(self, action: Action) -> dict[str, Any]:
        if action.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self.number += int(action.text)
        return {"messages": str(self.number), "reward": float(action.text)}


class NoStep:
    def reset(self, row: Any, seed: int) -> None:
        pass
