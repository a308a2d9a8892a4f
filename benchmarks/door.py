"""What the door for agents' programs costs: processor time of a request, a thousand connections, memory of a program.

    OMP_NUM_THREADS=1 python benchmarks/door.py --out benchmarks/results/door-DATE.json   # a minute

The baseline is an echo: a starlette application under the same uvicorn, which reads the request and returns a chat
completion of the same size. Client and server share one process and one event loop, so processor time is that of both.
Measured are requests one after another, whose replies are there at once, with `httpx` and with the `openai` client;
`--connections` requests that wait side by side before all are answered; and the memory of programs that wait for their
reply, which is the proportional set size of their processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from engine import machine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollover.environments.episodes import AgentConfig
from rollover.environments.episodes.actor import EpisodeActor
from rollover.environments.episodes.agents import SourceEnvironment
from rollover.environments.episodes.conversation import ChatReply, ChatRequest
from rollover.environments.episodes.door import Door
from rollover.environments.episodes.guest import Asked, Guest, Said
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory

TEXT = "12 + 34 = 46, and 46 - 5 = 41. " * 8
"""A message, and a reply."""
ASKED: list[Any] = [{"role": "user", "content": TEXT}]
PROGRAMS = {
    "plain": (
        "import http.client, json, os, urllib.parse as p\n"
        "u = p.urlsplit(os.environ['OPENAI_BASE_URL'])\n"
        "c = http.client.HTTPConnection(u.hostname, u.port)\n"
        "c.request('POST', u.path + '/chat/completions', json.dumps({'messages': [{'role': 'user', 'content': 'a'}]}),"
        " {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
        "c.getresponse().read()\n"
    ),
    "httpx": (
        "import os, httpx\n"
        "httpx.post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', timeout=600,"
        " headers={'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']},"
        " json={'messages': [{'role': 'user', 'content': 'a'}]})\n"
    ),
    "openai": (
        "import openai\n"
        "openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'a'}])\n"
    ),
}


def answer(guest: Guest, asked: Asked) -> None:
    guest.take(asked, 1)
    guest.answer(1, lambda request: ChatReply(1, TEXT, (), 100, 100), last_id=0)


async def next_request(guest: Guest) -> None:
    while not guest.waiting:
        guest.changed.clear()
        await guest.changed.wait()


class Answering(Guest):
    """A guest that is answered at once, and whose conversation begins anew each time."""

    async def ask(self, request: ChatRequest, *, is_retry: bool) -> Asked:
        self.said, self.turns = {0: Said([], ())}, {}
        asked = await Guest.ask(self, request, is_retry=is_retry)
        asyncio.get_running_loop().call_soon(answer, self, asked)
        return asked


@asynccontextmanager
async def echo(until: asyncio.Event) -> AsyncIterator[tuple[str, str]]:
    """Serve the baseline. A request for the route ``parked`` is answered after ``until``."""

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        if body.get("user") == "parked":
            await until.wait()
        message = {"role": "assistant", "content": body["messages"][0]["content"]}
        return JSONResponse(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
            | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        )

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off", backlog=2048)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", "key"
    server.should_exit = True
    await serving


@asynccontextmanager
async def at_door() -> AsyncIterator[tuple[str, str]]:
    door = Door()
    yield door.url, door.let_in(Answering())
    await door.close()


Ask = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def with_httpx(url: str, key: str) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        yield lambda: client.post("/chat/completions", json={"model": "m", "messages": ASKED})


@asynccontextmanager
async def with_openai(url: str, key: str) -> AsyncIterator[Ask]:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        yield lambda: client.chat.completions.create(model="m", messages=ASKED)


async def cpu_ms(ask: Ask, num_requests: int) -> float:
    """Return the processor time of a request of client and server, after some that warm both up."""
    for _ in range(num_requests // 10):
        await ask()
    before_s = time.process_time()
    for _ in range(num_requests):
        await ask()
    return 1e3 * (time.process_time() - before_s) / num_requests


async def requests(num_requests: int, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, opened in (("httpx", with_httpx), ("openai", with_openai)):
        pairs = []
        for _ in range(repeats):  # both servers in turn, since the machine may be busy
            pair = []
            for server in (at_door(), echo(asyncio.Event())):
                async with server as (url, key), opened(url, key) as ask:
                    pair.append(await cpu_ms(ask, num_requests))
            pairs.append(pair)
        door, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
        found[name] = {"door_ms": door, "echo_ms": bare, "ratio": door / bare, "all_ms": pairs}
    return found


async def post(url: str, key: str) -> None:
    port, body = int(url.split(":")[2].split("/")[0]), json.dumps({"messages": ASKED, "user": "parked"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2].partition(b"{")[2].join([b"{", b""]))
    assert found["choices"][0]["message"]["content"] == TEXT
    writer.close()


def resident_kib() -> int:
    return int(next(s.split()[1] for s in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in s))


async def connections(number: int) -> dict[str, Any]:
    """Let requests wait side by side at the door, and at the echo."""
    door, guests, before = Door(), [Guest() for _ in range(number)], resident_kib()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    posts = [asyncio.create_task(post(door.url, door.let_in(guest))) for guest in guests]
    for guest in guests:
        await next_request(guest)
    parked_kib = (resident_kib() - before) / number
    for guest in guests:
        answer(guest, guest.waiting[0])
    await asyncio.gather(*posts)
    found = {"number": number, "wall_s": time.perf_counter() - start_s, "kib_each": parked_kib}
    found["door_ms"] = 1e3 * (time.process_time() - cpu_s) / number
    await door.close()
    until = asyncio.Event()
    async with echo(until) as (url, key):
        cpu_s = time.process_time()
        posts = [asyncio.create_task(post(url, key)) for _ in range(number)]
        await asyncio.sleep(found["wall_s"] / 2)
        until.set()
        await asyncio.gather(*posts)
        found["echo_ms"] = 1e3 * (time.process_time() - cpu_s) / number
    return found | {"ratio": found["door_ms"] / found["echo_ms"]}


class Letters:
    """A tokenizer and a writer of one token per character."""

    def begin(self, messages: Any, tools: Any, columns: Any) -> tuple[int, ...]:
        return tuple(map(ord, messages[0]["content"]))


def descendants() -> set[int]:
    """Return the processes that this one has started, and that those have started."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, more = set[int](), {int(Path("/proc/self").resolve().name)}
    while more:
        more = {child for child, parent in parents.items() if parent in more} - found
        found |= more
    return found


