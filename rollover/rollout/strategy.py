"""A strategy decides which rollouts are launched, stopped, resumed and trained.

It is pure: no clock, no engine, no asyncio, no state. From a ``View``, its methods determine how many groups to open,
which samples to start in what order and for how many tokens, and which ready groups make a batch; ``on_full``
determines what happens to running samples once a batch is full. The scheduler asks after every event, whichever shell
drives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from rollover.rollout import staleness
from rollover.types import SampleId

if TYPE_CHECKING:
    from rollover.rollout.records import GroupRecord
    from rollover.rollout.state import View


class OnFull(Enum):
    """The fate of running samples once a batch is full.

    Examples:
        >>> engine = Capabilities(max_running=16, max_context_tokens=4096)
        >>> strategy("april", engine).on_full is OnFull.PARK
        True
    """

    WAIT = auto()
    """They run to their end first."""
    PARK = auto()
    """They are stopped, keep their tokens, and resume in a later round."""
    DISCARD = auto()
    """They are stopped and their groups dropped; the prompts return to the source."""
    KEEP = auto()
    """They keep running while the trainer trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy trains groups first in, first out, under the staleness bound; subclasses decide how many to start and
    when.

    Examples:
        A strategy of your own, which keeps two batches open and parks unfinished samples:

        >>> class TwoBatches(Strategy):
        ...     on_full = OnFull.PARK
        ...     def groups_to_open(self, view):
        ...         return 2 * self.batch_size - view.ledger.num_unconsumed
        >>> TwoBatches(batch_size=4, group_size=2, max_staleness=1).groups_to_open(RolloutState().view)
        8
    """

    batch_size: int
    """Groups per batch."""
    group_size: int
    """Samples per group."""
    num_siblings: int = 1
    """Number of groups that share a prompt: the samples per prompt if each is a group of its own, else 1."""
    max_staleness: int

    on_full = OnFull.WAIT

    def groups_to_open(self, view: View) -> int:
        """Return the number of groups to admit now."""
        raise NotImplementedError

    def takes_returned(self, view: View) -> bool:
        """Return whether prompts of discarded groups are opened now, before new ones are drawn."""
        return True

    def samples_to_start(self, view: View) -> Iterable[SampleId]:
        """Return waiting and parked samples in the order in which to run them; the driver takes as many as the engine
        holds. The oldest group comes first, and so started samples before new ones: no group waits behind a newer
        one."""
        return view.ledger.startable()

    def select_batch(self, view: View) -> tuple[int, ...] | None:
        """Return the ids of the groups of the next batch, or ``None`` while it is not full."""
        return staleness.choose_batch(
            view.ledger, batch_size=self.batch_size, max_staleness=self.max_staleness, order=self.preference
        )

    def token_budget(self, view: View, sample_id: SampleId) -> int | None:
        """Return the tokens that the sample may decode before it is parked; ``None`` lets it run to its end."""
        return None

    def surplus(self, view: View) -> Sequence[int]:
        """Return the ids of complete groups to drop, those of the batch aside, now that one is consumed: none, since
        they lead the next one."""
        return ()

    def preference(self, group: GroupRecord) -> int:
        """Return the key by which ready groups are sorted for training, in ascending order."""
        return group.group_id

    def headroom(self, view: View) -> int:
        """Return the number of groups that the staleness bound admits now."""
        return staleness.headroom(view.ledger, batch_size=self.batch_size, max_staleness=self.max_staleness)

    def least_start_version(self, view: View) -> int:
        """Return the oldest version under which the staleness bound lets a group start now."""
        return staleness.least_start_version(view.ledger, batch_size=self.batch_size, max_staleness=self.max_staleness)
