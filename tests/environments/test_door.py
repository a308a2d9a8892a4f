"""The door for agents' programs: who is let in, what is compared, and replies that take their time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from rollover.environments.episodes import AgentConfig
from rollover.environments.episodes.agents import SourceEnvironment
from rollover.environments.episodes.conversation import (
    ChatReply,
    ChatRequest,
    RefusedRequest,
    read_request,
    record_of,
    reply_to,
)
from rollover.environments.episodes.door import Door
from rollover.environments.episodes.guest import Asked, Guest
from rollover.environments.episodes.tools import call_reader
from rollover.errors import RewardError
from tests.environments.test_agents import Plain
from tests.environments.test_interleavings import Connection
from tests.speed import within
from tests.tasks.shapes import assistant as said
from tests.tasks.shapes import user

CALC: dict[str, Any] = {"type": "function", "function": {"name": "calc", "parameters": {}}}
CALL = '<tool_call>{"name": "calc", "arguments": {"a": 1}}</tool_call>'


def request(*messages: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages), **more}).encode()


def reply(text: str, number: int = 1, *, tools: Any = ()) -> ChatReply:
    asked = ChatRequest(messages=[], tools=tools, may_call=bool(tools))
    return reply_to(asked, text, call_reader("hermes"), number=number, sizes=(5, 3))


# -- what is compared ---------------------------------------------------------------------------------------------


def test_a_message_is_its_role_text_and_calls() -> None:
    spelled = {"id": "x", "type": "function", "function": {"name": "calc", "arguments": '{ "a":1 }'}}
    read = read_request(
        request(
            {"role": "developer", "content": "be brief", "name": "d"},
            user([{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]),
            {"role": "assistant", "content": None, "tool_calls": [spelled], "refusal": None},
            {"role": "tool", "content": "2", "tool_call_id": "x"},
        )
    )
    assert read.messages == [
        {"role": "system", "content": "be brief"},
        user("1+1"),
        {**reply(CALL, tools=[CALC]).message},
        {"role": "tool", "content": "2"},
    ]
    assert json.loads(record_of(read.messages[3:], [CALC])) == {"messages": read.messages[3:], "tools": [CALC]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "no JSON"),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": %b%b}' % (b"[" * 700, b"]" * 700), "100 levels"),
        (
            request(
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 700 + "]" * 700}}]}
            ),
            "arguments of a call are nested more than 100",
        ),
        (b"[]", "has no messages"),
        (request(), "has no messages"),
        (request(user("a"), n=2), "n = 2 is not supported"),
        (request(user("a"), logprobs=True), "logprobs = true is not supported"),
        (request(user("a"), response_format={"type": "json_object"}), "response_format"),
        (request(user([{"type": "image_url", "image_url": {}}])), r"messages\[0\]: the content is neither"),
        (request(user(7)), r"messages\[0\]: the content is neither"),
        (request({"role": "function", "content": ""}), r"messages\[0\]: the role is 'function'"),
        (request(user("a"), tools="calc"), "tools is no list"),
        (request(user("a"), tools=[{"type": "function", "function": []}]), "tools is no list"),
        (request(user("a"), tools=[{"type": "custom"}]), "tools is no list"),
        (request(user("a"), stop=7.5), "a field of a wrong type: 'float' object is not iterable"),
        (request(user("a"), stream_options=7), "a field of a wrong type: 'int' object has no attribute 'get'"),
        (request({"role": {}, "content": ""}), "a field of a wrong type: unhashable type: 'dict'"),
        (request({"role": "assistant", "tool_calls": True}), "a field of a wrong type: 'bool' object is not iterable"),
        (request({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}), "no JSON"),
    ],
)
def test_what_cannot_be_given_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(RefusedRequest, match=message):
        read_request(body)


def test_a_reply_has_the_calls_of_the_turn_under_ids_that_follow_from_it() -> None:
    one = reply(f"let me see {CALL}{CALL}", 3, tools=[CALC])
    assert one.content == "let me see" and one.finish_reason == "tool_calls"
    assert [call["id"] for call in one.tool_calls] == ["call_3_0", "call_3_1"]
    assert json.loads(one.tool_calls[0]["function"]["arguments"]) == {"a": 1}
    thought = "<think>a <tool_call>?</think>so"
    assert (reply(thought + CALL, tools=[CALC]).content, len(reply(thought + CALL, tools=[CALC]).calls)) == (thought, 1)
    assert reply(CALL).content == CALL, "the program has no tools"
    broken = "<tool_call>{</tool_call>"
    assert (reply(broken, tools=[CALC]).content, reply(broken, tools=[CALC]).calls) == (broken, ())
    stopped = ChatRequest(messages=[], stop=("\n",))
    assert reply_to(stopped, "a\nb", call_reader("hermes"), number=1, sizes=(1, 1)).content == "a"


def test_blank_lines_after_a_fence_are_read_once() -> None:
    """By one try for each pair of them, these took four seconds, and take less than a millisecond."""
    start_s = time.process_time()
    assert call_reader("json")("```" + "\n" * 20_000) == []
    assert time.process_time() - start_s < within(0.1)


def test_calls_that_no_request_could_repeat_are_text_or_named() -> None:
    deep = CALL.replace("1", "[" * 200 + "]" * 200)
    assert (reply(deep, tools=[CALC]).content, reply(deep, tools=[CALC]).calls) == (deep, ())
    read, asked = call_reader("tests.environments.games:give"), ChatRequest(messages=[], may_call=True)
    with pytest.raises(RewardError, match=r"environment\.parser: the arguments of a call are no JSON \(Object of type"):
        reply_to(asked, "[('calc', {'a': {1}})]", read, number=1, sizes=(1, 1))


async def ask(guest: Guest, *messages: Any, is_retry: bool = False, **more: Any) -> Asked:
    return await guest.ask(read_request(request(*messages, **more)), is_retry=is_retry)


def tell(guest: Guest, text: str) -> Asked:
    """Reply to the first request that waits."""
    asked, turn = guest.waiting[0], len(guest.said)
    guest.take(asked, turn)
    guest.answer(turn, lambda request: reply(text, turn), ord(text[-1]))
    return asked


@pytest.mark.parametrize(
    ("messages", "tools", "origin", "adds"),
    [
        ([user("a"), said("b"), user("c")], [], 1, 1),
        ([user("a"), said("b"), user("c"), said("d"), user("e")], [], 3, 1),
        ([user("a"), said("B"), user("c")], [], 2, 1),
        ([user("a"), said("b"), {"role": "tool", "content": "1"}, user("c")], [], 1, 2),
        ([user("a"), said("b"), user("c"), user("f")], [], 1, 2),
        ([user("a")], [], 0, 1),
        ([user("x"), said("b"), user("c")], [], 0, 3),
        ([user("a"), said("edited"), user("c")], [], 0, 3),
        ([user("a"), said("b")], [], 0, 2),
        ([user("a"), said("b"), user("c"), said("never said"), user("e")], [], 0, 5),
        ([user("a"), said("b"), user("c")], [CALC], 0, 3),
    ],
)
async def test_a_request_continues_the_last_reply_it_repeats(messages: Any, tools: Any, origin: int, adds: int) -> None:
    written: list[Any] = []

    def write(*given: Any) -> tuple[int, ...]:
        written.append(given)
        return (7,)

    guest = Guest(write=write)
    for asks, text in (([user("a")], "b"), ([user("a")], "B"), ([user("a"), said("b"), user("c")], "d")):
        (await ask(guest, *asks)).num_listening = 1
        tell(guest, text)
    asked = await ask(guest, *messages, tools=tools)
    new = asked.request.messages[-adds:]
    assert (asked.parent, asked.record) == (origin, record_of(new, () if origin else tools))
    assert written[3:] == [(new, tools or (), {1: ord("b"), 2: ord("B"), 3: ord("d")}.get(origin))], "once"
    assert asked.token_ids == (7,)


async def test_a_request_joins_the_first_if_it_is_a_retry_or_nobody_waits() -> None:
    guest = Guest()
    first = await ask(guest, user("a"))
    assert await ask(guest, user("a")) is first, "its connection is gone"
    first.num_listening = 1
    assert await ask(guest, user("a"), is_retry=True) is first
    second = await ask(guest, user("a"))
    assert second is not first, "another sibling"
    first.num_listening, second.num_listening = 0, 1
    tell(guest, "b")
    assert second.reply.done() and not guest.waiting, "it was asked again before the first was seen to be gone"
    assert await ask(guest, user("a"), is_retry=True) is first and guest.waiting == [first], (
        "or it was not the same request"
    )
    first.num_listening = 1
    assert await ask(guest, user("a"), is_retry=True) is second, "the reply was lost on its way"
    assert await ask(guest, user("a")) not in (first, second)
    lost = Guest()
    first = await ask(lost, user("a"))
    tell(lost, "b")
    assert await ask(lost, user("a")) is first, "nobody has heard the reply"


def connect(door: Door, key: str, text: str = "a", num_retries: int = 0) -> Connection:
    return Connection(door, key, "/chat/completions", {"messages": [user(text)]}, num_retries)


async def test_a_retry_belongs_to_the_request_whose_connection_is_gone() -> None:
    door, guest, connections = Door(), Guest(), list[Connection]()
    key = door.let_in(guest)
    for num_retries in (0, 0, 1):  # two equal requests, and a retry of the first
        connections.append(connect(door, key, num_retries=num_retries))
        await asyncio.sleep(0.1)
    first, second, again = connections
    first.gone.set()
    await asyncio.sleep(0.1)
    tell(guest, "b"), tell(guest, "c")
    await asyncio.wait([second.task, again.task])
    replies = [one.answer["choices"][0]["message"]["content"] for one in (again, second)]
    assert (replies, guest.waiting) == (["b", "c"], [])


async def test_a_reply_is_heard_by_a_connection_that_comes_for_it_later() -> None:
    door, guest = Door(), Guest()
    key = door.let_in(guest)
    first = connect(door, key)
    await asyncio.sleep(0.1)
    first.gone.set()
    await first.task
    tell(guest, "b")
    assert not guest.has_heard
    await connect(door, key).task
    assert guest.has_heard and len(guest.turns) == 1


class Held(Plain):
    """Takes a long text up, and writes it out when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, messages: Any, tools: Any, columns: Any) -> tuple[int, ...]:
        if len(messages[0]["content"]) > 10_000:
            self.begun.set()
            assert self.may_end.wait(within(10)), "all else stands still"
            self.begun.clear()
            self.may_end.clear()
        return super().begin(messages, tools, columns)


