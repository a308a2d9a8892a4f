"""How the responses of one task source are scored: settings and what contradicts among them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from rollover.settings.changes import Changeable

Extraction = Literal["whole", "hashes", "tag", "last_line", "pattern"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How one source's responses become numbers."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["verifier", "exact", "math_verify", "function"] = "verifier"
    """``verifier``: reasoning-gym's own scoring of its task. ``exact``: equal up to white space.
    ``math_verify``: equal as mathematics (1/2 = 0.5 = \\frac{1}{2}). ``function``: the user's own."""
    function: str | None = None
    """``"module:function"``, called as ``f(prompts, completions, completion_ids=..., **columns)`` with lists
    of one element each; returns a list, array or tensor of one number, at most 1e15. May be ``async``. ``None``, NaN
    and infinity fail the sample, which then counts as waste. As in TRL, ``prompts[0]`` and ``completions[0]`` are texts
    where the prompt column holds text; where it holds messages, ``prompts[0]`` is a list of messages and
    ``completions[0]`` a list of one message, ``{"role": "assistant", "content": ...}``. Only for
    ``kind = "function"``."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for ``function``. They come before columns of the same name, and what every function
    is given comes before both."""
    extract: Extraction | None = None
    """Where in the response the answer stands. ``tag``: in the last ``<answer>...</answer>``. ``hashes``: on
    the line after the last ``####``. ``last_line``: the last line that is not empty. ``whole``: everything.
    ``pattern``: the last match of ``answer_pattern``. A response without an answer scores as an empty one.
    Unset means ``tag`` for ``verifier`` and ``exact``; the other kinds find the answer themselves."""
    answer_pattern: str | None = None
    """Regular expression; its first group (or the whole match) is the answer. Only for ``pattern``."""
    reference_extract: Literal["whole", "hashes", "last_line"] = "whole"
    """Where in the answer column the reference answer stands: ``hashes`` suits worked solutions that end in
    ``#### 72``. For ``exact`` and ``math_verify``."""
    timeout_s: Changeable[float] = 10.0
    """Seconds one scoring may take; then its process is killed, with all it has started. When the last retry is late
    too, a ``function`` has failed its sample, and every other kind scores 0: a response that cannot be judged is not
    right, and leaving it out would favour easy ones."""
    workers: Changeable[int] = 2
    """Processes that score; the sources share one pool, as large as the largest number asked for. 0 scores on
    the event loop: right for verifiers of a few microseconds, which then must not hang."""
    retries: Changeable[int] = 1
    """How often a scoring that raised or timed out is tried again before its sample counts as failed."""
    pass_score: Changeable[float] = 1.0
    """A response with at least this reward counts as solved in pass@k."""

    def __post_init__(self) -> None:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError(f"reward.function goes with kind = 'function': got {self.function!r}, {self.kind!r}")
        if self.function is not None and not re.fullmatch(r"[\w.]+:\w+", self.function):
            raise ValueError(f"reward.function must read 'module:function', got {self.function!r}")
        if self.params and self.kind != "function":
            raise ValueError(f"reward.params are for kind = 'function' only, got kind {self.kind!r}")
        if given := sorted({"prompts", "completions", "completion_ids"} & self.params.keys()):
            raise ValueError(f"reward.params.{given[0]} cannot be set: it is what every reward function is given")
        if self.extract is not None and self.kind not in ("verifier", "exact"):
            raise ValueError(f"reward.extract has no effect with kind {self.kind!r}: leave it out")
        if self.reference_extract != "whole" and self.kind not in ("exact", "math_verify"):
            raise ValueError(f"reward.reference_extract has no effect with kind {self.kind!r}: leave it out")
        if (self.extract == "pattern") != (self.answer_pattern is not None):
            raise ValueError("reward.answer_pattern and reward.extract = 'pattern' go together: set both or none")
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise ValueError(
                    f"reward.answer_pattern {self.answer_pattern!r} is no regular expression: {error}"
                ) from None
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"reward.timeout_s must be above 0 and finite, got {self.timeout_s}")
        if not isfinite(self.pass_score):
            raise ValueError(f"reward.pass_score must be a finite number, got {self.pass_score}")
        if self.workers < 0:
            raise ValueError(f"reward.workers must be at least 0 (0: on the event loop), got {self.workers}")
        if self.workers == 0 and self.kind == "math_verify":
            raise ValueError("reward.workers must be at least 1 for 'math_verify': only a process can be stopped")
        if self.retries < 0:
            raise ValueError(f"reward.retries must be at least 0, got {self.retries}")

    @property
    def extraction(self) -> Extraction:
        """``extract`` with its default filled in."""
        return self.extract or "tag"

    @property
    def knows_the_answer(self) -> bool:
        """Whether the reward is our own comparison with a known answer, and not the judgement of a user's function."""
        return self.kind != "function"

    @property
    def needs_answer(self) -> bool:
        """Whether each row must hold a reference answer."""
        return self.kind in ("exact", "math_verify")
