"""``kind = "exact"``: 1 for an answer that equals the reference, else 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.rewards.extraction import (
    MARKED,
    ExtractionSettings,
    ReferenceExtraction,
    extract_answer,
    reference_texts,
)
from rollover.errors import RewardError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactConfig(ExtractionSettings):
    """Scores 1 for an answer that equals the reference, or one of a list of references, up to white space; else 0.

    Example: with the reference ``"Paris, France"``, ``<answer> Paris,  France </answer>`` scores 1 and
    ``<answer>paris, France</answer>`` 0.
    """

    compares_answer: ClassVar[bool] = True

    kind: Literal["exact"] = "exact"
    """``"exact"`` chooses this reward."""
    reference_extract: ReferenceExtraction = "whole"
    """Location of the reference answer in the answer column: ``hashes`` suits worked solutions that end in
    ``#### 72``."""

    def references(self, spec: RewardSpec, columns: Mapping[str, Any]) -> list[str]:
        texts = reference_texts(spec, columns, self.reference_extract)
        marked = MARKED.get(self.extract, "")
        for text in map(_squeezed, texts if marked else ()):
            if extract_answer(marked.format(text), self.extract) != text:
                raise RewardError(
                    f"no answer that reward.extract = {self.extract!r} finds equals the reference {text[-60:]!r}; set"
                    " reward.reference_extract"
                )
        return texts

    def build(self, spec: RewardSpec) -> ExactReward:
        return ExactReward(self, spec)


@dataclass(frozen=True, slots=True)
class ExactReward:
    """Compares the answer with the references, character by character except for white space.

    Example: with ``ExactConfig(extract="whole")`` and the reference ``"Paris, France"``, the response ``" Paris, France
    "`` scores 1.0 and ``"paris, France"`` 0.0.
    """

    config: ExactConfig
    spec: RewardSpec

    def score(self, sample: RewardSample) -> float:
        answer = self.config.answer(sample)
        if answer is None:
            return 0.0
        references = self.config.references(self.spec, sample.columns)
        return float(any(_squeezed(answer) == _squeezed(text) for text in references))


def _squeezed(text: str) -> str:
    return " ".join(text.split())
