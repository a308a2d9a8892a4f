"""Tokens of an engine that is no longer trusted leave by one door, whatever they were doing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rollover.batch import Batch, WasteCause
from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import EngineMismatch
from rollover.rollout.events import GroupDropped, GroupOpened
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


def has_tokens_of_b(batch: Batch) -> bool:
    return any(s.engine == "b" and s.token_ids for t in batch.trajectories for s in t.segments)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("found_out", ["at once", "while training", "while decoding"])
async def test_no_token_of_a_member_is_handed_out_once_it_is_found_out(name: str, found_out: str) -> None:
    """What is dropped is sampled anew, from the same prompts."""
    rig = make_two(name)
    before = await rig.train(2, train_s=2.0)
    assert any(map(has_tokens_of_b, before.values()))
    first_clean = rig.ledger.next_step

    def take_out() -> None:
        rig.engine.has_b = False  # type: ignore[attr-defined]
        assert found_out != "at once" or not (rig.ledger.running or versions_of("b", rig.ledger))

    def find_out() -> None:
        take_out()
        rig.driver.distrust("b")

    if found_out == "at once":
        num_tokens = await rig.driver.drop_tokens_of("b", take_out)
        assert rig.ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE] == num_tokens
    elif found_out == "while training":
        find_out()
    else:
        asyncio.get_running_loop().call_later(0.5, find_out)
        first_clean += 1  # one may have been handed out before
    later = await with_stop(rig, rig.train(6, train_s=2.0))
    assert_trainable(before | later, rig)
    assert not any(has_tokens_of_b(batch) for step, batch in later.items() if step >= first_clean)
    drops = [e for e in rig.events if isinstance(e, GroupDropped) and e.cause is WasteCause.UNTRUSTED_ENGINE]
    assert bool(drops) == bool(rig.ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE])
    prompts = {e.group_id: e.prompt.prompt_id for e in rig.events if isinstance(e, GroupOpened)}
    times_opened = Counter(prompts.values())
    assert all(e.prompt_returned and times_opened[prompts[e.group_id]] > 1 for e in drops)


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
    with pytest.raises(EngineMismatch, match="none is left"):
        await rig.driver.drop_tokens_of("b", Mock(side_effect=EngineMismatch("none is left")))
    assert not versions_of("b", rig.ledger)
    await with_stop(rig, asyncio.sleep(0))