@pytest.mark.real_time
async def test_a_long_message_holds_up_nothing_but_its_own_episode() -> None:
    held: Any = Held()
    source = SourceEnvironment(AgentConfig(command=("a",)), held, 500)
    door, slow, other = Door(), Guest(write=partial(source.write, {})), Guest()
    key = door.let_in(slow)
    first, second, third = connect(door, key, "a" * 20_000), connect(door, key, "b"), connect(door, door.let_in(other))
    await asked(other)
    tell(other, "d")
    await third.task
    assert held.begun.wait(within(10)) and not slow.waiting, "in the order in which they came"
    held.may_end.set()
    while len(slow.waiting) < 2:
        await asyncio.sleep(0.01)
    assert [len(tell(slow, "e").token_ids) for _ in range(2)] == [20_000, 1]
    await asyncio.wait([first.task, second.task])
    late = connect(door, key, "f" * 20_000)
    while not held.begun.is_set():
        await asyncio.sleep(0.01)
    slow.leave("it is over")
    held.may_end.set()
    await asyncio.wait_for(late.task, within(10))
    assert late.answer["error"]["message"] == "it is over"


# -- over HTTP ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def visit(keep_alive_s: float = 60.0) -> AsyncIterator[tuple[Guest, httpx.AsyncClient]]:
    """A guest, and a client that has its key."""
    door, guest = Door(keep_alive_s), Guest()
    key = door.let_in(guest)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(base_url=door.url, headers=headers, timeout=30) as client:
            yield guest, client
    finally:
        await door.close()


