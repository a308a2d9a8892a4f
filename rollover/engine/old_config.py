"""Drops settings of removed features from the ``[engine]`` tables that earlier versions stored. It applies only to
recorded runs: in a user's file such a key is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OFF: Mapping[str, Any] = {
    "transport": "websocket",
    "blob_store": None,
    "verifiable_only": False,
}
"""Removed settings, with the value under which a run does not need them."""
_NO_EFFECT = ("draft_rows", "reexecute")
"""Removed settings that never changed what was sampled or trained."""


def without_removed(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without settings that the run does not need.

    Example: ``{"kind": "swarm", "transport": "websocket", "reexecute": 0.02}`` becomes ``{"kind": "swarm"}``; with
    ``"transport": "nats"`` the key stays, and is refused as an unknown one.
    """
    is_websocket = engine.get("transport", "websocket") == "websocket"
    return {
        key: value
        for key, value in engine.items()
        if not (key in _NO_EFFECT or (key.startswith("nats_") and is_websocket) or (key in _OFF and value == _OFF[key]))
    }
