"""Matches stop strings on the text of the whole response, across resumes.

Decoding everything after every token would be quadratic, so the end of the response is looked at first, and
the whole only when that holds a match.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollover.errors import EngineError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # transformers invents one without them


class StopStrings:
    """Decodes with the tokenizer of a model folder, loaded when the first request needs it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            raise EngineError(f"stop strings need a tokenizer, and {folder} has none")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as e:
            raise EngineError(f"stop strings need a tokenizer, and the one in {folder} does not load: {e}") from e

    def complete(self, ids: Sequence[int], stop_strings: Sequence[str], *, start: int = 0) -> bool:
        """Return True when the last token completes a stop string in what follows the first ``start`` tokens. A
        character takes up to four byte-level tokens, so the end that can matter is four tokens long for each character
        of the longest string."""
        end = 4 * max(map(len, stop_strings)) + 4
        tail = self._text(ids[max(start, len(ids) - end) :])
        if not any(stop in tail for stop in stop_strings):
            return False
        text = self._text(ids[start:])
        return any(stop in text for stop in stop_strings)

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
