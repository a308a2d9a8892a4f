"""Log-prob checks of members that are slow to answer, or never do, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rollover.engine.base import Engine
from rollover.errors import EngineError, EngineMismatch
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Effect, SentAway
from rollover.swarm.coordinator.trust.checks import AGAIN_S, CHECK_TIMEOUT_S, MemberChecks
from tests.swarm.kit import ModelWorker, head
from tests.swarm.test_coordinator import coordinator, join
from tests.virtual_time import VirtualClock, run


class Swarm:
    """Decodes nothing; the checks of these tests ask for nothing."""

    stats = abort = None


def checked_swarm() -> tuple[Coordinator, MemberChecks, list[Effect]]:
    hub = coordinator(checks=True, ttl_s=1e6)
    join(hub, ModelWorker("a"))
    effects: list[Effect] = []

    def perform(new: Iterable[Effect]) -> None:
        effects.extend(new)

    swarm: Any = Swarm()
    return hub, MemberChecks(swarm, hub, perform, VirtualClock()), effects


def test_a_member_that_never_answers_is_named_and_asked_again() -> None:
    async def law() -> None:
        hub, checks, _ = checked_swarm()
        asked = 0

        async def check(engine: Engine, version: int) -> None:
            nonlocal asked
            asked += 1
            if asked <= 2:
                await asyncio.Event().wait()

        member = hub.members["a"]
        checks.check_with(check)
        checks.begin("a", 0)
        await asyncio.sleep(CHECK_TIMEOUT_S + 1)
        assert member.serves(checked=True) is None
        assert member.last_error == "log-prob check of version 0, attempt 1: a has not answered within 300 s"
        await asyncio.sleep(CHECK_TIMEOUT_S + 2 * AGAIN_S)
        assert asked == 3 and member.serves(checked=True) == 0
        await checks.close()

    run(law())


def test_a_check_that_cannot_be_made_yet_is_made_later() -> None:
    async def law() -> None:
        hub, checks, _ = checked_swarm()
        errors = [EngineError("nothing to compare weights version 0 with")]

        async def check(engine: Engine, version: int) -> None:
            if errors:
                raise errors.pop()

        checks.check_with(check)
        checks.begin_all()
        await asyncio.sleep(1)
        assert "nothing to compare weights version 0 with" in hub.members["a"].last_error
        await asyncio.sleep(AGAIN_S)
        assert hub.members["a"].serves(checked=True) == 0
        await checks.close()

    run(law())


def test_a_member_that_serves_other_weights_by_now_is_not_asked_about_the_old_ones() -> None:
    async def law() -> None:
        hub, checks, _ = checked_swarm()
        asked: list[int] = []

        async def check(engine: Engine, version: int) -> None:
            asked.append(version)
            hub.published(head(1))
            hub.members["a"].version = 1
            raise EngineError("the call failed")

        checks.check_with(check)
        checks.begin("a", 0)
        await asyncio.sleep(10 * AGAIN_S)
        assert asked == [0] and hub.members["a"].last_error == ""
        await checks.close()

    run(law())


def test_a_member_that_fails_is_sent_away() -> None:
    async def law() -> None:
        _, checks, effects = checked_swarm()

        async def check(engine: Engine, version: int) -> None:
            raise EngineMismatch(f"{engine!r} does not sample from the trainer's policy")

        checks.check_with(check)
        checks.begin("a", 0)
        await asyncio.sleep(1)
        assert [e for e in effects if isinstance(e, SentAway)] == [
            SentAway("a", "a does not sample from the trainer's policy")
        ]
        await checks.close()

    run(law())
