"""What a worker waits for: the end of its lease, and the next attempt."""

from __future__ import annotations

from random import Random

from rollover.swarm.worker.session import LeaseWatch
from rollover.swarm.worker.waiting import BackOff


class Fixed(Random):
    """Draws one number."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def random(self) -> float:
        return self.value


def test_the_longest_wait_doubles_up_to_its_limit() -> None:
    rule = BackOff(first_s=0.5, most_s=10.0)
    assert [rule.wait_s(n, Fixed(1.0)) for n in (1, 2, 3, 4, 5, 6, 7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_hundred_workers_that_fail_together_do_not_come_back_together() -> None:
    rule = BackOff(first_s=1.0, most_s=10.0)
    waits = sorted(rule.wait_s(5, Random(seed)) for seed in range(100))
    assert waits[0] >= 5.0 and waits[-1] <= 10.0
    assert max(sum(at <= wait < at + 0.5 for wait in waits) for at in waits) < 25


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
