"""Agents that know nothing but their client: functions of one or two questions, as people write them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
ASKED = [{"role": "user", "content": "1 + 2?"}]


def more(text: str) -> list[Any]:
    return [*ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]


def in_turn(row: Row) -> None:
    from openai import OpenAI

    client = OpenAI(timeout=row["timeout_s"])
    assert [model.id for model in client.models.list()] == ["rollover"]
    first = client.chat.completions.create(model="rollover", messages=ASKED, temperature=0.3)
    text = first.choices[0].message.content
    assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens == len(text)
    client.chat.completions.create(model="rollover", messages=more(text))


def awaited(row: Row) -> None:
    from openai import AsyncOpenAI

    async def talk() -> None:
        async with AsyncOpenAI(timeout=row["timeout_s"]) as client:
            first = await client.chat.completions.create(model="rollover", messages=ASKED)
            await client.chat.completions.create(model="rollover", messages=more(first.choices[0].message.content))

    asyncio.run(talk())


def streamed(row: Row) -> None:
    from openai import OpenAI

    client = OpenAI(timeout=row["timeout_s"])
    pieces = client.chat.completions.create(model="rollover", messages=ASKED, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    for _ in client.chat.completions.create(model="rollover", messages=more(text), stream=True):
        pass
