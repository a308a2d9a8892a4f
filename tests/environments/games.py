"""Tools and environments for tests."""

from __future__ import annotations

import asyncio
import os
import random
import re  # noqa: F401  (so that what is given may use it)
import signal
import sys  # noqa: F401
import time
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import numpy as np

from rollover.environments.episodes.base import Action


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Way(Enum):
    UP = "up"
    DOWN = "down"


def move(by: int, way: Way = Way.UP, speed: float = 1, at: dict[str, list[int] | None] | None = None, word: str = None):  # noqa: RUF013
    return f"{by!r} {way.name} {speed!r} {at} {word!r}"


def unexplained(x: int) -> int:
    return x


def plus(text: str) -> list[Any]:
    left, _, right = text.partition("+")
    return [("add", {"a": int(left), "b": int(right)})] if right else []


LOOPS = set[asyncio.AbstractEventLoop]()


async def loops() -> int:
    """Count the event loops in which this was called."""
    LOOPS.add(asyncio.get_running_loop())
    return len(LOOPS)


def add_otherwise(a: int, b: int) -> int:
    """Add.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


plus_one = partial(add_otherwise, b=1)
sum_up = add_otherwise


class OffersNothing:
    @staticmethod
    def offered_tools() -> list[Any]:
        raise KeyError("no config")


@dataclass
class Point:
    x: float


class Bare:
    pass


def give(what: str) -> Any:
    """Return a value, unless to compute it raises, hangs or ends the process.

    Args:
        what: the value, as Python
    """
    return eval(what)


async def blocks() -> None:
    time.sleep(3600)


def by_position(a: int, /) -> int:
    return a


def many(*a: int) -> int:
    return len(a)


async def yielding() -> Any:
    yield 1


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
        return f"{action.text}{random.random()} {np.random.random()}"


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


class Guessing:
    """An environment in the manner of TRL."""

    def reset(self, number: int, **columns: Any) -> str:
        self.number, self.tries = number, 0
        return " Guess a number up to 10."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: the guess
        """
        self.tries += 1
        return "higher" if number < self.number else "right"

    def get_reward(self) -> float:
        return self.tries / 2

    def _peek(self) -> int:
        return self.number


class Session:
    """Numbers its turns, and draws; it can be taken up where it was."""

    log: ClassVar[list[str]] = []

    def reset(self, row: Any, seed: int) -> None:
        self.log.append("reset")
        self.turns = 0

    def step(self, action: Action) -> str:
        self.log.append(f"step {action.turn}")
        self.turns += 1
        return f"{self.turns}, {random.random()}"

    def snapshot(self) -> Any:
        return {"turns": self.turns}

    def restore(self, state: Any) -> None:
        self.log.append("restore")
        self.turns = state["turns"]

    def close(self) -> None:
        self.log.append("close")


class Unsaved(Session):
    def snapshot(self) -> Any:
        return {1} if self.turns == 1 else "x" * 1_000_001
