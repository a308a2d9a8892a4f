"""One life of an agent's program, as the door sees it: what it has asked, what it was told, and what it may still ask.

Requests may branch: each goes on from the last reply that it repeats, or begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rollover.environments.episodes.base import written
from rollover.environments.episodes.conversation import ChatReply, ChatRequest, Messages, RefusedRequest, record_of


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was let in."""

    request: ChatRequest
    parent: int
    """The turn that it goes on from; 0 if it begins anew."""
    adds: Messages
    token_ids: tuple[int, ...]
    """The messages that it adds, written out."""
    reply: asyncio.Future[ChatReply]
    num_listening: int = 0
    """Number of connections that wait for the reply: several if the client has tried again."""
    was_heard: bool = False
    """True if a connection was there when the reply came, or has come for it since."""

    @property
    def is_lost(self) -> bool:
        return not self.num_listening and not self.was_heard

    @property
    def record(self) -> str:
        """Return what it adds to the conversation, as the journal has it."""
        return record_of(self.adds, () if self.parent else self.request.tools)


class Said(NamedTuple):
    """A conversation up to and with the reply of a turn."""

    messages: Messages
    tools: Sequence[Mapping[str, Any]]
    last_id: int | None = None
    """The last token of the turn."""

    def goes_on_in(self, request: ChatRequest) -> bool:
        """Return whether a request repeats the conversation and adds what is no reply."""
        new = request.messages[len(self.messages) :]
        adds = bool(new) and all(message["role"] != "assistant" for message in new)
        repeats = request.messages[: len(self.messages)] == self.messages
        return adds and repeats and list(request.tools) == list(self.tools)


@dataclass(slots=True)
class Guest:
    """Holds the conversations of one life of a program."""

    said: dict[int, Said] = field(default_factory=lambda: {0: Said([], ())})
    """The conversation up to each turn that was told, by its number. The turn 0 is empty."""
    waiting: list[Asked] = field(default_factory=list)
    """The requests that are no turns yet, in the order in which they came."""
    turns: dict[int, Asked] = field(default_factory=dict)
    """The request of each turn."""
    deserted: list[Asked] = field(default_factory=list)
    """Requests whose turns others have, since nobody waited for them."""
    reward: float | None = None
    refusal: str = ""
    """The reason for which nothing more is answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something has been asked."""
    write: Callable[..., tuple[int, ...]] = lambda messages, tools, last_id: ()
    """Writes out what a request adds; see ``SourceEnvironment.write``."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a request is let in: one at a time, in the order in which they came."""

    async def ask(self, request: ChatRequest, *, is_retry: bool) -> Asked:
        """Let a request in, or find the request that it repeats: its client has tried again, or is gone without the
        reply. Needs ``asking``.

        Raises:
            RefusedRequest: nothing is answered any more.
            DataError: what the request adds cannot be written out.
        """
        if self.refusal:
            raise self.refused()
        same = self._equal(request)
        asked = next((known for known in same if known.is_lost), None)
        if asked is None and is_retry and same:
            asked = max(reversed(same), key=lambda known: known.was_heard)
        if asked is None:
            found = (turn for turn, said in self.said.items() if turn and said.goes_on_in(request))
            parent = min(found, default=0)  # several are equal: each ends with the last reply in the request
            said = self.said[parent]  # what a conversation repeats is held once
            new = request.messages[len(said.messages) :]
            size = len(record_of(new, request.tools))
            token_ids = await written(size, self.write, new, request.tools, said.last_id)
            if self.refusal:
                raise self.refused()
            tools = said.tools if parent else request.tools
            request = replace(request, messages=[*said.messages, *new], tools=tools)
            asked = Asked(request, parent, new, token_ids, asyncio.get_running_loop().create_future())
        elif asked in self.deserted:
            self.deserted.remove(asked)
        else:
            return asked
        self.waiting.append(asked)
        self.changed.set()
        return asked

    def is_unclear(self, request: ChatRequest) -> bool:
        """Return whether a retry may be of several requests: until the connection of one is seen to be gone."""
        same = self._equal(request)
        return len(same) > 1 and any(one.num_listening for one in same) and not any(one.is_lost for one in same)

    def _equal(self, request: ChatRequest) -> list[Asked]:
        return [known for known in (*self.turns.values(), *self.waiting, *self.deserted) if known.request == request]

    def asked_again(self, parent: int, recorded: str) -> Asked | None:
        """Return the first waiting request that goes on from ``parent`` with what was recorded (``record_of``)."""
        record = json.loads(recorded)
        return next((one for one in self.waiting if one.parent == parent and json.loads(one.record) == record), None)

    def take(self, asked: Asked, turn: int) -> None:
        """Make a waiting request a turn."""
        self.waiting.remove(asked)
        self.turns[turn] = asked

    def answer(self, turn: int, reply_to: Callable[[ChatRequest], ChatReply], last_id: int) -> None:
        """Reply to the request of a turn, which ended with the token ``last_id``."""
        asked = self.turns[turn]
        again = (one for one in self.waiting if one.request == asked.request)
        if not asked.num_listening and (twin := next(again, None)) is not None:
            self.take(twin, turn)  # it may be the same one: tried again before its connection was seen to be gone
            self.deserted.append(asked)
            asked = twin
        reply = reply_to(asked.request)
        self.said[turn] = Said([*asked.request.messages, reply.message], asked.request.tools, last_id)
        asked.was_heard = asked.num_listening > 0
        asked.reply.set_result(reply)

    @property
    def has_heard(self) -> bool:
        """Return whether a connection has got the reply of the newest turn, if there is any."""
        return not self.turns or self.turns[max(self.turns)].was_heard

    def leave(self, refusal: str = "the episode is over") -> None:
        """Refuse the open requests and all later ones."""
        self.refusal = self.refusal or refusal
        for asked in (*self.waiting, *self.turns.values()):
            asked.reply.cancel()

    def refused(self) -> RefusedRequest:
        """Return the answer to requests that get no reply any more."""
        return RefusedRequest(self.refusal, "context_length_exceeded")