async def asked(guest: Guest) -> Asked:
    while not guest.waiting:
        guest.changed.clear()
        await guest.changed.wait()
    return guest.waiting[0]


@pytest.mark.real_time
async def test_bytes_without_a_meaning_keep_a_connection_alive() -> None:
    """A client that allows less than the wait between two bytes gets its reply."""
    async with visit(keep_alive_s=0.01) as (guest, client):
        for number, streams in enumerate((False, True)):
            body, got = request(user(str(number)), stream=streams, stream_options={"include_usage": True}), b""
            async with client.stream("POST", "/chat/completions", content=body) as response:
                async for piece in response.aiter_bytes():
                    if not got:
                        assert piece.strip() == (b": waiting" if streams else b"")
                        tell(guest, f"b{number}")
                    got += piece
            if streams:
                lines = [line[6:] for line in got.decode().split("\n\n") if line.startswith("data: ")]
                pieces = [json.loads(line) for line in lines[:-1]]
                assert lines[-1] == "[DONE]" and pieces[-1]["usage"]["total_tokens"] == 8
                assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": "b1"}
                assert pieces[-2]["choices"][0]["finish_reason"] == "stop"
            else:
                found = json.loads(got)
                assert found["choices"][0]["message"] == {"role": "assistant", "content": "b0"}
                assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@pytest.mark.real_time
