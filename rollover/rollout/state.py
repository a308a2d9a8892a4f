"""Everything known about a run's rollouts: two folds of its events, and the view of them that strategies get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollover.batch import Group
from rollover.rollout.events import Event
from rollover.rollout.ledger import Ledger
from rollover.rollout.records import SCORED
from rollover.rollout.statistics import Statistics


@dataclass(frozen=True, slots=True)
class View:
    """The state that a strategy can read but not change: facts and statistics.

    Examples:
        At the start of a run nothing is open, and no length is known:

        >>> view = RolloutState().view
        >>> view.ledger.num_unconsumed, view.ledger.next_step, view.statistics.lengths.groups
        (0, 0, ())
    """

    ledger: Ledger
    statistics: Statistics

    def groups(self, group_ids: Sequence[int]) -> tuple[Group, ...]:
        """Return these groups as the trainer gets them: their scored samples, with the baselines that were known when
        the groups were opened."""
        entries, baselines = self.ledger.groups, self.statistics.baselines
        return tuple(
            Group(
                group_id=i,
                prompt=entries[i].prompt,
                trajectories=tuple(s.trajectory for s in entries[i].samples if s.state is SCORED),
                baseline=baselines.get(i),
            )
            for i in group_ids
        )


class RolloutState:
    """The ledger and the statistics of a run, which ``apply`` advances together.

    Examples:
        ``RolloutState()`` begins a run, and ``restart`` returns the state of a run that is resumed. The events of a
        journal restore the state of its writer:

        >>> journal = Journal(Path(":memory:"))
        >>> state = RolloutState(event for _, event in journal.read())
        >>> state.ledger.next_step
        0
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.ledger = Ledger()
        self.statistics = Statistics()
        self.view = View(self.ledger, self.statistics)
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        self.ledger.apply(event)
        self.statistics.apply(event, self.ledger)
