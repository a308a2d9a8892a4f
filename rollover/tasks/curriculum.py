"""Chooses prompts by how often their responses were right: hard and easy ones less often, those in between always.

A source stays a pure function of (config, seed, index). The curriculum passes over some of its draws, so that the
cursor in the journal (``GroupOpened.cursor``) records each choice, and a restart repeats none. What a choice depends on
is a fold of the journal's events: the pass rates of the rows of earlier draws. Chance is a function of (seed, prompt).

A row counts as measured after ``min_visits`` draws that were scored. It is then drawn with a probability of
``max(revisit, 4 p (1 - p))`` for a pass rate of ``p``, to which each visit contributes twice what all before it do.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from rollover.errors import RunError
from rollover.rollout.events import BatchConsumed, Event, GroupDropped, GroupOpened, SampleScored
from rollover.tasks.config import CurriculumConfig
from rollover.types import Prompt

_MOST_PASSED_OVER = 10_000
"""Draws in a row that may be passed over, or two for each row if that is more: two epochs."""


@dataclass(slots=True)
class _Row:
    """The responses to one row so far, the earlier ones with less weight."""

    num_visits: int = 0
    num_responses: float = 0.0
    num_solved: float = 0.0
    last_prompt_id: str = ""

    def add(self, prompt_id: str, solved: bool) -> None:
        if prompt_id != self.last_prompt_id:
            self.num_visits += 1
            self.last_prompt_id = prompt_id
            self.num_responses /= 2
            self.num_solved /= 2
        self.num_responses += 1
        self.num_solved += solved

    @property
    def pass_rate(self) -> float:
        return self.num_solved / self.num_responses


class Curriculum:
    """Pass rates by row, and the choice that follows from them. Only ``apply`` changes what a choice depends on."""

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._rows: dict[str, _Row] = {}
        self._prompt_ids: dict[int, str] = {}
        """Prompts of the groups that are not in a batch yet."""
        self._last_opened = ""
        self._cursor = self._num_passed_over = self._num_in_a_row = 0

    def apply(self, event: Event) -> None:
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt, cursor=cursor):
                self._prompt_ids[group_id] = self._last_opened = prompt.prompt_id
                if cursor > self._cursor:
                    self._num_passed_over += cursor - self._cursor - 1
                    self._cursor = cursor
            case SampleScored(sample_id=sample_id, solved=bool(solved)):
                prompt_id = self._prompt_ids[sample_id.group]
                self._rows.setdefault(prompt_id.rpartition("@")[0], _Row()).add(prompt_id, solved)
            case GroupDropped(group_id=group_id):
                self._prompt_ids.pop(group_id, None)
            case BatchConsumed(group_ids=group_ids):
                for group_id in group_ids:
                    self._prompt_ids.pop(group_id, None)  # a replayed batch was consumed before

    def passes_over(self, prompt: Prompt) -> bool:
        """Return whether this draw of the source is left out. Raises ``RunError`` when nothing is left to draw."""
        row = self._rows.get(prompt.prompt_id.rpartition("@")[0])
        chance = random.Random(f"{self._seed}/curriculum/{prompt.prompt_id}").random()
        is_sibling = prompt.prompt_id == self._last_opened  # of samples that are trained one by one
        if row is None or row.num_visits < self._config.min_visits or is_sibling or chance < self._weight(row):
            self._num_in_a_row = 0
            return False
        self._num_in_a_row += 1
        if self._num_in_a_row >= max(_MOST_PASSED_OVER, 2 * len(self._rows)):
            raise RunError(
                f"tasks.curriculum passed over {self._num_in_a_row:,} prompts in a row, all solved or hopeless: raise"
                f" tasks.curriculum.revisit (now {self._config.revisit:g}), or leave the run as it is"
            )
        return True

    def metrics(self) -> dict[str, float]:
        """Return how many draws were passed over, how many rows were measured, solved and hopeless, and the mean of
        their pass rates."""
        rates = [row.pass_rate for row in self._rows.values() if row.num_visits >= self._config.min_visits]
        counts = Counter(rates)
        return {
            "curriculum/passed_over": float(self._num_passed_over),
            "curriculum/measured": float(len(rates)),
            "curriculum/solved": float(counts[1.0]),
            "curriculum/hopeless": float(counts[0.0]),
            **({"curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}),
        }

    def _weight(self, row: _Row) -> float:
        return max(self._config.revisit, 4 * row.pass_rate * (1 - row.pass_rate))
