"""A comparison of what a heartbeat says of a member's calls with what the coordinator believes, and the repairs.

Messages get lost, come twice, late or in another order. A heartbeat says what its member holds, and so every loss shows
as a disagreement:

===============================================  ==================================================================
the coordinator believes                         the heartbeat says, and the repair
===============================================  ==================================================================
the call is with the member, nothing has come    not held: ``Assign`` again
the call is with the member                      not held, though tokens have come: the call fails; others continue it
the response has come up to a position           more was sent, or the end was: ``Adopt``, which asks for it again
the call was adopted                             still offered: ``Adopt`` again
the call is to be stopped, or has ended          it continues: ``Abort`` again
the response is durable up to a position         held from before it: ``Ack`` again
the call is no longer wanted                     held: ``Release``
===============================================  ==================================================================

A heartbeat may be older than what both sides have sent meanwhile, so a disagreement counts only when two heartbeats in
a row show it, each newer than all before it, and nothing has moved in between.

What it keeps true: whatever is lost, as long as some heartbeats and answers get through, the two sides agree again. No
truth rests on the two beats: each repair may be needless, late or repeated without harm, since tokens have positions
and ids of calls are used once. Waiting for the second only saves traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from rollover.swarm.coordinator.machine.acknowledgements import Acknowledgements
from rollover.swarm.coordinator.machine.swarm_call import SwarmCall
from rollover.swarm.wire.messages import CallState, Heartbeat

MAX_REPAIRS = 3
"""Repairs of a call without a token in between, after which it fails and continues elsewhere."""


class Repair(Enum):
    """The message that repairs a disagreement.

    Example: ``Repair.RESEND`` asks for tokens again with ``Adopt``.
    """

    ASSIGN = "assign"
    RESEND = "resend"
    FAIL = "fail"
    ABORT = "abort"
    ACK = "ack"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One that a heartbeat has shown.

    Example: ``Disagreement(Repair.RESEND, "a#1.", 300)`` twice in a row asks for ``a#1.`` again from position 300.
    """

    repair: Repair
    held: str
    """The id under which the member holds the call."""
    position: int = 0
    """Position that the call has reached here: one that moves on is not stuck."""


def disagreements(
    heartbeat: Heartbeat,
    calls: Iterable[tuple[str, SwarmCall]],
    acknowledgements: Acknowledgements,
    offers: Iterable[str],
) -> dict[str, Disagreement]:
    """Return by call id what the heartbeat shows.

    ``calls``: those that are believed to be with the member; ``offers``: ids of the calls that it may keep for samples
    that have not been asked for yet.
    """
    states = {state.call_id: state for state in heartbeat.calls}
    found = {}
    for call_id, call in calls:
        state = states.pop(call_id, None) or states.pop(call.held_as, None)
        if state is None and not heartbeat.has_all_calls:
            continue
        holding = acknowledgements.get(call_id)
        if (each := _of_call(call_id, call, state, 0 if holding is None else holding.acked)) is not None:
            found[call_id] = each
    for offer in offers:
        states.pop(offer, None)
    for call_id, state in states.items():
        if (each := _of_other(state, acknowledgements)) is not None:
            found[call_id] = each
    return found


def confirmed(found: dict[str, Disagreement], suspected: dict[str, Disagreement]) -> Iterator[tuple[str, Disagreement]]:
    """Yield those that two heartbeats in a row have shown, and take them out of ``found``: a repair made now has two
    heartbeats' time to take effect."""
    for call_id in [c for c, each in found.items() if suspected.get(c) == each]:
        yield call_id, found.pop(call_id)


def _of_call(call_id: str, call: SwarmCall, state: CallState | None, acked: int) -> Disagreement | None:
    position = call.stream.position
    if state is None:
        lost_at_once = not call.held_as and position == call.start
        return Disagreement(Repair.ASSIGN if lost_at_once else Repair.FAIL, call_id, position)
    if state.start > position and not state.is_offered:
        return Disagreement(Repair.FAIL, state.call_id, position)
    if state.is_offered or state.sent > position or state.has_ended:
        return Disagreement(Repair.RESEND, state.call_id, position)
    if call.is_aborted:
        return Disagreement(Repair.ABORT, state.call_id)
    if state.start < acked:
        return Disagreement(Repair.ACK, state.call_id, acked)
    return None


def _of_other(state: CallState, acknowledgements: Acknowledgements) -> Disagreement | None:
    """Return what is wrong with a call that is not with the member any more."""
    holding = acknowledgements.get(state.call_id)
    if holding is None:
        return Disagreement(Repair.RELEASE, state.call_id)
    if not state.has_ended and not state.is_offered:
        return Disagreement(Repair.ABORT, state.call_id)
    return Disagreement(Repair.ACK, state.call_id, holding.acked) if state.start < holding.acked else None
