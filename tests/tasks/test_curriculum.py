"""Which draws a curriculum passes over, from events alone."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.batch import WasteCause
from rollover.errors import DataError, RunError
from rollover.rollout.events import BatchConsumed, Event, GroupDropped, GroupOpened, SampleScored
from rollover.tasks import curriculum as module
from rollover.tasks.config import CurriculumConfig, TasksConfig
from rollover.tasks.curriculum import Curriculum
from rollover.tasks.open import train_source
from rollover.tasks.sources import ReasoningGymConfig
from rollover.types import Prompt, SampleId
from tests.environments.words import char_tokenizer


def prompt(row: int, epoch: int) -> Prompt:
    return Prompt(prompt_id=f"s/{row}@{epoch}", token_ids=(1,), text="", source="s")


class History:
    """Visits to rows, each a group whose samples were solved or not."""

    def __init__(self, **config: Any) -> None:
        self.curriculum = Curriculum(CurriculumConfig(**config), seed=7)
        self.events: list[Event] = []
        self.num_groups = 0

    def visit(self, row: int, epoch: int, *solved: bool | None, cursor: int = 0) -> None:
        group = self.num_groups
        self.num_groups += 1
        self._apply(GroupOpened(0.0, group, prompt(row, epoch), len(solved), cursor))
        for index, one in enumerate(solved):
            self._apply(SampleScored(0.0, SampleId(group, index), 0.0, solved=one))
        end = BatchConsumed(0.0, 0, (group,)) if row % 2 else GroupDropped(0.0, group, WasteCause.FAILED, False)
        self._apply(end)

    def _apply(self, event: Event) -> None:
        self.events.append(event)
        self.curriculum.apply(event)

    def share_drawn(self, row: int, num_epochs: int = 2000) -> float:
        passed = sum(self.curriculum.passes_over(prompt(row, 10 + epoch)) for epoch in range(num_epochs))
        return 1 - passed / num_epochs


@pytest.mark.parametrize(
    ("visits", "share"),
    [
        ([(1, 1, 1, 1)], 1.0),  # one visit does not decide
        ([(1, 1, 1, 1), (1, 1, 1, 1)], 0.1),
        ([(0, 0, 0, 0), (0, 0, 0, 0)], 0.1),
        ([(0, 1, 0, 1), (0, 0, 1, 1)], 1.0),
        ([(0, 0, 0, 0), (1, 1, 1, 0)], 1.0),  # 3 of 4 count twice: p = 3 / 6
        ([(0, 0, 0, 0), (0, 0, 0, 1)], 4 * (1 / 6) * (5 / 6)),
        ([(None, None), (None, None)], 1.0),  # rewards that say nothing about passing
    ],
)
def test_a_row_is_drawn_as_often_as_its_pass_rate_is_in_the_middle(visits: list[Any], share: float) -> None:
    history = History(min_visits=2, revisit=0.1)
    for epoch, solved in enumerate(visits):
        history.visit(3, epoch, *(None if one is None else bool(one) for one in solved))
    assert history.share_drawn(3) == pytest.approx(share, abs=0.03)
    assert history.share_drawn(4) == 1.0, "a row that was not visited"


def test_the_fold_of_the_same_events_makes_the_same_choices() -> None:
    history = History(min_visits=1, revisit=0.2)
    for number in range(60):
        history.visit(number % 7, number // 7, bool(number % 3), bool(number % 2))
    again = Curriculum(CurriculumConfig(min_visits=1, revisit=0.2), seed=7)
    other = Curriculum(CurriculumConfig(min_visits=1, revisit=0.2), seed=8)
    for event in history.events:
        again.apply(event)
        other.apply(event)
    draws = [prompt(row, epoch) for epoch in range(20, 60) for row in range(7)]

    def choices(of: Curriculum) -> list[bool]:
        return [of.passes_over(one) for one in draws]

    assert choices(again) == choices(history.curriculum) != choices(other)


def test_the_siblings_of_a_draw_are_never_separated() -> None:
    history = History(min_visits=1, revisit=0)
    history.visit(3, 0, False, False)
    assert history.curriculum.passes_over(prompt(3, 1))
    assert not history.curriculum.passes_over(prompt(3, 0))


def test_metrics_count_the_draws_that_the_cursor_skipped() -> None:
    history = History(min_visits=1)
    history.visit(0, 0, True, True, cursor=1)
    history.visit(1, 0, False, False, cursor=2)
    history.visit(2, 0, True, False, cursor=5)
    history.visit(2, 0, True, False, cursor=5)
    assert history.curriculum.metrics() == {
        "curriculum/passed_over": 2.0,
        "curriculum/measured": 3.0,
        "curriculum/solved": 1.0,
        "curriculum/hopeless": 1.0,
        "curriculum/pass_rate": 0.5,
    }


def test_nothing_left_to_draw_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PASSED_OVER", 5)
    history = History(min_visits=1, revisit=0)
    history.visit(0, 0, True)
    assert [history.curriculum.passes_over(prompt(0, epoch)) for epoch in range(1, 5)] == [True] * 4
    with pytest.raises(RunError, match=r"passed over 5 .*: raise tasks.curriculum.revisit \(now 0\), or leave"):
        history.curriculum.passes_over(prompt(0, 5))


def test_what_is_left_to_draw_is_found_behind_many_solved_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PASSED_OVER", 5)
    history = History(min_visits=1, revisit=0)
    for row in range(10):
        history.visit(row, 0, True, row < 9)
    assert [history.curriculum.passes_over(prompt(row, 1)) for row in range(10)] == [True] * 9 + [False]


def test_a_source_whose_rows_never_come_again_is_refused() -> None:
    config = TasksConfig(train=(ReasoningGymConfig(name="chain_sum"),), curriculum=CurriculumConfig())
    with pytest.raises(DataError, match=r"source 'chain_sum' has none: set its limit"):
        train_source(config, char_tokenizer(), seed=0)