def mean_mib(processes: Iterable[int], number: int) -> float:
    """Return the memory of processes for each of ``number`` programs, without what they share with others."""
    lines = [line for i in processes for line in Path(f"/proc/{i}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024 / number


async def programs(number: int) -> dict[str, Any]:
    """Start programs that wait for their first reply, and return the memory of each with its keeper."""
    letters: Any = Letters()
    found: dict[str, Any] = {"number": number}
    for name, text in PROGRAMS.items():
        config = AgentConfig(command=(sys.executable, "-c", text), turn_timeout_s=300.0)
        actor = EpisodeActor({"s": SourceEnvironment(config, letters, 500)}, letters)
        prompt = Prompt(prompt_id="s/0@0", token_ids=(), text="", source="s", columns={})
        asks = Segment(0, (), (), FinishReason.TURN, 0, 0.0, 0.0)
        acting = (
            actor.act(Trajectory(sample_id=SampleId(0, index), prompt=prompt, segments=(asks,)), 0.0)
            for index in range(number)
        )
        await asyncio.gather(*acting)
        found[f"{name}_mib"] = mean_mib(descendants(), number)
        await actor.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record: dict[str, Any] = {"command": sys.argv, "date": str(date.today()), "machine": machine()}
    record["requests"] = asyncio.run(requests(options.requests, options.repeats))
    record["connections"] = asyncio.run(connections(options.connections))
    record["programs"] = asyncio.run(programs(options.programs))
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for client, row in record["requests"].items():
        print(f"{client}: {row['door_ms']:.2f} ms a request, the echo {row['echo_ms']:.2f}: {row['ratio']:.2f} of it")
    row = record["connections"]
    print(f"{row['number']} connections: {row['door_ms']:.2f} ms each, {row['ratio']:.2f} of the echo's")
    print(f"while they wait: {row['kib_each']:.0f} KiB each; all answered after {row['wall_s']:.1f} s")
    print("programs: " + ", ".join(f"{key} {value:.1f}" for key, value in record["programs"].items()))


if __name__ == "__main__":
    main()
