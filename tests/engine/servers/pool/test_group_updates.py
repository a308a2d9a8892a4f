"""Weights sent by whoever holds them to all servers of a pool in one group, and what becomes of a server that fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers import open as open_module
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.errors import EngineError, EngineTimeout
from rollover.weights import sending
from rollover.weights.publisher import Publisher
from rollover.weights.sending import HeldWeights, Lease, SenderLost, own_weights
from rollover.weights.sources import MemoryWeights
from tests.engine.contract import collect, request
from tests.engine.servers.meetings import Meetings
from tests.engine.servers.pool.kit import Fleet
from tests.engine.servers.scripted_server import Answer, Broken
from tests.engine.servers.sglang import kit as sglang_kit
from tests.engine.servers.vllm import kit as vllm_kit
from tests.speed import within

pytestmark = pytest.mark.real_time

RECEIVE = {vllm_kit: "_post_update_weights", sglang_kit: "_post_update_weights_from_distributed"}
_DEADLINE_S = within(30.0)


class Holder:
    """A trainer that holds weights of ``version`` and no others."""

    def __init__(self) -> None:
        self.version = 0
        self.lease = Lease()

    def at(self, version: int) -> HeldWeights:
        self.version = version
        names = ("model.embed_tokens.weight", "lm_head.weight")
        tensors = {name: torch.full((64, 4), float(version)) for name in names}
        source = MemoryWeights(version, tensors)
        return own_weights(source, tensors, self.lease, current=lambda: self.version, device="cuda:1")


class Sent(Fleet):
    """Two servers, and the groups in which they were sent weights since their pool was opened."""

    def __init__(self, kind: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = {"load_timeout_s": _DEADLINE_S, "control_timeout_s": 10.0, "health_timeout_s": 10.0}
        super().__init__(kind, folder, weight_transfer="nccl", health_interval_s=0.05, **limits)
        self._meetings = Meetings()
        monkeypatch.setattr("rollover.weights.sending.open_group", self._meetings.open_group)
        for server in self.servers:
            server.meetings = self._meetings

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._num_before = len(self._meetings.all)
        return self

    async def publish(self, source: HeldWeights) -> None:
        publisher = Publisher(self.pool)
        assert publisher.sends
        assert await publisher.stage(source) is source
        await publisher.publish(source)

    @property
    def groups(self) -> list[list[int]]:
        """The first rank of each server in each group."""
        return [sorted(meeting.offsets) for meeting in self._meetings.all[self._num_before :]]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
def sent(kind: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(kind, folder, monkeypatch)


async def test_all_servers_get_weights_in_one_group_and_no_folder_is_written(sent: Sent) -> None:
    async with sent:
        await sent.publish(Holder().at(1))
        assert sent.groups == [[1, 3]]
        assert [server.weights for server in sent.servers] == ["sent 512.0"] * 2
        assert {chunk.policy_version for chunk in await collect(sent.pool, request("a"))} == {1}
        assert not any(server.paused for server in sent.servers)


async def test_a_lost_server_is_named_and_others_get_the_weights(sent: Sent, caplog: pytest.LogCaptureFixture) -> None:
    lost = sent.servers[1]

    async def die(query: dict[str, str], body: Any) -> Answer:
        lost.kill()
        lost.seat.leave()
        raise Broken

    async with sent:
        setattr(lost, RECEIVE[sent.kind], die)
        holder = Holder()
        await sent.publish(holder.at(1))
        assert sent.groups == [[1, 3], [1]]
        assert sent.servers[0].weights == "sent 512.0"
        assert sent.pool.capabilities.max_running == 64
        assert any("http://s1 is taken out: http://s1" in message for message in caplog.messages)
        await sent.publish(holder.at(2))
        assert {chunk.policy_version for chunk in await collect(sent.pool, request("a"))} == {2}


async def test_where_nobody_is_to_blame_each_is_sent_the_weights_alone(sent: Sent) -> None:
    refuse = AsyncMock(return_value=Answer(500, {"error": {"message": "out of memory"}}))
    async with sent:
        setattr(sent.servers[1], RECEIVE[sent.kind], refuse)
        await sent.publish(Holder().at(1))
        assert sent.groups == [[1, 3], [1], [1]]
        assert sent.servers[0].weights == "sent 512.0"
        assert sent.pool.capabilities.max_running == 64


async def test_when_all_refuse_the_error_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Sent(sglang_kit, folder, monkeypatch) as sent:
        for server in sent.servers:
            server.load_error = "out of memory"
        with pytest.raises(EngineError, match=r"no engine took weights version 1: .*out of memory"):
            await sent.publish(Holder().at(1))


async def test_weights_are_sent_again_when_their_sender_is_lost(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sent:
        source = Holder().at(1)
        open_sender, opened = source.open_sender, itertools.count(1)

        def open_and_lose(*arguments: Any) -> Any:
            sender = open_sender(*arguments)
            if next(opened) <= 2:
                monkeypatch.setattr(sender, "send", Mock(side_effect=SenderLost("rank 1 of 2 was killed (SIGKILL)")))
            return sender

        monkeypatch.setattr(source, "open_sender", open_and_lose)
        await sent.publish(source)
        assert len(sent.groups) == 3 and sent.groups[-1] == [1, 3]
        assert [server.weights for server in sent.servers] == ["sent 512.0"] * 2


async def test_a_returning_server_gets_weights_that_are_still_there_at_once(sent: Sent) -> None:
    async with sent:
        await sent.publish(Holder().at(1))
        sent.servers[1].restart()
        await sent.until(lambda: sent.servers[1].weights == "sent 512.0")
        await sent.until(lambda: sent.pool.capabilities.max_running == 128)
        assert sent.groups == [[1, 3], [1]]


@pytest.mark.parametrize("num_restarted", [1, 2])
async def test_a_returning_server_gets_the_next_weights_if_these_are_gone(sent: Sent, num_restarted: int) -> None:
    async with sent:
        holder = Holder()
        await sent.publish(holder.at(1))
        newer = holder.at(2)
        for server in sent.servers[:num_restarted]:
            server.restart()
        waiting = sent.pool._updates._late
        await sent.until(lambda: len(waiting) == num_restarted)
        await sent.publish(newer)
        assert sent.groups == [[1, 3], [1, 3]]
        await sent.until(lambda: sent.pool.capabilities.max_running == 128)
        assert [server.weights for server in sent.servers] == ["sent 1024.0"] * 2
        assert not waiting and not any(server.paused for server in sent.servers)
        assert {chunk.policy_version for chunk in await collect(sent.pool, request("a"))} == {2}


async def test_a_server_that_returns_to_a_fast_run_gets_the_next_weights(sent: Sent) -> None:
    checked: list[int] = []
    async with sent:
        holder = Holder()

        async def check(engine: Any, version: int, *, is_known: bool = False, draws: bool = True) -> None:
            checked.append(version)
            await sent.publish(holder.at(version + 1))

        await sent.publish(holder.at(1))
        sent.pool.check_logprobs_with(check)
        sent.servers[1].restart()
        waiting = sent.pool._updates._late
        await sent.until(lambda: len(waiting) == 1)
        assert sent.groups == [[1, 3], [1], [1]]
        await sent.publish(holder.at(3))
        await sent.until(lambda: sent.pool.capabilities.max_running == 128)
        assert sent.groups[3:] == [[1, 3]]
        assert [server.weights for server in sent.servers] == ["sent 1536.0"] * 2
    assert checked == [1]


async def test_a_server_that_returns_while_an_update_fails_has_the_weights_already(sent: Sent) -> None:
    paused = asyncio.Event()

    async def check(engine: Any, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        await sent.pool.pause()
        paused.set()

    async with sent:
        await sent.publish(Holder().at(1))
        sent.pool.check_logprobs_with(check)
        sent.servers[1].restart()
        await paused.wait()
        await sent.pool.resume()  # no weights were loaded
        await sent.until(lambda: sent.pool.capabilities.max_running == 128)


async def test_weights_do_not_change_while_they_are_sent() -> None:
    lease, version = Lease(), 3
    give_back = lease.lend(3, lambda: version, timeout_s=_DEADLINE_S)
    order = list[str]()

    def change() -> None:
        with lease.changing():
            order.append("changed")

    changing = asyncio.create_task(asyncio.to_thread(change))
    async with asyncio.timeout(_DEADLINE_S):
        while not lease._is_changing:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineError, match="weights of version 3 can no longer be sent"):
            lease.lend(3, lambda: version, timeout_s=_DEADLINE_S)
        order.append("given back")
        give_back()
        await changing
    assert order == ["given back", "changed"]
    with pytest.raises(EngineError, match="version 2 can no longer be sent"):
        lease.lend(2, lambda: version, timeout_s=_DEADLINE_S)
    lease.lend(3, lambda: version, timeout_s=_DEADLINE_S)()


def test_an_unclosed_sender_is_waited_for_no_longer_than_its_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_CLOSE_S", 0.01)
    lease = Lease()
    give_back = lease.lend(3, lambda: 3, timeout_s=0.01)
    late = pytest.raises(EngineTimeout, match=r"^weights of version 3 have not been given back .*load_timeout_s")
    with late, lease.changing():
        raise AssertionError("they are lent")
    lease.lend(3, lambda: 3, timeout_s=0.01)()  # nothing is changing any more
    give_back()
    with lease.changing():
        pass


def test_an_interrupted_step_does_not_keep_weights_from_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Lease()
    give_back = lease.lend(3, lambda: 3, timeout_s=_DEADLINE_S)
    monkeypatch.setattr(lease._state, "wait_for", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), lease.changing():
        raise AssertionError("they are lent")
    give_back()
    lease.lend(3, lambda: 3, timeout_s=_DEADLINE_S)()


@pytest.mark.parametrize(("transfer", "at_a_time"), [("folder", 3), ("gloo", 1)])
async def test_servers_are_first_sent_weights_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transfer: Any, at_a_time: int
) -> None:
    """Each is in a group of its own, whose buckets would add up in the memory of the sender."""
    opening, most = 0, 0

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        async def open(self) -> None:
            nonlocal opening, most
            opening += 1
            most = max(most, opening)
            await asyncio.sleep(0)
            opening -= 1

        async def close(self) -> None:
            pass

    for name in ("ServerEngine", "EnginePool", "Ownership"):
        monkeypatch.setattr(open_module, name, Mock() if name == "Ownership" else Opened)
    config = SGLangConfig(urls=("http://a:1", "http://b:1", "http://c:1"), weight_transfer=transfer)
    setup = EngineSetup(folder=tmp_path, run="r", root=tmp_path, clock=SystemClock())
    await open_module.open_servers(config, setup, Mock(path=tmp_path), lambda own: Mock())
    assert most == at_a_time


def test_an_update_by_group_is_given_time_to_be_repeated() -> None:
    urls, limits = ("http://a:1", "http://b:1"), {"load_timeout_s": 300.0, "control_timeout_s": 30.0}
    by_folder = SGLangConfig(urls=urls, **limits)  # type: ignore[arg-type]
    by_group = SGLangConfig(urls=urls, weight_transfer="gloo", **limits)  # type: ignore[arg-type]
    assert by_group.update_timeout_s == by_folder.update_timeout_s + 3 * 330.0
