"""How the chaos campaign judges whether a killed process is back in time."""

from __future__ import annotations

from dataclasses import replace

from rollover.swarm.wire.messages import Ack, Assign, Decoded, pack_ids, pack_logprobs
from tests.swarm.chaos.record import WireRecord
from tests.swarm.chaos.returns import GIVE_UP_S, Kept, Marks, Return, marks

BACK = Return(name="phone", is_watched=True, outcome="back", seconds=2.0)


def test_a_member_is_back_when_its_new_tokens_are_acknowledged() -> None:
    record = WireRecord(
        hellos=[(3.0, "phone"), (10.6, "phone")],
        welcomes=[(3.1, "phone"), (10.2, "phone"), (10.7, "phone")],  # the second was on its way when it was killed
        servings=[(3.5, "phone", 4), (11.0, "laptop", 5), (11.2, "phone", 5)],
        acks=[(9.0, "phone", 8.0), (10.8, "phone", 10.1), (11.4, "laptop", 11.3), (11.9, "phone", 11.5)],
    )
    assert rounded(marks(record, "phone", 10.0)) == Marks(welcomed_s=0.7, serving_s=1.2, acked_s=1.9)
    assert marks(record, "tablet", 10.0) == Marks()


def test_a_coordinator_is_back_with_the_first_session_of_any_member() -> None:
    record = WireRecord(
        hellos=[(12.0, "phone"), (12.5, "laptop")],
        welcomes=[(12.7, "laptop"), (12.9, "phone")],
        acks=[(10.1, "laptop", 9.9), (13.0, "phone", 10.1), (13.5, "laptop", 13.2)],
    )
    assert rounded(marks(record, "coordinator", 10.0)) == Marks(welcomed_s=2.7, acked_s=3.5)


def test_tokens_count_once_and_only_for_the_member_that_sent_them() -> None:
    record = WireRecord()
    record.down("phone", assigned(given=(5, 6)))
    record.down("phone", Ack(call_id="c", offset=2))
    assert record.acks == [], "it was given these"
    record.up("phone", decoded(2, (7, 8)))
    record.down("laptop", Ack(call_id="c", offset=4))
    assert record.acks == [], "another member has sent these"
    record = WireRecord()
    record.down("phone", assigned(given=(5, 6)))
    record.up("phone", decoded(2, (7, 8)))
    for offset in (3, 3, 4):
        record.down("phone", Ack(call_id="c", offset=offset))
    assert [who for _, who, _ in record.acks] == ["phone", "phone"]


def test_a_late_process_misses_the_limit_unless_it_was_hit_again() -> None:
    returns = [
        *(replace(BACK, seconds=seconds) for seconds in (1.0, 2.0, 3.0, 6.5)),
        replace(BACK, outcome="late", seconds=GIVE_UP_S),
        replace(BACK, outcome="run over", seconds=8.0),  # it had its time, and was not back
        replace(BACK, outcome="run over", seconds=0.5),
        replace(BACK, outcome="hit again", seconds=0.5),
        replace(BACK, outcome="late", seconds=GIVE_UP_S, is_watched=False),
    ]
    assert Kept.of(returns, limit_s=6.0) == Kept(
        limit_s=6.0, num=6, missed=3, median_s=3.0, p95_s=GIVE_UP_S, max_s=GIVE_UP_S, num_hit_again=1, num_run_over=1
    )
    assert Kept.of([], limit_s=6.0).median_s is None


def rounded(found: Marks) -> Marks:
    def near(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds, 6)

    return Marks(welcomed_s=near(found.welcomed_s), serving_s=near(found.serving_s), acked_s=near(found.acked_s))


def assigned(given: tuple[int, ...]) -> Assign:
    return Assign(
        call_id="c",
        sample_key="g0.0.",
        prompt_key="g0",
        prompt_ids=pack_ids((1,)),
        response_ids=pack_ids(given),
        max_new_tokens=8,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        least_version=0,
    )


def decoded(offset: int, ids: tuple[int, ...]) -> Decoded:
    logprobs = pack_logprobs([-1.0] * len(ids))
    return Decoded(call_id="c", offset=offset, token_ids=pack_ids(ids), logprobs=logprobs, version=0, kv_version=0)
