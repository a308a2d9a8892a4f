"""Routes: the experts that a mixture-of-experts model chose for each token.

The route of a token is a ``bytes``: the expert ids of the row whose logits the token was drawn from, which is the row
of the token before it. They are layer by layer, in each layer the ``k`` chosen ones by falling score: uint8 if the
model has at most 256 experts, else little-endian uint16. ``b""`` means that no route was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence


def expert_bytes(num_experts: int) -> int:
    """Return the bytes of an expert id in a route."""
    return 1 if num_experts <= 256 else 2


def check_routes(routes: Sequence[bytes], num_tokens: int) -> None:
    """Raise ``ValueError`` unless each token has a route, and all routes are of one size."""
    if len(routes) != num_tokens:
        raise ValueError(f"{num_tokens} tokens came with {len(routes)} routes")
    if num_tokens and (len({len(route) for route in routes}) > 1 or not routes[0]):
        raise ValueError("routes of unlike sizes came, or empty ones")
