"""The reasons why the tokens of a worker cannot be verified, by what it says of its engine."""

from __future__ import annotations

from rollover.swarm.wire.messages import ProtocolError, Ready


def unverifiable(ready: Ready) -> str:
    """Return why tokens of a worker with such an engine cannot be verified; an empty text if they can.

    Example: of an engine that is not ``seeded`` it says that no other worker can decode its tokens again.
    """
    if ready.keeps_kv:
        return "its engine keeps caches of older weights (kv_on_update), so its tokens cannot be verified"
    if not ready.seeded:
        return "its engine does not draw tokens by seed, so no other worker can decode them again"
    return ""


def check_consistent(before: Ready | None, ready: Ready) -> None:
    """Raise ``ProtocolError`` if a worker says one thing of its engine and then another. ``before``: said earlier on
    the same connection, if anything was; on a new one, the worker may have been started with another engine."""
    if before is None:
        return
    for key in ("seeded", "keeps_kv"):
        if (was := getattr(before, key)) != (now := getattr(ready, key)):
            raise ProtocolError(f"it says of its engine {key} = {now}, but said {was} before on the same connection")
