"""Servers that we start: waited for, told about when they fail, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.start.launch import ServerProcess, free_port
from rollover.errors import EngineError, EngineTimeout
from tests.speed import within

pytestmark = pytest.mark.real_time

DEADLINE_S = within(60.0)


def server(folder: Path, code: str, *, program: str = sys.executable, **limits: float) -> ServerProcess:
    """A "server" that is ready when it has written the file ``ready``."""

    async def ready() -> None:
        if not (folder / "ready").exists():
            raise EngineError("not yet")

    settings = {"launch_timeout_s": 30.0, "stop_timeout_s": 5.0} | limits
    return ServerProcess(
        [program, "-c", f"import pathlib, os, sys, time, signal\n{textwrap.dedent(code)}", str(folder)],
        env={"GIVEN": "yes"},
        log=folder / "logs" / "server.log",
        ready=ready,
        config=ServerConfig(launch=True, **settings),  # type: ignore[arg-type]
    )


READY = "root = pathlib.Path(sys.argv[1]); (root / 'pid').write_text(str(os.getpid())); (root / 'ready').touch()\n"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"


def wait_until_dead(pid: int) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while alive(pid):
        assert time.monotonic() < give_up_s, f"{pid} lives on"
        time.sleep(0.02)


async def test_a_server_is_started_with_its_environment_logged_and_stopped(tmp_path: Path) -> None:
    process = server(tmp_path, f"print('GIVEN', os.environ['GIVEN'], flush=True)\n{READY}time.sleep(1000)")
    await process.start()
    assert not process.exited
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    await process.stop()
    assert process.exited and not alive(pid)
    assert "GIVEN yes" in (tmp_path / "logs" / "server.log").read_text()
    await process.stop()


async def test_a_server_that_ignores_sigterm_is_killed_and_its_children_with_it(tmp_path: Path) -> None:
    code = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        (pathlib.Path(sys.argv[1]) / 'child').write_text(str(os.getpid()))
        time.sleep(1000)
    {READY.strip()}
    time.sleep(1000)
    """
    process = server(tmp_path, code, stop_timeout_s=0.3)
    await process.start()
    await process.stop()
    wait_until_dead(int((tmp_path / "pid").read_text()))
    wait_until_dead(int((tmp_path / "child").read_text()))


def test_a_server_that_exits_is_told_about_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = server(tmp_path, "print('\\n'.join(f'line {i}' for i in range(99)))\nsys.exit('CUDA out of memory')")
    with pytest.raises(EngineError, match=r"(?s)not start: .*server\.log:\n.*line 98.*CUDA out of memory") as caught:
        asyncio.run(process.start())
    assert "exited with code 1" in str(caught.value)
    assert "line 3\n" not in str(caught.value)


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="'/no/such/python' cannot be started: No such file"):
        asyncio.run(server(tmp_path, "", program="/no/such/python").start())


def test_a_server_that_never_answers_is_stopped_after_the_deadline(tmp_path: Path) -> None:
    code = "(pathlib.Path(sys.argv[1]) / 'pid').write_text(str(os.getpid()))\ntime.sleep(1000)"
    limit_s = float(round(within(1.0)))
    with pytest.raises(EngineTimeout, match=rf"did not answer within {limit_s:g} s \(engine\.launch_timeout_s\)"):
        asyncio.run(server(tmp_path, code, launch_timeout_s=limit_s).start())
    wait_until_dead(int((tmp_path / "pid").read_text()))


async def test_a_server_that_died_can_be_started_again(tmp_path: Path) -> None:
    process = server(tmp_path, f"{READY}time.sleep(1000)")
    await process.start()
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        while not process.exited:
            await asyncio.sleep(0.02)
    (tmp_path / "ready").unlink()
    await process.start()
    assert not process.exited and int((tmp_path / "pid").read_text()) != pid
    await process.stop()


def test_no_server_outlives_us_even_when_we_are_killed(tmp_path: Path) -> None:
    program = f"""
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, {str(Path(__file__).parents[4])!r})
    from tests.engine.servers.start.test_launch import READY, server
    async def main():
        await server(Path({str(tmp_path)!r}), READY + "time.sleep(1000)").start()
        print("up", flush=True)
        await asyncio.sleep(1000)
    asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_dead(pid)


def test_a_free_port_is_one_that_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", port := free_port())):
        assert 1024 <= port < 65536
