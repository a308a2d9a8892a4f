"""A server that judges as its script says, well or badly, on the event loop of a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Script = Callable[[dict[str, Any]], Any]
"""Returns for a request body the reply (a text), or ``Answer``, or what awaiting gives one."""


class Answer:
    def __init__(self, status: int = 200, body: bytes = b"", *, headers: str = "", cut: bool = False) -> None:
        self.status, self.body, self.headers, self.cut = status, body, headers, cut


def completion(text: Any, finish_reason: str = "stop") -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    return Answer(body=json.dumps({"choices": [choice], "usage": usage}).encode())


class JudgeServer:
    """Example: ``async with judge_server(lambda body: "Score: 0.5") as server: ... server.url``"""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.num_open = self.most_open = 0
        self.url = ""
        self.tasks = set[asyncio.Task[None]]()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.ensure_future(self.serve(reader, writer)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._head(reader):
                length = next(
                    line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length:")
                )
                body = json.loads(await reader.readexactly(int(length)))
                self.requests.append(body)
                self.headers.append(head)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    found = self.script(body)
                    answer = await found if isinstance(found, Awaitable) else found
                finally:
                    self.num_open -= 1
                if not isinstance(answer, Answer):
                    answer = completion(answer)
                claimed = len(answer.body) + (10 if answer.cut else 0)
                lines = f"HTTP/1.1 {answer.status} X\r\nContent-Type: application/json\r\nContent-Length: {claimed}\r\n"
                writer.write(f"{lines}{answer.headers}\r\n".encode() + answer.body)
                await writer.drain()
                if answer.cut:
                    return
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> str:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return ""


@asynccontextmanager
async def judge_server(script: Script) -> AsyncIterator[JudgeServer]:
    server = JudgeServer(script)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
