"""Agents of tests: functions that call the model over HTTP, as programs do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx

Row = Mapping[str, Any]


def post(route: str, content: Any) -> httpx.Response:
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    return httpx.post(os.environ["OPENAI_BASE_URL"] + route, json=content, headers=key, timeout=60)


def ask(messages: list[Any]) -> httpx.Response:
    return post("/chat/completions", {"model": "m", "messages": messages})


def counts(row: Row) -> None:
    """Asks until it is refused or has asked often enough, with what it was told, and earns as many points."""
    messages = [{"role": "user", "content": f"start {row['start']}"}]
    for number in range(row.get("turns", 3)):
        response = ask(messages)
        if response.status_code == 400:
            break
        said = response.json()["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"{number}:{said['content']}"}]
        post("/reward", {"reward": number + 1.0})


async def waits(row: Row) -> None:
    counts(row | {"turns": 1})
    time.sleep(3600)


def never_asks(row: Row) -> None:
    time.sleep(3600)


def leaves(row: Row) -> None:
    """Ends at once."""


def asks_once(row: Row) -> None:
    ask([{"role": "user", "content": "a"}])


def fails(row: Row) -> None:
    counts(row | {"turns": 1})
    sys.exit(3)


def forgets(row: Row) -> None:
    """Asks a second time without what was said."""
    for _ in range(2):
        ask([{"role": "user", "content": "a"}])


def differs(row: Row) -> None:
    ask([{"role": "user", "content": os.urandom(4).hex()}])


def forks(row: Row) -> None:
    """Starts a program that outlives it, unless it is killed too."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    ask([{"role": "user", "content": str(process.pid)}])
