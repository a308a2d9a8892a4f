"""Finds the markers of a tokenizer, and encodes text in which a marker is only text.

A marker is an added token that means more than its text, such as ``<|im_end|>``: a tokenizer turns its spelling into
that one id wherever it occurs, also in a user's question.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from rollover.hf.tokenizer import FastTokenizer

_ANCHORS = ("\n", "a", "0")
"""Text before a piece, so that it is not encoded as the beginning of a text. A piece may merge with one of them."""


class Markers:
    """Knows the markers of a fast tokenizer.

    Example: for Qwen3's tokenizer, ``find("a<|im_end|>")`` is ``[(1, 11)]``, and ``encode("<|im_end|>", [(0, 10)])``
    has six ids, none of which is the end of a turn.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        from tokenizers import Tokenizer

        self._whole = tokenizer.backend_tokenizer
        self._whole.no_truncation()
        self._whole.no_padding()
        added = self._whole.get_added_tokens_decoder()
        self._ids = {token.content: id for id, token in added.items() if token.content.strip()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._marker_ids = frozenset(self._ids.values())
        core = json.loads(self._whole.to_str()) | {"added_tokens": [], "post_processor": None}
        self._plain = Tokenizer.from_str(json.dumps(core))

    def find(self, text: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Return the (start, end) of the markers that are spelled out in a part of a text."""
        if self._pattern is None:
            return []
        return [match.span() for match in self._pattern.finditer(text, start, len(text) if end is None else end)]

    def count(self, ids: Iterable[int]) -> Counter[int]:
        """Count the markers among token ids."""
        return Counter(id for id in ids if id in self._marker_ids)

    def id_of(self, text: str) -> int:
        return self._ids[text]

    def starting(self, text: str) -> int | None:
        """Return the id of the marker that a text begins with, apart from white space; ``None`` if there is none."""
        found = self._pattern.match(text.lstrip()) if self._pattern else None
        return self._ids[found.group()] if found else None

    def encode(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int] | None:
        """Encode a text; the parts ``literal`` of it are text although they spell markers. Returns ``None`` if the
        tokenizer cannot encode the text in pieces."""
        ids: list[int] = []
        at = 0
        for start, end in literal:
            for backend, piece in ((self._whole, text[at:start]), (self._plain, text[start:end])):
                found = _piece(backend, piece, is_first=not ids)
                if found is None:
                    return None
                ids += found
            at = end
        last = _piece(self._whole, text[at:], is_first=not ids)
        return None if last is None else [*ids, *last]


@lru_cache(maxsize=1)
def markers_of(tokenizer: Any) -> Markers:
    """Return the markers of a fast tokenizer, made once, since this writes the whole tokenizer out."""
    return Markers(tokenizer)


def _piece(backend: Any, text: str, *, is_first: bool) -> list[int] | None:
    """Encode a piece of a longer text; ``None`` if it merges with whatever stands before it."""
    if not text or is_first:
        return list(backend.encode(text, add_special_tokens=False).ids)
    for anchor in _ANCHORS:
        found = backend.encode(anchor + text, add_special_tokens=False)
        before = [id for id, (start, _) in zip(found.ids, found.offsets, strict=True) if start < len(anchor)]
        alone = backend.encode(anchor, add_special_tokens=False).ids
        if found.ids[: len(before)] == before == alone:
            return list(found.ids[len(before) :])
    return None
