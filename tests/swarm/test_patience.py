"""Calls are held back for faster members for a while, and no longer than the fastest free one would have taken."""

from __future__ import annotations

import pytest

from rollover.swarm.coordinator.machine.patience import FORGOTTEN_S, MAX_KINDS, CallPatience
from rollover.swarm.wire.messages import Assign, Serving
from tests.swarm.kit import LENGTH, assert_ranked, head, request
from tests.swarm.test_coordinator import beat, coordinator, decoded, sent
from tests.swarm.test_relief import given, member

EXPECTED_S = LENGTH / 2
"""A response of unknown length at a token per second."""


def test_the_time_of_a_kind_begins_with_the_first_question_and_again_with_each_call_that_is_given_as_wanted() -> None:
    patience = CallPatience()
    assert [patience.waited_s("a", now_s) for now_s in (10.0, 12.0, 25.0)] == [0.0, 2.0, 15.0]
    assert patience.waited_s("b", 25.0) == 0.0, "another kind"
    patience.given("a", 30.0)
    assert [patience.waited_s(kind, 32.0) for kind in "ab"] == [2.0, 7.0]
    assert patience.waited_s("a", 32.0 + FORGOTTEN_S + 1) == 0.0, "nobody has asked about it for long"


def test_few_kinds_are_remembered() -> None:
    patience = CallPatience()
    for number in range(MAX_KINDS + 1):
        patience.waited_s(number, 0.0)
    assert patience.waited_s(MAX_KINDS, 1.0) == 1.0 and patience.waited_s(0, 1.0) == 0.0


@pytest.mark.parametrize("exact", [False, True])
def test_a_member_that_says_it_is_fast_and_fetches_for_ever_holds_no_call_back_for_longer_than_it_takes(
    exact: bool,
) -> None:
    hub = coordinator(exact=exact)
    liar, honest = member(hub, "liar", 1e6), member(hub, "honest", 1.0)
    for worker, prepare_s in ((liar, EXPECTED_S), (honest, 1.0)):
        hub.received(worker.lease, Serving(version=0, manifest=head(0).manifest, prepare_s=prepare_s), 0.0)
    hub.published(head(1), 0.0)
    hub.received(honest.lease, honest.change(head(1)), 5.0)
    assert hub.opened(request("g0.0", least_version=1, due_version=1)) == [], "the liar needs 15 s more, it says"
    assert hub.reserve("g1.0.", 1, LENGTH, max_staleness=0, until_s=99.0) is None
    beats = ((s, hub.received(honest.lease, beat(s), float(s))) for s in range(6, 41))
    given_s = next(s for s, effects in beats if sent(effects, Assign))
    assert given_s == 5.0 + EXPECTED_S and hub.num_waiting == 0
    assert hub.reserve("g1.0.", 1, LENGTH, max_staleness=0, until_s=99.0) == 1


def test_a_member_that_is_as_fast_as_it_says_is_waited_for_again_and_again() -> None:
    hub = coordinator(exact=True)
    server, phone = member(hub, "server", 50.0, room=1), member(hub, "phone", 1.0, room=1)
    assert given(hub.opened(request("g0.0")), server, phone) is server
    for number in range(1, 60):
        assert hub.opened(request(f"g{number}.0")) == [], "the server is done with both before the phone is with one"
        (piece,) = decoded(server, f"g{number - 1}.0#0.", LENGTH)
        assert given(hub.received(server.lease, piece, float(number)), server, phone) is server
    assert_ranked(hub)
