"""A worker that was sent away for good stays away, whatever becomes of the trainer, until somebody lets it come back."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from rollover import cli
from rollover.errors import ConfigError, RunError
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.status.snapshot import read_status
from rollover.swarm.coordinator.trust import Blocklist
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import PROTOCOL, Hello, Serving, Welcome
from rollover.swarm.wire.token import WorkerToken
from rollover.swarm.worker.connection import CoordinatorConnection, Refused, open_connection
from tests.engine.models import saved, tiny_model
from tests.speed import within
from tests.swarm.test_worker_real import swarm, token_of

NONSENSE = Serving(version=0, manifest="0" * 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_model(), tmp_path_factory.mktemp("models") / "v0")


@asynccontextmanager
async def joined(engine: SwarmEngine, token: WorkerToken) -> AsyncIterator[CoordinatorConnection]:
    address = CoordinatorAddress.parse(engine.url)
    async with open_connection(address, token, None, timeout_s=10.0) as connection:
        await connection.send(Hello(protocols=(PROTOCOL,), software="test"))
        assert isinstance(await connection.receive(), Welcome)
        yield connection


async def until_sent_away(engine: SwarmEngine, token: WorkerToken) -> None:
    async with joined(engine, token) as connection:
        await connection.send(NONSENSE)
        with pytest.raises(Refused, match="it serves version 0 from a manifest that was not published"):
            while True:
                await connection.receive()


async def test_a_restart_readmits_no_liar(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, told = tmp_path, list[str]()
    (run / "config.json").write_text('{"meta": {}}')
    async with asyncio.timeout(within(60)), AsyncExitStack() as stack:
        before = await stack.enter_async_context(swarm(run / "swarm", model))
        liar, honest = token_of(run / "swarm", "liar"), token_of(run / "swarm", "anna")
        before.placement.on_distrust(told.append)
        await until_sent_away(before, liar)
        assert told == ["liar"]
        assert before.gateway is not None
        await before.gateway.close()  # nothing more is said or written: the process is gone
        after = await stack.enter_async_context(swarm(run / "swarm", model))
        after.placement.on_distrust(told.append)
        assert told == ["liar", "liar"], "what it sampled may not have been dropped yet"
        async with joined(after, honest):
            with pytest.raises(Refused, match="'liar' is no longer trusted: it says that it serves"):
                async with joined(after, liar):
                    pass
            assert cli.main(["workers", str(run), "--trust", "liar"]) == 0
            while after.coordinator.members["liar"].distrust:
                await asyncio.sleep(0.01)
            async with joined(after, liar):
                pass
            await until_sent_away(after, liar)
        assert told == ["liar"] * 3 and {*Blocklist(run / "swarm").listed()} == {"liar"}
        after._upkeep.write_status()  # and read at once: the first of them still runs in this process, and writes too
        workers = {w.name: w for w in read_status(run / "swarm").workers}
    assert workers["liar"].state == "sent away" and "manifest that was not published" in workers["liar"].note
    assert workers["anna"].state == "away"
    assert "liar may join again" in capsys.readouterr().out


def test_several_processes_can_change_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "sent_away.json"
    here = Blocklist(tmp_path)
    assert not here.listed() and not here.readmitted()
    begun_s = time.time()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: Blocklist(tmp_path).add(name, f"{name} has lied"), [f"w{i}" for i in range(24)]))
    assert {*here.listed()} == {f"w{i}" for i in range(24)} and not here.readmitted()
    assert here.listed()["w3"].reason == "w3 has lied" and begun_s <= here.listed()["w3"].time_s <= time.time()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    here.add("w0", "it has lied again")
    elsewhere = Blocklist(tmp_path)
    elsewhere.readmit("w3")
    with pytest.raises(ConfigError, match="'w3' was not sent away; members sent away: w0, w1, w10"):
        elsewhere.readmit("w3")
    assert here.readmitted() == {"w3"} and not here.readmitted()
    assert here.listed()["w0"].reason == "it has lied again"


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "sent_away.json").write_text('{"workers": {"liar": 3}}')
    with pytest.raises(RunError, match=r"sent_away\.json cannot be read .*: delete it, and workers that were sent"):
        Blocklist(tmp_path)
