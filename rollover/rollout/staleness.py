"""The staleness bound, kept by admission and by the choice of batches, never by throwing work away.

Let N groups make a batch, let batch s be trained by step s (which starts from version s), and let a group
*start* at version v, the weights that the engine which gets its first sample serves then, so that none of its tokens is
older than v: if the members of an engine change weights at different times, all of its calls go to members that serve v
or newer. The bound S holds when each group is consumed at a step ``s <= v + S``: its *deadline*. A sample that is
parked and resumed keeps it, and with it its prefix.

**Theorem.** Write D(t) for the number of started, unconsumed groups with deadline at most t, and s for the next
batch. If

* (admission) a group starts at version v only while the unconsumed groups, itself included, number at most
  ``N (v + S + 1 - s)``, and
* (choice) batch s takes, for each t >= s, at least ``D(t) - N (t - s)`` groups with deadline at most t,

then ``D(t) <= N (t - s + 1)`` for all t >= s at all times, every batch demanded by *choice* fits into N groups,
and no group misses its deadline.

*Proof.* The invariant holds with no groups. A start at version v adds one to D(t) for t >= v + S, where D(t) is at most
the number of all unconsumed groups, by admission at most ``N (v + S + 1 - s) <= N (t - s + 1)``; D(t) for smaller t is
unchanged. (Nothing is asked of the order of the versions: an older member may start a group after a newer one has.)
Consuming batch s by the rule leaves ``D(t) <= N (t - s)``, which is the invariant for s + 1; the rule can be met
because it asks for at most ``N (t - s + 1) - N (t - s) = N`` groups, and these demands are nested. For t = s it leaves
no group with deadline s. A group that is dropped lowers D. Groups that are open but not started have no deadline yet,
and counting them in *admission* only admits less. Publishing a version raises v, consuming lowers both sides by N: an
admission that was allowed stays allowed. QED

If the demanded groups are not ready yet, the batch waits for them: the price of a hard bound. Starting old work before
new (first in, first out) makes the wait rare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollover.rollout.ledger import Ledger
    from rollover.rollout.records import GroupRecord


def headroom(ledger: Ledger, *, batch_size: int, max_staleness: int) -> int:
    """Return the number of groups that may be opened now (*admission*)."""
    steps = ledger.policy_version + max_staleness + 1 - ledger.next_step
    return max(0, batch_size * steps - ledger.num_unconsumed)


def least_start_version(ledger: Ledger, *, batch_size: int, max_staleness: int) -> int:
    """Return the oldest version under which an open group may start now (*admission*, solved for v). Engines whose
    members serve several versions need it; a group's start version is then the version of the member that gets
    its first sample, and no later token of the group may be older."""
    num_batches = -(-ledger.num_unconsumed // batch_size)
    return max(0, ledger.next_step + num_batches - max_staleness - 1)


def choose_batch(
    ledger: Ledger, *, batch_size: int, max_staleness: int, order: Callable[[GroupRecord], int]
) -> tuple[int, ...] | None:
    """Return the ids of ``batch_size`` ready groups, lowest ``order`` first as far as *choice* leaves room; ``None``
    while too few are ready or a demanded one is not."""
    if len(ledger.ready) < batch_size:
        return None
    demands = _demands(ledger, batch_size, max_staleness)
    if demands is None:
        return None
    preferred = sorted(ledger.ready.values(), key=order)
    chosen: dict[int, None] = {}
    for version, demanded in demands.items():
        eligible = [g.group_id for g in preferred if _start(g) <= version]
        num_chosen_due = sum(i in chosen for i in eligible)
        for group_id in eligible:
            if num_chosen_due >= demanded:
                break
            if group_id not in chosen:
                chosen[group_id] = None
                num_chosen_due += 1
    assert len(chosen) <= batch_size, "a deadline was missed: groups were started beyond the headroom"
    for group in preferred:
        if len(chosen) == batch_size:
            break
        chosen[group.group_id] = None
    return tuple(sorted(chosen))


def _demands(ledger: Ledger, batch_size: int, max_staleness: int) -> dict[int, int] | None:
    """Return, by start version, how many groups of that version or older the next batch must take, oldest version
    first; ``None`` while they are not ready."""
    ready = ledger.starts_of_ready
    started = ledger.starts_of_open + ready
    demands: dict[int, int] = {}
    num_started = num_ready = 0
    for version in sorted(started):
        num_started += started[version]
        num_ready += ready[version]
        demanded = num_started - batch_size * (version + max_staleness - ledger.next_step)
        if demanded > num_ready:
            return None
        if demanded > 0:
            demands[version] = demanded
    return demands


def _start(group: GroupRecord) -> int:
    assert group.start_version is not None, "a ready group has started"
    return group.start_version
