"""Reward functions as a user might write them, good and bad."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache, partial
from typing import Any


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def narrow(completions: list[str], label: list[str], bonus: float = 0.0) -> list[float]:
    return [bonus + (label[0] in completions[0])]


async def awaited(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.25]


async def awaited_forever(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    await asyncio.Event().wait()
    raise AssertionError


def runs_a_loop(completions: list[str], **columns: Any) -> list[float]:
    return asyncio.run(awaited([], completions))


class Judge:
    async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return await awaited([], completions)


judge = Judge()


def yields(completions: list[str], **columns: Any) -> Iterator[float]:
    yield from map(float, map(len, completions))


class Yielding:
    async def __call__(self, completions: list[str], **columns: Any) -> AsyncIterator[float]:
        yield 1.0


yielding = Yielding()
partly_yields = partial(yields, level=1)
partly_awaited = partial(awaited, level=1)
remembered = lru_cache(length)
partly_remembered = partial(remembered, level=1)


def conversation(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
    assert prompts == [[{"role": "user", "content": "hi"}]] and "messages" not in columns
    assert completions == [[{"role": "assistant", "content": "yo"}]]
    return [float(sum(completion_ids[0]))]


def hangs(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    while completions[0] == "hang":
        pass
    print("a reward function may print")
    return [1.0]


def once_bad(prompts: list[str], completions: list[str], path: list[str], **columns: Any) -> list[float]:
    """Fails on its first call, told by a file."""
    if not os.path.exists(path[0]):
        open(path[0], "w").close()
        raise RuntimeError("first time")
    return [1.0]


def wants_more(prompts: list[str], completions: list[str], rubric: list[str]) -> list[float]:
    return [0.0]


def by_position(prompts: list[str], completions: list[str], /) -> list[float]:
    return [0.0]


async def evaluated(prompts: list[str], completions: list[str], **columns: Any) -> Any:
    """Returns what the response says."""
    return eval(completions[0], {})


def ranked(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    """The place of each response in its group by length, from 0 to 1; an empty one has none."""
    lengths = sorted(map(len, completions))
    return [lengths.index(len(one)) / max(1, len(lengths) - 1) if one else None for one in completions]


def of_a_conversation(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    assert [turn["role"] for turn in prompts[0]] == ["system", "user"]
    assert completions == [[{"role": "assistant", "content": "x"}]]
    return [float(answer[0].rpartition("#### ")[2])]


def raises_anything(completions: list[str], **columns: Any) -> list[float]:
    raise {kind.__name__: kind for kind in ODD_ERRORS}[completions[0]]("by the function")


async def raises_anything_async(completions: list[str], **columns: Any) -> list[float]:
    return raises_anything(completions)


class Nameless(BaseException):
    """Cannot be told in words."""

    def __str__(self) -> str:
        raise RuntimeError


ODD_ERRORS = (
    KeyError, TimeoutError, KeyboardInterrupt, GeneratorExit, SystemExit, asyncio.CancelledError, BaseException, Nameless,
)  # fmt: skip


def titled(prompts: list[str], completions: list[str], title: list[str], body: list[str], **_: Any) -> list[float]:
    return [float(len(title[0]) + len(body[0]))]


def parsed(reply: str) -> float:
    return float(reply.strip("!"))


def spelled(reply: str) -> str:
    return reply


def counted(reply: str) -> float:
    return len(reply)