async def test_only_a_running_episode_is_let_in() -> None:
    door, guests = Door(), [Guest(), Guest()]
    keys = [door.let_in(guest) for guest in guests]
    door.let_out(keys[1])
    mixed = "-".join([*keys[0].split("-")[:2], keys[1].split("-", 2)[2]])
    async with httpx.AsyncClient(base_url=door.url) as client:
        for key in (keys[1], mixed, keys[0][:-1], "sk-0-", "sk-7-", "é"):
            headers = {b"Authorization": b"Bearer " + key.encode()}
            assert (await client.get("/models", headers=headers)).status_code == 401, key
        headers = {"Authorization": f"Bearer {keys[0]}"}
        assert (await client.get("/models")).status_code == 401
        assert (await client.get("/models", headers=headers)).json()["data"][0]["id"] == "rollover"
        response = await client.post("/responses", content=b"{}", headers=headers)
        assert response.status_code == 404 and "use chat completions" in response.json()["error"]["message"]
        large = await client.post("/chat/completions", content=b" " * (2**20 + 1), headers=headers)
        assert large.status_code == 413
        for content in (b"1", b'{"reward": "NaN"}', b'{"reward": 1e16}', b'{"reward": 1%b}' % (b"0" * 400)):
            assert (await client.post("/reward", content=content, headers=headers)).status_code == 400
        assert guests[0].reward is None
        assert (await client.post("/reward", json={"reward": 0.5}, headers=headers)).status_code == 200
    assert guests[0].reward == 0.5 and not door.url.startswith("http://0.0.0.0")
    await door.close()


@pytest.mark.real_time
async def test_a_request_that_will_not_be_answered_is_refused() -> None:
    async with visit() as (guest, client):
        post = asyncio.create_task(client.post("/chat/completions", content=request(user("a"))))
        await asked(guest)
        guest.leave("no room")
        for response in (await post, await client.post("/chat/completions", content=request(user("b")))):
            assert response.status_code == 400
            assert response.json()["error"] | {"param": 0, "type": ""} == {
                "message": "no room", "code": "context_length_exceeded", "param": 0, "type": "",
            }  # fmt: skip


@pytest.mark.real_time
async def test_a_refusal_cuts_json_off_that_has_begun_and_comes_when_it_is_tried_again() -> None:
    async with visit(keep_alive_s=0.01) as (guest, client):
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/chat/completions", content=request(user("a"))) as response:
                async for _ in response.aiter_bytes():
                    guest.leave("no room")
        again = await client.post(
            "/chat/completions", content=request(user("a")), headers={"x-stainless-retry-count": "1"}
        )
        assert (again.status_code, again.json()["error"]["message"]) == (400, "no room")


@pytest.mark.real_time
async def test_a_thousand_connections_wait_side_by_side() -> None:
    door, guests = Door(keep_alive_s=60.0), [Guest() for _ in range(1000)]
    port, body = int(door.url.split(":")[2].split("/")[0]), request(user("a"))

    async def post(key: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: door\r\nauthorization: Bearer {key}\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        content: str = found["choices"][0]["message"]["content"]
        return content

    posts = [asyncio.create_task(post(door.let_in(guest))) for guest in guests]
    for guest in guests:
        await asked(guest)
    for number, guest in enumerate(guests):
        tell(guest, str(number))
    assert await asyncio.gather(*posts) == [str(number) for number in range(1000)]
    await door.close()
