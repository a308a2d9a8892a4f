"""One life of an agent's program, as the door sees it: what it has asked, what it was told, and what it may still ask.

Requests may branch: each goes on from the last reply that it repeats, or begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rollover.environments.episodes.conversation import ChatReply, ChatRequest, Messages, RefusedRequest, begins


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was let in.

    Example: ``Asked(request, reply)``, where ``reply`` is a future.
    """

    request: ChatRequest
    reply: asyncio.Future[ChatReply]
    num_listening: int = 0
    """Number of connections that wait for the reply: several if the client has tried again."""
    was_heard: bool = False
    """True if a connection was there when the reply came."""


class Said(NamedTuple):
    """A conversation up to and with the reply of a turn.

    Example: ``Said([], ())`` is what precedes all that a program asks.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]]

    def goes_on_in(self, request: ChatRequest) -> bool:
        """Return whether a request repeats the conversation and adds what is no reply."""
        new = request.messages[len(self.messages) :]
        adds = bool(new) and all(message["role"] != "assistant" for message in new)
        return adds and begins(request.messages, self.messages) and list(request.tools) == list(self.tools)


@dataclass(slots=True)
class Guest:
    """Holds the conversations of one life of a program.

    Example: after ``guest.ask(request, is_retry=False)`` the request is the last of ``guest.waiting``. Once
    ``guest.take(request, turn)`` has made it a turn, ``guest.answer(turn, reply)`` lets its connections have the reply.
    """

    said: dict[int, Said] = field(default_factory=lambda: {0: Said([], ())})
    """The conversation behind each turn that was told, by its number. The turn 0 is empty."""
    waiting: list[Asked] = field(default_factory=list)
    """The requests that are no turns yet, in the order in which they came."""
    turns: dict[int, Asked] = field(default_factory=dict)
    """The request of each turn."""
    reward: float | None = None
    refusal: str = ""
    """The reason for which nothing more is answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something has been asked."""
    check: Callable[..., object] = lambda messages, tools, last_id: None
    """Raises ``DataError`` for messages that cannot be written out; see ``AgentSource.write``."""

    def ask(self, request: ChatRequest, *, is_retry: bool) -> Asked:
        """Let a request in, or find the one that it repeats: its client has tried again, or is gone without the reply.

        Raises:
            RefusedRequest: nothing is answered any more.
            DataError: what the request adds cannot be written out.
        """
        if self.refusal:
            raise self.refused()
        same = [known for known in (*self.turns.values(), *self.waiting) if known.request == request]
        lost = [known for known in same if not known.num_listening and not known.was_heard]
        if lost or (is_retry and same):
            return (lost or same[::-1])[0]
        parent, new, tools = self.origin(request)
        self.check(new, request.tools, -1 if parent else None)
        said = self.said[parent]  # what a conversation repeats is held once
        request = replace(request, messages=[*said.messages, *new], tools=said.tools if parent else tools)
        asked = Asked(request, asyncio.get_running_loop().create_future())
        self.waiting.append(asked)
        self.changed.set()
        return asked

    def origin(self, request: ChatRequest) -> tuple[int, Messages, Sequence[Mapping[str, Any]]]:
        """Return the number of the turn that a request goes on from, the messages that it adds, and the tools that it
        offers if it begins anew."""
        found = (turn for turn, said in self.said.items() if turn and said.goes_on_in(request))
        parent = min(found, default=0)  # several are equal: each ends with the last reply in the request
        return parent, request.messages[len(self.said[parent].messages) :], () if parent else request.tools

    def asked_again(self, parent: int, recorded: str) -> Asked | None:
        """Return the first waiting request that goes on from ``parent`` with what was recorded (``record_of``)."""
        if (said := self.said.get(parent)) is None:
            return None
        record = json.loads(recorded)
        messages, tools = [*said.messages, *record["messages"]], record.get("tools", list(said.tools))
        requests = (one for one in self.waiting if one.request.messages == messages)
        return next((one for one in requests if list(one.request.tools) == tools), None)

    def take(self, asked: Asked, turn: int) -> None:
        """Make a waiting request a turn."""
        self.waiting.remove(asked)
        self.turns[turn] = asked

    def answer(self, turn: int, reply_to: Callable[[ChatRequest], ChatReply]) -> None:
        """Reply to the request of a turn."""
        asked = self.turns[turn]
        again = (one for one in self.waiting if one.request == asked.request)
        if not asked.num_listening and (twin := next(again, None)) is not None:
            self.take(twin, turn)  # its client tried again before its connection was seen to be gone
            asked = twin
        reply = reply_to(asked.request)
        self.said[turn] = Said([*asked.request.messages, reply.message], asked.request.tools)
        asked.was_heard = asked.num_listening > 0
        asked.reply.set_result(reply)

    def leave(self, refusal: str = "the episode is over") -> None:
        """Refuse the open requests and all later ones."""
        self.refusal = self.refusal or refusal
        for asked in (*self.waiting, *self.turns.values()):
            asked.reply.cancel()

    def refused(self) -> RefusedRequest:
        """Return the answer to requests that get no reply any more."""
        return RefusedRequest(self.refusal, "context_length_exceeded")
