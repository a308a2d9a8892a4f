"""What time asks of a swarm is done whatever else fails: leases end, tokens are revoked, workers are readmitted."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollover.engine.base import FirstCall
from rollover.errors import ResourceError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.status import board as board_module
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.status.snapshot import SwarmStatus, read_status, write_status
from rollover.swarm.coordinator.trust import Blocklist, Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.messages import Goodbye, Serving, decode_down
from tests.swarm.kit import TTL_S, ModelWorker, coordinator, head, request
from tests.virtual_time import VirtualClock

IN_VIRTUAL_TIME = True


class Heard:
    """A connection whose messages are kept."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.messages.append(decode_down(frame).message)

    def close(self) -> None: ...


def engine_with(hub: Coordinator, **parts: Any) -> SwarmEngine:
    config = SwarmConfig(lease_s=TTL_S, listen="127.0.0.1:0")
    return SwarmEngine(
        config, hub, lambda version, source: head(version), VirtualClock(), number_format="float32", **parts
    )


def join(engine: SwarmEngine, name: str, connection: Heard | None = None) -> int:
    """Have a worker join that is ready and serves version 0. Returns its lease."""
    worker = ModelWorker(name)
    connection = connection or Heard()
    lease = engine.shell.connected(name, worker.hello(), connection)
    for message in worker.got(connection.messages[0]):
        engine.shell.received(lease, message)
    return lease


@pytest.mark.parametrize(
    "problem",
    [
        ResourceError("the disk of /runs is full: make room"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
)
async def test_a_status_that_cannot_be_written_keeps_no_lease_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    is_well = False

    def failing(folder: Path, status: SwarmStatus) -> None:
        if not is_well:
            raise problem
        write_status(folder, status)

    monkeypatch.setattr(board_module, "write_status", failing)
    hub, clock = coordinator(), VirtualClock()
    engine = engine_with(hub, board=StatusBoard(tmp_path, run="sums", mode="push_pull"))
    join(engine, "a")
    await engine.start()
    await clock.sleep(TTL_S + 5)
    assert not hub.members["a"].lease and hub.counters["expired_leases"] == 1
    is_well = True
    await clock.sleep(2.5)
    assert [w.state for w in read_status(tmp_path).workers] == ["away"]
    await engine.close()
    said = [record for record in caplog.records if "tried again every 2 s" in record.message]
    assert len(said) == 1, "it is said once"


async def test_a_table_that_is_unreadable_for_a_while_delays_revocations(tmp_path: Path) -> None:
    tokens, blocked = tmp_path / "workers.json", tmp_path / "sent_away.json"
    credentials, key = Credentials(tokens), open_key(tmp_path / "key").public_key()
    for name in "ab":
        credentials.add(name, key)
    Blocklist(tmp_path).add("liar", "it lies")
    hub, clock = coordinator(), VirtualClock()
    engine = engine_with(hub, valid_tokens=credentials.hashes, blocklist=Blocklist(tmp_path))
    for name in "ab":
        join(engine, name)
    await engine.start()
    before = {file: file.read_bytes() for file in (tokens, blocked)}
    for file in before:
        file.write_text("half of it")
    await clock.sleep(1)
    assert all(hub.members[name].lease for name in "ab"), "nobody is taken for revoked"
    for file, content in before.items():
        file.write_bytes(content)
    credentials.revoke("a")
    Blocklist(tmp_path).readmit("liar")
    await clock.sleep(1)
    assert not hub.members["a"].lease and hub.members["b"].lease and not hub.members["liar"].distrust


async def test_a_new_token_of_a_name_keeps_no_session_of_the_revoked_one(tmp_path: Path) -> None:
    credentials, key = Credentials(tmp_path / "workers.json"), open_key(tmp_path / "key").public_key()
    credentials.add("a", key)
    hub, clock = coordinator(), VirtualClock()
    engine = engine_with(hub, valid_tokens=credentials.hashes)
    join(engine, "a")
    await engine.start()
    await clock.sleep(1)
    credentials.revoke("a")
    credentials.add("a", key)
    await clock.sleep(1)
    assert not hub.members["a"].lease
    join(engine, "a")
    await clock.sleep(1)
    assert hub.members["a"].lease


async def test_the_valid_tokens_are_read_once_for_all_members() -> None:
    num_reads = 0

    def valid_tokens() -> dict[str, str]:
        nonlocal num_reads
        num_reads += 1
        return {"a": "1", "b": "2"} if num_reads <= 20 else {"b": "2"}

    hub, clock = coordinator(), VirtualClock()
    engine = engine_with(hub, valid_tokens=valid_tokens)
    for name in "ab":
        join(engine, name)
    await engine.start()
    await clock.sleep(4.9)
    assert num_reads == 20 and all(hub.members[name].lease for name in "ab")
    await clock.sleep(0.2)
    assert num_reads == 21 and not hub.members["a"].lease and hub.members["b"].lease


async def test_a_worker_is_sent_away_though_nobody_can_write_that_down(tmp_path: Path) -> None:
    file, told, connection = tmp_path / "sent_away.json", list[str](), Heard()
    hub = coordinator()
    engine = engine_with(hub, blocklist=Blocklist(tmp_path))
    engine.placement.on_distrust(told.append)
    lease = join(engine, "a", connection)
    file.write_text("half of it")
    engine.shell.received(lease, Serving(version=0, manifest="0" * 64))
    assert told == ["a"] and isinstance(connection.messages[-1], Goodbye) and not hub.members["a"].lease


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: anext(engine.generate(request("g1.0"))),
        lambda engine: engine.pause(),
        lambda engine: engine.load(1, None),
    ],
)
async def test_a_mistake_in_the_code_ends_open_calls_and_refuses_new_ones(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[SwarmEngine], Awaitable[object]]
) -> None:
    hub, clock = coordinator(), VirtualClock()
    engine = engine_with(hub)
    monkeypatch.setattr(hub, "expire", Mock(side_effect=KeyError("a bug")))
    await engine.start()
    for asked in (lambda: anext(engine.generate(request("g0.0"))), lambda: ask(engine)):
        with pytest.raises(KeyError, match="a bug"):
            await asked()
    with pytest.raises(KeyError, match="a bug"):
        engine.placement.takes_one(FirstCall(0, 10))
    assert clock.now_s() == 0
    await engine.close()
