"""The worker's view of its lease."""

from __future__ import annotations

from rollover.swarm.worker.session import LeaseWatch


def test_a_lease_counts_from_when_the_answered_message_was_sent() -> None:
    lease = LeaseWatch(15.0, 100.0)
    assert lease.interval_s == 5.0
    assert lease.ends_s == 115.0
    lease.sent(1, 105.0)
    lease.sent(2, 110.0)
    assert lease.ends_s == 115.0
    assert lease.answered(1)
    assert lease.ends_s == 120.0
    assert lease.answered(2)
    assert lease.ends_s == 125.0


def test_an_answer_to_nothing_puts_nothing_off() -> None:
    lease = LeaseWatch(15.0, 100.0)
    assert not lease.answered(1)
    assert lease.ends_s == 115.0
