"""The effects that the coordinator asks for; its shell carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass

from rollover.engine.base import Chunk
from rollover.swarm.wire.messages import FromCoordinator, Serving


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the worker that holds a lease; a connection that is gone swallows it, and one that was sent a
    goodbye is closed."""

    lease: int
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand new tokens, or the end of a response, to whoever waits for the call."""

    call_id: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Fail:
    """End a call with an error; what was delivered stays valid."""

    call_id: str
    reason: str
    is_displaced: bool = False
    """The reason is its member's, and others can continue it."""


@dataclass(frozen=True, slots=True)
class CheckLogprobs:
    """Check that a member samples from the weights it says it serves; it gets no call before ``checked``."""

    member: str
    version: int


@dataclass(frozen=True, slots=True)
class SentAway:
    """A member is no longer trusted: its samples that were not trained yet are not to be trained."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class ServesAnew:
    """Record that a member serves a version that it had not served before."""

    member: str
    serving: Serving


@dataclass(frozen=True, slots=True)
class Changed:
    """Members, versions or room have changed: calls that could not be placed may be now."""

    what: str
    is_warning: bool = False


Effect = Send | Deliver | Fail | CheckLogprobs | SentAway | ServesAnew | Changed
