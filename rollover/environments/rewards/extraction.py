"""Finds the answer within a response, and the reference answer within its column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollover.environments.columns import read_column, read_conversation
from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec
from rollover.errors import RewardError

Extraction = Literal["whole", "hashes", "tag", "last_line", "pattern"]
ReferenceExtraction = Literal["whole", "hashes", "last_line"]

MARKED = {"hashes": "#### {}", "tag": "<answer>{}</answer>"}
"""Form of an answer by the extraction that reads no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings(RewardSettings):
    """Holds the settings of rewards that read an answer out of the response."""

    closed_thoughts: bool = False
    """If true, the answer may be in a thought that was closed (``<think>...</think>``); if false, only after it. A
    thought that was never closed, begun by the response or by its prompt, has no answer in it."""

    def answer_text(self, sample: RewardSample) -> str | None:
        """Return the part of the response that may hold the answer, ``None`` within an unfinished thought.

        Example: of ``"<think>Is it 6?</think>It is 7."`` it is ``"It is 7."``.
        """
        thought, closed, spoken = sample.completion.rpartition("</think>")
        is_thinking = "<think>" in spoken or (not closed and sample.prompt.rstrip().endswith("<think>"))
        return None if is_thinking else f"{thought}\n{spoken}" if self.closed_thoughts else spoken


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractionSettings(AnswerSettings):
    """Holds the settings of rewards that look for the answer in a certain place of the response."""

    extract: Extraction = "tag"
    """Location of the answer in the response. ``tag``: in the last ``<answer>...</answer>``. ``hashes``: after
    the last ``####``, to the end of its line. ``last_line``: the last line that is not empty. ``whole``: everything.
    ``pattern``: the last match of ``answer_pattern``. A response without an answer scores as an empty one."""
    answer_pattern: str | None = None
    """Regular expression; its first group that matches (or the whole match) is the answer. Only for ``pattern``."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        if (self.extract == "pattern") != (self.answer_pattern is not None):
            raise ValueError("reward.answer_pattern and reward.extract = 'pattern' go together: set both or neither")
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise ValueError(
                    f"reward.answer_pattern {self.answer_pattern!r} is not a regular expression: {error}"
                ) from None

    def answer(self, sample: RewardSample) -> str | None:
        """Find the answer in a response; ``None`` if there is none."""
        text = self.answer_text(sample)
        return None if text is None else extract_answer(text, self.extract, self.answer_pattern)


def extract_answer(text: str, how: Extraction, pattern: str | None = None) -> str | None:
    """Find the answer within a response, stripped; ``None`` when there is none. The last occurrence counts.

    Example: ``extract_answer("6 * 7 = 42\n#### 42", "hashes")`` is ``"42"``.
    """
    match how:
        case "whole":
            return text.strip()
        case "hashes":
            _, mark, rest = text.rpartition("####")
            return rest.strip().partition("\n")[0].strip() if mark else None
        case "last_line":
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case "tag":
            found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, flags=re.DOTALL)
            return found[-1].strip() if found else None
        case "pattern":
            assert pattern is not None
            matches = list(re.finditer(pattern, text))
            if not matches:
                return None
            return captured(matches[-1]).strip()


def captured(match: re.Match[str]) -> str:
    """Return the first group that has matched something; the whole match if the pattern has no group."""
    return next(filter(None, match.groups() if match.re.groups else [match[0]]), "")


def reference_answer(spec: RewardSpec, columns: Mapping[str, Any]) -> Any:
    """Read the reference answer from its column, or from the reply that ends the messages of the prompt."""
    assert spec.answer_column is not None
    found = read_conversation(columns, spec.prompt_column) if spec.answer_column == spec.prompt_column else None
    return read_column(columns, spec.answer_column) if found is None or found.reply is None else found.reply


def answer_text(answer: Any) -> str:
    """Write an answer as text: a number without a fraction as a whole one, since it is 5.0 in a column with a gap."""
    is_whole = isinstance(answer, float) and answer.is_integer() and abs(answer) < 1e15
    return str(int(answer) if is_whole else answer)


def reference_texts(spec: RewardSpec, columns: Mapping[str, Any], how: ReferenceExtraction) -> list[str]:
    """Read the reference answer, or the list of right ones, as texts. Raises ``RewardError`` when one is blank or
    neither text nor a number, or lacks a ``####``."""
    value = reference_answer(spec, columns)
    texts: list[str] = []
    for one in (value or [value]) if isinstance(value, list) else [value]:
        if isinstance(one, bool) or not isinstance(one, (str, int, float)):
            shown = json.dumps(one, default=str)[:60]
            raise RewardError(f"the reference answer {shown} is neither text nor a number; set answer_column to text")
        text = extract_answer(answer_text(one), how)
        if not text:
            lack = "has no '####'" if text is None else "is blank"
            raise RewardError(f"the reference answer {str(one)[-60:]!r} {lack} (reward.reference_extract = {how!r})")
        texts.append(text)
    return texts
