"""In push-pull mode a member that is too slow for what is due gets none of it, and has other work."""

from __future__ import annotations

import pytest

from rollover.engine.base import FirstCall
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect, Fail, Send
from rollover.swarm.wire.messages import Assign
from tests.swarm.kit import LENGTH, TTL_S, ModelWorker, assert_crowd_is_current, head, request
from tests.swarm.test_coordinator import beat, coordinator, decodes, join

STEP_S = 10.0
NOW_S = 2 * STEP_S
"""Version 2 is published. Of a response of unknown length 20 tokens are expected: 20 s at the phone."""


class Swarm:
    """A server that decodes 50 tokens a second of each call, and a phone that decodes one."""

    def __init__(self, *, exact: bool = False) -> None:
        self.hub: Coordinator = coordinator(exact=exact)
        self.server, self.phone = ModelWorker("server", room=8), ModelWorker("phone")
        for worker, speed in ((self.server, 50.0), (self.phone, 1.0)):
            join(self.hub, worker)
            self.hub.received(worker.lease, beat(mean_running=1.0, tokens_per_s=speed), 0.0)
        for version in range(3):
            self.hub.published(head(version), version * STEP_S)
            for worker in (self.server, self.phone):
                self.hub.received(worker.lease, worker.change(head(version)), version * STEP_S)

    def got(self, effects: list[Effect]) -> list[str]:
        """Who got a call."""
        names = {self.server.lease: self.server, self.phone.lease: self.phone}
        given = [(names[e.lease], e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Assign)]
        for worker, assign in given:
            worker.got(assign)
        return [worker.name for worker, _ in given]

    def opened(self, sample: str, *, due: int | None = None, num_done: int = 0) -> list[str]:
        return self.got(self.hub.opened(request(sample, num_done=num_done, due_version=due)))

    def fill_the_server(self) -> None:
        assert [self.opened(f"b{i}.0", due=3) for i in range(8)] == [["server"]] * 8


def test_a_phone_gets_only_calls_that_it_can_finish_in_time() -> None:
    swarm = Swarm()
    swarm.fill_the_server()
    assert swarm.opened("g0.0", due=3) == [], "10 s are left"
    assert swarm.opened("g1.0", due=2) == [], "a step waits for it already"
    assert swarm.opened("g2.0", due=3, num_done=LENGTH - 4) == ["phone"], "2 s of work"
    assert swarm.opened("g3.0", due=4) == ["phone"], "20 s are left"
    assert swarm.opened("g4.0") == ["phone"], "no step waits for an evaluation's, as far as is known"
    assert swarm.got(decodes(swarm.hub, swarm.server, "b0.0#0.", LENGTH, NOW_S)) == ["server"]
    assert swarm.hub.num_waiting == 1 and "g0.0#0." in swarm.server.calls
    swarm.hub.received(swarm.phone.lease, beat(2), NOW_S + 1.0)
    assert swarm.opened("g5.0", due=4) == [], "19 s are left"
    assert_crowd_is_current(swarm.hub)


@pytest.mark.parametrize(("max_staleness", "version"), [(0, None), (1, None), (2, 2), (None, 2)])
def test_a_group_starts_at_the_phone_only_if_its_step_is_far(max_staleness: int | None, version: int | None) -> None:
    swarm = Swarm()
    swarm.fill_the_server()
    takes_one = swarm.hub.takes_one(FirstCall(0, LENGTH, max_staleness=max_staleness))
    found = swarm.hub.reserve("g0.0.", FirstCall(0, LENGTH, max_staleness=max_staleness), until_s=60.0)
    assert (takes_one, found) == (version is not None, version)


def test_what_is_due_does_not_wait_for_a_member_that_is_gone() -> None:
    swarm = Swarm()
    swarm.fill_the_server()
    assert swarm.opened("g0.0", due=3) == []
    swarm.hub.received(swarm.phone.lease, beat(2), NOW_S + TTL_S)
    gone = swarm.hub.expire(NOW_S + TTL_S + 1.0)
    assert len([e for e in gone if isinstance(e, Fail)]) == 8
    effects = swarm.hub.received(swarm.phone.lease, beat(3), NOW_S + TTL_S + 1.0)
    assert swarm.got(effects) == ["phone"], "late is better than never"
