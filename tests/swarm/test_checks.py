"""Log-prob checks of members that are slow to answer, or never do, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from rollover.engine.base import Engine
from rollover.engine.logprob_check import LogprobCheck
from rollover.errors import EngineError, EngineMismatch
from rollover.swarm.coordinator.checks import AGAIN_S, CHECK_TIMEOUT_S, MemberChecks
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import Fail
from rollover.swarm.coordinator.shell import Shell
from rollover.swarm.coordinator.status.board import StatusBoard
from tests.swarm.kit import ModelWorker, head, request
from tests.swarm.test_coordinator import coordinator, join
from tests.virtual_time import VirtualClock

IN_VIRTUAL_TIME = True


class Swarm:
    """Decodes nothing; the checks of these tests ask for nothing."""

    stats = abort = None


def checked_swarm(check: LogprobCheck | None = None) -> tuple[Coordinator, MemberChecks, list[str]]:
    """Return a coordinator with a member, its checks, and a list of the members that are sent away from now on."""
    hub = coordinator(checks=True, ttl_s=1e6)
    join(hub, ModelWorker("a"))
    shell, sent_away = Shell(hub, VirtualClock(), StatusBoard(), None), list[str]()
    shell.on_distrust.append(sent_away.append)
    swarm: Any = Swarm()
    checks = MemberChecks(swarm, shell)
    if check is not None:
        checks.check_logprobs_with(check)
    return hub, checks, sent_away


async def test_a_member_that_is_late_is_named_and_asked_again_and_draws_again() -> None:
    asked: list[bool] = []

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        asked.append(draws)
        if len(asked) <= 2:
            await asyncio.Event().wait()

    hub, checks, _ = checked_swarm(check)
    member = hub.members["a"]
    checks.begin("a", 0)
    await asyncio.sleep(CHECK_TIMEOUT_S + 1)
    assert member.serves(checked=True) is None
    assert member.last_error == "log-prob check of version 0, attempt 1: a has not answered within 300 s"
    await asyncio.sleep(CHECK_TIMEOUT_S + 2 * AGAIN_S)
    assert asked == [True, True, True] and member.serves(checked=True) == 0


async def test_what_is_said_of_a_member_that_is_cut_off_does_not_grow() -> None:
    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        (failed,) = hub.opened(request("check."), only="a")
        assert isinstance(failed, Fail)
        raise EngineError(failed.reason)

    hub, checks, _ = checked_swarm(check)
    hub.disconnected(hub.members["a"].lease, 0.0)
    checks.begin("a", 0)
    await asyncio.sleep(2.5 * AGAIN_S)
    assert hub.members["a"].last_error == "log-prob check of version 0, attempt 3: a is not connected"


async def test_a_failed_check_is_repeated_and_a_running_one_is_not() -> None:
    answers = [asyncio.get_running_loop().create_future() for _ in range(3)]
    asked = 0

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        nonlocal asked
        asked += 1
        await answers[asked - 1]

    hub, checks, _ = checked_swarm(check)
    await checks.check_logprobs()
    await asyncio.sleep(1)
    await checks.check_logprobs()  # as after each publication
    await asyncio.sleep(1)
    assert asked == 1, "what a slow member has answered so far is not asked again"
    answers[0].set_exception(EngineError("nothing to compare weights version 0 with"))
    await asyncio.sleep(1)
    assert asked == 2, "there may be something to compare with since it began"
    answers[1].set_exception(EngineError("nothing to compare weights version 0 with"))
    await asyncio.sleep(1)
    assert asked == 2 and "nothing to compare" in hub.members["a"].last_error
    await checks.check_logprobs()
    await asyncio.sleep(0.1)
    assert asked == 3, "there may be something now: it does not stand still for the rest of the pause"
    answers[2].set_result(None)
    await asyncio.sleep(0.1)
    assert hub.members["a"].serves(checked=True) == 0


async def test_short_steps_do_not_starve_a_member_whose_draws_take_long() -> None:
    begun: list[tuple[int, bool]] = []
    lost = asyncio.Event()

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        begun.append((version, draws))
        with suppress(TimeoutError):  # a step takes a second
            await asyncio.wait_for(lost.wait(), 10 if draws else 0.1)
            raise EngineError("a is gone")

    hub, checks, _ = checked_swarm(check)
    for version in (0, 1):
        if version:
            hub.published(head(version), 0.0)
            hub.members["a"].version = version
        checks.begin("a", version)
        await asyncio.sleep(1)
    assert begun == [(0, True), (1, False)]
    assert hub.members["a"].checked_version == 1
    join(hub, ModelWorker("a"))  # another process, perhaps
    checks.begin("a", 1)
    await asyncio.sleep(1)
    assert begun[-1] == (1, True)
    join(hub, ModelWorker("a"))  # its connection is lost during the check
    checks.begin("a", 1)
    lost.set()
    await asyncio.sleep(0)
    lost.clear()
    await asyncio.sleep(1)
    assert begun[-1] == (1, False)
    assert hub.members["a"].checked_version == 1


async def test_who_has_passed_is_known_under_later_weights_until_it_comes_anew() -> None:
    told: list[tuple[int, bool]] = []

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        told.append((version, is_known))

    async def checked(version: int) -> None:
        checks.begin("a", version)
        await asyncio.sleep(1)
        assert hub.members["a"].checked_version == version

    hub, checks, _ = checked_swarm(check)
    await checked(0)
    worker = ModelWorker("a")
    for version in (1, 2):
        hub.published(head(version), 0.0)
        hub.members["a"].version = version
        await checked(version)
    join(hub, worker)  # another process, perhaps
    await checked(2)
    assert told == [(0, False), (1, True), (2, True), (2, False)]


async def test_who_joins_anew_draws_under_the_next_version_and_who_was_found_out_at_once() -> None:
    begun: list[tuple[int, bool]] = []
    is_greedy = False

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        begun.append((version, draws))
        if is_greedy and draws:
            raise EngineMismatch(f"{engine!r} draws greedily")

    hub, checks, sent_away = checked_swarm(check)
    checks.begin("a", 0)
    await asyncio.sleep(1)
    is_greedy = True
    join(hub, ModelWorker("a"))  # another process, with other settings
    for version in (0, 1):
        hub.published(head(version), 0.0)
        hub.members["a"].version = version
        checks.begin("a", version)
        await asyncio.sleep(1)
    assert begun == [(0, True), (0, False), (1, True)]
    assert sent_away == ["a"] and hub.members["a"].distrust == "a draws greedily"
    for mended in (False, True):
        is_greedy = not mended
        hub.readmitted("a")
        join(hub, ModelWorker("a", version=1, served={1: head(1)}))
        checks.begin("a", 1)
        await asyncio.sleep(1)
        assert begun[-1] == (1, True) and bool(hub.members["a"].distrust) is not mended


async def test_a_member_with_new_weights_is_not_asked_about_the_old_ones() -> None:
    asked: list[int] = []

    async def check(engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        asked.append(version)
        hub.published(head(1), 0.0)
        hub.members["a"].version = 1
        raise EngineError("the call failed")

    hub, checks, _ = checked_swarm(check)
    checks.begin("a", 0)
    await asyncio.sleep(10 * AGAIN_S)
    assert asked == [0] and hub.members["a"].last_error == ""


async def test_a_verdict_while_the_others_are_away_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    hub, checks, sent_away = checked_swarm()
    checks.distrust("a", "its log-probs are 0.2 nats off")
    assert hub.members["a"].distrust and hub.max_running == 0
    assert sent_away == [], "the caller drops its tokens"
    assert caplog.messages == ["a is sent away: its log-probs are 0.2 nats off"]
    join(hub, ModelWorker("b"))
    assert hub.checked("b", 0) and hub.max_running > 0
