"""``rollover train`` with servers of the embedded engine that it starts itself: real processes, one of which is
killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from rollover.batch import WasteCause
from tests import runs
from tests.speed import within
from tests.swarm.chaos.forked import Forked

DEADLINE_S = within(240.0)
ENGINE = [
    *("--engine.kind", "embedded_server", "--engine.launch", "true", "--engine.num_servers", "2"),
    *("--engine.launch_args", '["--device", "cpu", "--cpu_kernels", "torch"]', "--engine.max_running", "12"),
    *("--engine.kv_cache_bytes", "4_000_000", "--engine.launch_env.OMP_NUM_THREADS", "1"),
    *("--engine.health_interval_s", "0.5", "--engine.rejoin_max_interval_s", "2"),
    *("--engine.stop_timeout_s", "5", "--engine.weight_transfer", "gloo"),
]


class Process(NamedTuple):
    """A process that serves."""

    pid: int
    url: str


@contextmanager
def training(folder: Path) -> Iterator[Forked]:
    """A run without an end."""
    run = Forked(folder, "run", ("train", "run.toml", "--run-dir", "out", "--steps", "100000", *ENGINE))
    try:
        yield run
    finally:
        run.kill()


def servers(run: int) -> dict[str, Process]:
    """The servers that a run has started, each through a supervisor, by address."""
    found = {}
    for pid in children(run):
        for server in children(pid):
            with suppress(OSError, ValueError, IndexError):
                command = Path(f"/proc/{server}/cmdline").read_bytes().decode().split("\0")
                url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
                found[url] = Process(server, url)
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def until_dead(pids: list[int]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < give_up_s, "servers outlive the run"
        time.sleep(0.05)


def version_of(server: Process) -> int | None:
    """The version of the weights that a server says it has; ``None`` while it has none of the run's."""
    try:
        label = httpx.get(f"{server.url}/info", trust_env=False, timeout=within(10.0)).json()["label"]
    except httpx.HTTPError:
        return None
    return int(label.split(":")[2]) if label.startswith("rollover:") else None


def sampled(folder: Path, server: Process) -> list[int]:
    """The steps whose batches hold tokens that a server sampled from the weights of that step."""
    if not (folder / "out" / "metrics.jsonl").exists():
        return []
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["step"] for row in rows if row.get(f"drift/{server.url}") is not None]


def test_a_killed_server_comes_back_with_current_weights(experiment: Path) -> None:
    with training(experiment) as run:

        def until(done: Callable[[], bool], what: str) -> None:
            give_up_s = time.monotonic() + DEADLINE_S
            while not done():
                assert run.exit_code is None, run.last_words()
                assert time.monotonic() < give_up_s, f"{what}: {run.last_words()}"
                time.sleep(0.2)

        until(
            lambda: len(found := servers(run.pid)) == 2 and all(sampled(experiment, one) for one in found.values()),
            "both servers sample",
        )
        killed, other = servers(run.pid).values()
        before = version_of(other) or 0
        os.kill(killed.pid, signal.SIGKILL)

        def again() -> Process | None:
            started = servers(run.pid).get(killed.url)
            return started if started is not None and started.pid != killed.pid else None

        until(lambda: again() is not None, "another is started")
        until(lambda: (version_of(killed) or 0) > before, "it is given weights of later versions than it had")
        until(
            lambda: any(step > before + 1 for step in sampled(experiment, killed)),
            "it samples from the weights of the run",
        )
        last = [server.pid for server in servers(run.pid).values()]
        assert len(last) == 2
        run.send(signal.SIGINT)
        until_dead([run.pid, *last])
    assert run.exit_code == 130 and "Traceback" not in run.log.read_text(), run.last_words()
    ledger = runs.ledger(experiment / "out")
    assert WasteCause.FAILED not in ledger.tokens.wasted
    assert len(runs.rows(experiment / "out")) == ledger.next_step
