"""Kept sets: the tokens among which each token was drawn, if sampling settings (top-k, top-p, min-p) left out others.

The kept set of a token is a ``bytes``: its token ids in ascending order, the first one and then the differences, as
varints of 7 bits per byte (LEB128). ``b""`` means that the token was drawn from the whole vocabulary. Sets are read and
written in ``rollover.kept_codec``, which needs numpy; this module does not.
"""

from __future__ import annotations

MAX_KEPT = 4096
"""The most tokens of a kept set."""
DEFAULT_KEPT = 512
"""The most tokens of a kept set if no top-k is given: top-p and min-p alone have no bound."""
