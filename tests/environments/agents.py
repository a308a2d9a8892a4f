"""Agents of tests: functions that call the model over HTTP, as programs do."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

Row = Mapping[str, Any]


class Reply(NamedTuple):
    status: int
    content: Any


def begun(route: str, content: Any) -> http.client.HTTPResponse:
    """Without a library: each episode is a process, and to import httpx takes longer than all that most of them do."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
    connection.request("POST", url.path + route, json.dumps(content), head)
    return connection.getresponse()


def post(route: str, content: Any) -> Reply:
    response = begun(route, content)
    return Reply(response.status, json.loads(response.read()))


def ask(messages: list[Any]) -> Reply:
    return post("/chat/completions", {"model": "m", "messages": messages})


def counts(row: Row) -> None:
    """Asks until it is refused or has asked often enough, with what it was told, and earns as many points."""
    messages = [{"role": "user", "content": f"start {row['start']}"}]
    for number in range(row.get("turns", 3)):
        response = ask(messages)
        if response.status == 400:
            break
        said = response.content["choices"][0]["message"]
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


def explains(row: Row) -> None:
    sys.exit("no API key")


def hoards(row: Row) -> None:
    counts(row | {"turns": 1})
    bytearray(2**31)


def corrects(row: Row) -> None:
    """Asks what cannot be written out, and then what the refusal says."""
    said = ask([{"role": "user", "content": None}])
    assert said.status == 400
    ask([{"role": "user", "content": said.content["error"]["message"]}])


def branches(row: Row) -> None:
    """Asks for two alternatives at once, goes on from the second, and with an edited one; then begins anew."""
    first = {"role": "user", "content": "plan"}
    with ThreadPoolExecutor() as pool:
        plans = [response.content for response in pool.map(ask, [[first]] * 2)]
    said = max((plan["choices"][0]["message"] for plan in plans), key=lambda plan: plan["content"])
    ask([first, said, {"role": "user", "content": "go"}])
    ask([first, {**said, "content": "EDITED"}, {"role": "user", "content": "go"}])
    ask([{"role": "user", "content": f"in short: {said['content']}"}])
    post("/reward", {"reward": 1.0})


def delegates(row: Row) -> None:
    """Has two others work at the same time, and reports what they have said."""
    parts = [[{"role": "user", "content": f"part {number}"}] for number in range(2)]
    question = [{"role": "user", "content": "whole"}]
    plan = ask(question).content["choices"][0]["message"]
    with ThreadPoolExecutor() as pool:
        said = [response.content["choices"][0]["message"]["content"] for response in pool.map(ask, parts)]
    ask([*question, plan, {"role": "user", "content": " ".join(said)}])


def gives_up(row: Row) -> None:
    """Posts a reward, and ends without the reply to its request."""
    post("/reward", {"reward": 1.0})
    begun("/chat/completions", {"messages": [{"role": "user", "content": "a"}]})  # while the reply is awaited


def forks(row: Row) -> None:
    """Starts a program that outlives it, unless it is killed too."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    ask([{"role": "user", "content": str(process.pid)}])
