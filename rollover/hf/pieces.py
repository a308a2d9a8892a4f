"""Splits the text of token ids into the part that each token adds."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.hf.tokenizer import FastTokenizer

_CONTEXT = 8
"""Tokens before a piece that decide how it is decoded: whether a space stands before it, for example."""
_UNFINISHED = "\ufffd"
_MOST_TOKENS = 6
"""Tokens that one character takes at most."""


def pieces(tokenizer: FastTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. A character made of several tokens belongs to the last of them."""

    def text(start: int, end: int) -> str:
        return str(tokenizer.decode(list(ids[start:end]), skip_special_tokens=False))

    found: list[str] = []
    done = 0
    for end in range(1, len(ids) + 1):
        start = max(0, done - _CONTEXT)
        before, whole = text(start, done), text(start, end)
        if whole.endswith(_UNFINISHED) and end - done < _MOST_TOKENS and end < len(ids):
            found.append("")
            continue
        found.append(whole[len(before) :])
        done = end
    return found
