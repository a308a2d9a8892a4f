"""One life of an agent's program, as the door sees it: what it has asked, what it was told, and what it may still ask.

A conversation only grows: each request repeats what was said, word for word, and adds to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollover.environments.episodes.conversation import ChatReply, ChatRequest, Messages, RefusedRequest, begins


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was let in.

    Example: ``Asked(request, new, reply)``, where ``new`` are the messages with which the request extends the
    conversation.
    """

    request: ChatRequest
    new: Messages
    reply: asyncio.Future[ChatReply]
    num_listening: int = 0
    """Number of connections that wait for the reply: several if the client has tried again."""
    was_heard: bool = False
    """True if a connection was there when the reply came."""


@dataclass(slots=True)
class Guest:
    """Holds the conversation of one life of a program.

    Example: after ``guest.ask(request, is_retry=False)`` the request is ``guest.open``, and ``guest.answer(reply)``
    lets its connections have the reply.
    """

    said: Messages = field(default_factory=list)
    """The conversation so far."""
    tools: Sequence[Mapping[str, Any]] = ()
    open: Asked | None = None
    """The request that has no reply yet."""
    reward: float | None = None
    failure: str = ""
    """The reason for which the episode cannot go on."""
    refusal: str = ""
    """The reason for which nothing more is answered."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something has been asked."""
    num_replies: int = 0
    _last: Asked | None = None

    def ask(self, request: ChatRequest, *, is_retry: bool) -> Asked:
        """Let a request in, or find the one that it repeats.

        Raises:
            RefusedRequest: it does not extend the conversation, which fails the episode, or nothing is answered now.
        """
        if self.refusal or self.failure:
            raise self.refused()
        for known in (self.open, self._last):
            if known is not None and request == known.request:
                lost = known.num_listening == 0 and not known.was_heard
                if is_retry or lost:
                    return known
        if problem := self._problem(request):
            self.failure = f"its request {self.num_replies + 1} {problem}"
            self.changed.set()
            raise RefusedRequest(f"this request {problem}")
        self.tools = request.tools
        new = request.messages[len(self.said) :]
        self.open = Asked(request, new, asyncio.get_running_loop().create_future())
        self.changed.set()
        return self.open

    def answer(self, reply: ChatReply) -> None:
        """Reply to the open request."""
        asked = self.open
        assert asked is not None, "nothing was asked"
        self.said += [*asked.new, reply.message]
        asked.was_heard = asked.num_listening > 0
        asked.reply.set_result(reply)
        self.open, self._last = None, asked
        self.num_replies += 1

    def leave(self, refusal: str = "the episode is over") -> None:
        """Refuse the open request and all later ones."""
        self.refusal = self.refusal or refusal
        if self.open is not None:
            self.open.reply.cancel()

    def refused(self) -> RefusedRequest:
        """Return the answer to requests that get no reply any more."""
        return RefusedRequest(self.refusal or self.failure, "context_length_exceeded" if self.refusal else None)

    def _problem(self, request: ChatRequest) -> str:
        if self.open is not None:
            return "came while another one had no reply: a program asks one thing after the other"
        if not begins(request.messages, self.said):
            pairs = enumerate(zip(request.messages, self.said, strict=False))
            place = next((i for i, (new, old) in pairs if new != old), len(request.messages))
            return f"does not extend the conversation: messages[{place}] is not what was said before"
        new = request.messages[len(self.said) :]
        if not new:
            return "adds nothing to the conversation"
        if self.said and any(message["role"] == "assistant" for message in new):
            return "has a reply that was never given"
        if self.said and list(request.tools) != list(self.tools):
            return "has other tools than the requests before it"
        return ""
