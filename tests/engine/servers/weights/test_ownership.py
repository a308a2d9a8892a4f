"""A server belongs to one run at a time: nobody loads weights into a server that another live run uses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.vllm.open import open_vllm
from rollover.engine.servers.weights.ownership import Ownership, how_to_free
from rollover.errors import EngineError
from tests.engine.contract import LONG, collect, request, tokens
from tests.engine.servers.scripted_server import ScriptedVLLM, serve
from tests.engine.servers.vllm.kit import label, settings
from tests.speed import within


def name(server: Any, weights: str) -> None:
    server.version = server.scheduler_version = weights


def test_a_label_names_the_owner_of_weights_and_whether_it_left() -> None:
    ownership = Ownership("ours", predecessor="before")
    assert ownership.label(7) == "rollover:ours:7"
    assert [ownership.version(x) for x in ("rollover:ours:7", "rollover:ours:7:free", "rollover:theirs:7", "7")] == [
        *(7, 7),
        *(None, None),
    ]
    free = ("default", "", "7", "rollover:ours:7", "rollover:theirs:7:free", "rollover:before:3", "rollover:x")
    assert [ownership.owner(x) for x in free] == [None] * len(free)
    assert ownership.owner("rollover:theirs:7") == "theirs"


def test_of_two_runs_of_a_machine_the_second_is_told_who_has_the_server(tmp_path: Path) -> None:
    first = Ownership.on_this_machine("http://gpu:8000", "first", tmp_path)
    with pytest.raises(EngineError, match=r"^http://gpu:8000/ is in use by run first \(pid \d+ on .*\): wait for it"):
        Ownership.on_this_machine("http://gpu:8000/", "second", tmp_path)
    Ownership.on_this_machine("http://gpu:8001", "second", tmp_path).release()
    first.release()
    second = Ownership.on_this_machine("http://gpu:8000", "second", tmp_path)
    assert second.owner("rollover:first:9") is None, "it was on this machine, and is over"
    assert second.owner("rollover:third:9") == "third"
    second.release()


def test_a_run_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from rollover.engine.servers.weights.ownership import Ownership\n"
        "ownership = Ownership.on_this_machine('http://gpu:8000', 'killed', Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=within(60)).returncode == -9
    ownership = Ownership.on_this_machine("http://gpu:8000", "next", tmp_path)
    assert ownership.owner("rollover:killed:3") is None
    ownership.release()


def test_the_command_that_frees_a_server_names_the_variable_of_its_key() -> None:
    assert ' -H "Authorization: Bearer $SERVER_KEY" ' in how_to_free("http://one", "SERVER_KEY")
    assert "Authorization" not in how_to_free("http://one", None)


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    Ownership.on_this_machine("http://gpu:8000", "first", tmp_path).release()
    (lock,) = tmp_path.iterdir()
    lock.unlink()
    (tmp_path / "precious").write_text("kept")
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(EngineError, match="the lock of a server, cannot be opened"):
        Ownership.on_this_machine("http://gpu:8000", "second", tmp_path)
    assert (tmp_path / "precious").read_text() == "kept"


async def test_a_server_of_another_run_is_left_alone_and_freeing_is_explained(kind: ModuleType, folder: Path) -> None:
    server = kind.Server()
    name(server, "rollover:theirs:4")
    server.paused, server.weights = True, "theirs"
    with pytest.raises(EngineError, match=r"belongs to run theirs: .*curl -X POST http://one/update_weight_ver"):
        async with kind.opened(server, folder):
            pass
    assert {method for method, _, _, _ in server.log} == {"GET"}, "nothing was changed"
    assert (server.paused, server.weights, server.version) == (True, "theirs", "rollover:theirs:4")
    await server._post_update_weight_version({}, {"new_version": "free", "abort_all_requests": False})
    async with kind.opened(server, folder):
        assert (server.paused, server.version) == (False, "rollover:ours:0")


async def test_a_server_is_given_back_at_the_end_and_says_what_it_serves(kind: ModuleType, folder: Path) -> None:
    server = kind.Server()
    for owner in ("first", "second"):
        async with kind.opened(server, folder, ownership=Ownership(owner)):
            assert server.version == f"rollover:{owner}:0"
        assert server.version == f"rollover:{owner}:0:free"


@pytest.mark.parametrize("left", ["rollover:ours:4", "rollover:dead:4"], ids=["resumed", "dead on this machine"])
async def test_a_killed_runs_server_goes_to_its_resume_or_machine(kind: ModuleType, folder: Path, left: str) -> None:
    server = kind.Server()
    name(server, left)
    async with kind.opened(server, folder, ownership=Ownership("ours", predecessor="dead")):
        assert server.version == label(0)


async def test_a_server_that_another_run_took_gets_nothing_more(kind: ModuleType, folder: Path) -> None:
    async with kind.serving(folder) as (engine, server):
        name(server, "rollover:theirs:0")  # the same version number
        server.weights = "theirs"
        with pytest.raises(EngineError, match=r"serves weights 'rollover:theirs:0', .*run theirs uses it"):
            await engine.probe()
        server.log.clear()
        server.paused = True  # as theirs is while it loads
        with pytest.raises(EngineError, match="belongs to run theirs"):
            await engine.pause()
        await engine.resume()
        with pytest.raises(EngineError, match="run theirs uses it"):
            await collect(engine, request("a"))
    assert {method for method, _, _, _ in server.log} <= {"GET"}
    assert (server.paused, server.weights, server.version) == (True, "theirs", "rollover:theirs:0")


def test_two_runs_on_one_address_never_meet(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> None:
        server = ScriptedVLLM(tick_s=0.001)
        async with serve(server) as port:
            config = settings(f"http://127.0.0.1:{port}")

            async def opened(run: str) -> Any:
                return await open_vllm(config, EngineSetup(folder=folder, run=run, root=tmp_path, clock=SystemClock()))

            first = await opened("first")
            call = asyncio.create_task(collect(first, request("a", max_new_tokens=LONG)))
            with pytest.raises(EngineError, match="is in use by run first"):
                await opened("second")
            assert len(tokens(await call)) == LONG
            await first.close()
            second = await opened("second")
            assert server.version == "rollover:second:0"
            await second.close()

    asyncio.run(main())
