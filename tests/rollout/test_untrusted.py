"""Tokens of an engine that is no longer trusted leave by one door, whatever they were doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.batch import WasteCause
from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import EngineMismatch
from rollover.rollout.events import GroupDropped
from rollover.rollout.ledger import Ledger
from rollover.rollout.records import FAILED
from rollover.run.weight_sync import WeightSync
from tests.engine.fake import FakeEngine
from tests.rollout.kit import NAMES, Rig, assert_trainable, lognormal, make_rig, with_stop
from tests.virtual_time import VirtualClock


class Two(FakeEngine):
    """Two members: every other sample is decoded by ``b``, as long as it is there."""

    has_b = True

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        name = "b" if request.seed % 2 and self.has_b else "a"
        async for chunk in super().generate(request):
            yield replace(chunk, engine=name)


def make_two(name: str) -> Rig:
    engine = Two(lognormal(8, 1.0), auto=True, clock=VirtualClock())
    return make_rig(name, engine=engine, rollout_batch_size=3)


def versions_of(engine: str, ledger: Ledger) -> set[int]:
    """Under which it sampled what may still be trained."""
    samples = (s for g in ledger.unconsumed() for s in g.samples if s.state is not FAILED)
    return {s.policy_version for sample in samples for s in sample.segments if s.engine == engine and s.token_ids}


@pytest.mark.parametrize("name", NAMES)
async def test_tokens_of_a_distrusted_engine_are_not_trained_but_sampled_anew(name: str) -> None:
    rig = make_two(name)

    def take_out() -> None:
        assert not rig.ledger.running and not versions_of("b", rig.ledger)
        rig.engine.has_b = False  # type: ignore[attr-defined]

    batches = await rig.train(2, train_s=2.0)
    assert any(s.engine == "b" for b in batches.values() for t in b.trajectories for s in t.segments)
    waste, before = rig.ledger.tokens.wasted, len(rig.events)
    num_tokens = await rig.driver.drop_tokens_of("b", take_out)
    drops = [e for e in rig.events[before:] if isinstance(e, GroupDropped)]
    assert all(e.cause is WasteCause.UNTRUSTED_ENGINE and e.prompt_returned for e in drops)
    assert waste[WasteCause.UNTRUSTED_ENGINE] == num_tokens and (num_tokens > 0) == bool(drops)
    returned = {p.prompt_id for p in rig.ledger.returned}
    later = await with_stop(rig, rig.train(6, train_s=2.0))
    assert_trainable(batches | later, rig)
    assert all(s.engine != "b" for b in later.values() for t in b.trajectories for s in t.segments if s.token_ids)
    assert returned.isdisjoint({p.prompt_id for p in rig.ledger.returned}), "they have gone out again"


async def test_what_an_interrupt_leaves_to_be_dropped_is_dropped_by_stop() -> None:
    rig = make_two("bounded_async")
    await rig.train(3, train_s=2.0)
    newest = max(versions_of("b", rig.ledger))
    rig.driver.distrust("b", newest)
    await with_stop(rig, asyncio.sleep(0))
    assert versions_of("b", rig.ledger) and max(versions_of("b", rig.ledger)) < newest


@pytest.mark.real_time
async def test_a_failed_check_is_on_record_before_an_interrupt_can_come() -> None:
    class Interrupted:
        distrusted: list[tuple[str, int]] = []  # noqa: RUF012

        def distrust(self, name: str, since: int) -> None:
            self.distrusted.append((name, since))

        async def update_weights(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
            await load()
            raise asyncio.CancelledError

    async def given(value: Any) -> Any:
        return value

    publisher: Any = SimpleNamespace(sends=False, stage=given, num_bytes=lambda weights: 0, publish=given)
    trust: Any = SimpleNamespace(has_checked=True, expect=lambda version: None, check=lambda version: given(["b"]))
    trainer: Any = SimpleNamespace(version=4, weight_source=lambda: None)
    parts: Any = {"driver": Interrupted(), "notify": print, "measured": lambda name, value: None}
    sync = WeightSync(trainer=trainer, publisher=publisher, trust=trust, reloads_after_check=False, **parts)
    with pytest.raises(asyncio.CancelledError):
        await sync.publish()
    assert Interrupted.distrusted == [("b", 4)]


async def test_when_no_engine_is_left_the_ledger_is_clean_already() -> None:
    rig = make_two("april")
    await rig.train(2)

    def take_out() -> None:
        raise EngineMismatch("none is left")

    with pytest.raises(EngineMismatch, match="none is left"):
        await rig.driver.drop_tokens_of("b", take_out)
    assert not versions_of("b", rig.ledger)
    await with_stop(rig, asyncio.sleep(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("while_training", [True, False])
async def test_no_token_is_handed_out_of_a_member_found_out_at_any_time(name: str, while_training: bool) -> None:
    rig = make_two(name)
    before = await rig.train(2, train_s=2.0)
    assert any(s.engine == "b" for b in before.values() for t in b.trajectories for s in t.segments)

    def find_out() -> None:
        rig.engine.has_b = False  # type: ignore[attr-defined]
        rig.driver.distrust("b")

    if while_training:
        find_out()
    else:
        asyncio.get_running_loop().call_later(0.5, find_out)
    step = rig.ledger.next_step
    later = await with_stop(rig, rig.train(6, train_s=2.0))
    assert_trainable(before | later, rig)
    first_clean = step if while_training else step + 1  # one may have been handed out before
    for batch in later.values():
        if batch.step >= first_clean:
            assert all(s.engine != "b" for t in batch.trajectories for s in t.segments if s.token_ids)
    drops = [e for e in rig.events if isinstance(e, GroupDropped) and e.cause is WasteCause.UNTRUSTED_ENGINE]
    assert bool(drops) == bool(rig.ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE])
