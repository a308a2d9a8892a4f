"""Measures how fast a run trains and decodes: one definition each, for any stretch of steps.

* **Trained tokens/s** are trained tokens over wall-clock of the whole loop: rollout, rewards, training, publishing and
  what lies between them. Warm-up is no part of it, nor are evaluations during which no rollout is decoded.
* **Decoded tokens/s** are decoded tokens over the wall-clock in which rollouts are decoded: the rollout's part of a
  step, or all of it where generation continues while the trainer trains.

A row of ``metrics.jsonl`` holds both for its step. Of several steps they are means weighted by seconds, which is tokens
over seconds: where several batches are trained from one round, the mean of the steps' own speeds says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Values = Mapping[str, float]
"""Measurements of one step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A speed as recorded in the metrics of a step."""

    name: str
    seconds: tuple[str, ...]
    """Names of the metric that holds its seconds: the first of these that the step has."""

    def parts(self, step: Values) -> tuple[float, float] | None:
        """Return tokens and seconds of one step; ``None`` where they were not measured."""
        speed = step.get(self.name, math.nan)
        seconds = next((step[name] for name in self.seconds if name in step), math.nan)
        return (speed * seconds, seconds) if math.isfinite(speed) and math.isfinite(seconds) else None

    def over(self, steps: Sequence[Values]) -> float | None:
        """Return tokens over seconds of all steps together; ``None`` where nothing was measured."""
        found = [parts for step in steps if (parts := self.parts(step)) is not None]
        seconds = sum(s for _, s in found)
        return sum(tokens for tokens, _ in found) / seconds if seconds > 0 else None


TRAINED = Speed(name="perf/trained_tokens_per_s", seconds=("time/step_s",))
DECODED = Speed(name="rollout/tokens_per_s", seconds=("time/decoding_s", "time/rollout_s"))
"""Earlier runs wrote the seconds of the rollout alone."""


def of_step(*, trained_tokens: int, decoded_tokens: int, step_s: float, decoding_s: float) -> dict[str, float]:
    """Return both speeds of one step and the seconds they are over, as its metrics hold them."""
    return {
        TRAINED.seconds[0]: step_s,
        DECODED.seconds[0]: decoding_s,
        TRAINED.name: trained_tokens / step_s,
        DECODED.name: decoded_tokens / decoding_s if decoding_s > 0 else 0.0,
    }


def means(steps: Sequence[Values]) -> dict[str, float]:
    """Return means over several steps: speeds as defined above, everything else over the steps that have it."""
    speeds = {s.name: v for s in (TRAINED, DECODED) if (v := s.over(steps)) is not None}
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _mean(steps, name) for name in names} | speeds


def _mean(steps: Sequence[Values], name: str) -> float:
    found = [step[name] for step in steps if math.isfinite(step.get(name, math.nan))]
    return sum(found) / len(found) if found else math.nan
