"""``kind = "math_verify"``: 1 for an answer that is mathematically equal to the reference, else 0."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec
from rollover.environments.rewards.extraction import ReferenceExtraction, reference_texts
from rollover.errors import DataError, RewardError


@dataclass(frozen=True, slots=True, kw_only=True)
class MathVerifyConfig(RewardSettings):
    """Scores 1 when math-verify finds the response's final expression equal to the reference; else 0.

    Example: with the reference ``"0.5"``, a response that ends in ``$\\boxed{\\frac{1}{2}}$`` scores 1.
    """

    needs_answer: ClassVar[bool] = True

    kind: Literal["math_verify"] = "math_verify"
    """``"math_verify"`` chooses this reward, which finds the answer in the response itself."""
    reference_extract: ReferenceExtraction = "whole"
    """Location of the reference answer in the answer column: ``hashes`` suits worked solutions that end in
    ``#### 72``."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        if self.workers == 0:
            raise ValueError("reward.workers must be at least 1 for 'math_verify': only a process can be stopped")

    def build(self, spec: RewardSpec) -> MathVerifyReward:
        return MathVerifyReward(self, spec)


class MathVerifyReward:
    """Compares with math-verify.

    The library's own time limits use signals and are switched off: the process has a deadline. A response on which the
    library fails counts as wrong.
    """

    def __init__(self, config: MathVerifyConfig, spec: RewardSpec) -> None:
        try:
            import math_verify
        except ImportError:
            raise DataError("reward kind 'math_verify' needs the package: pip install math-verify") from None
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its time limits are off
        self._library = math_verify
        self._config = config
        self._spec = spec
        self._parse("$1$")  # loads the grammar, which must not count against the deadline of the first response

    def score(self, sample: RewardSample) -> float:
        texts = reference_texts(self._spec, sample, self._config.reference_extract)
        references = [self._reference(text) for text in texts]
        try:
            answer = self._parse(sample.completion)
            return float(any(self._library.verify(r, answer, timeout_seconds=None) for r in references))
        except Exception:  # a number with more digits than Python reads, say
            return 0.0

    def _reference(self, text: str) -> list[Any]:
        reference = self._parse(_as_latex(text))
        if not reference:
            raise RewardError(f"the reference answer {text[:80]!r} is not mathematics; use reward kind 'exact'")
        return reference

    def _parse(self, text: str) -> list[Any]:
        parsed: list[Any] = self._library.parse(text, parsing_timeout=None)
        return parsed


def _as_latex(text: str) -> str:
    """Put delimiters around a bare reference, since math-verify reads LaTeX only between them."""
    delimited = any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed"))
    return text if delimited else f"${text}$"
