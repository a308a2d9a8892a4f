"""``rollover worker``: as a process of its own, over TLS, and with what a user may get wrong."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover import cli
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.wire.token import TOKEN_VARIABLE, WorkerToken
from tests.engine.models import saved, tiny_model
from tests.speed import within
from tests.swarm.test_worker_real import collected, expected, flat, swarm, token_of, worker
from tests.swarm.worker_kit import TOKEN

ROOT = Path(__file__).parent.parent.parent
ENGINE = [
    *("--engine.max_running", "4", "--engine.max_context_tokens", "128", "--engine.kv_cache_bytes", "4194304"),
    *("--engine.stream_interval_tokens", "4", "--engine.cpu_kernels", "torch"),
]
LAUNCHED = ["--join", "ws://127.0.0.1:1", "--engine.kind", "vllm", "--engine.launch", "true"]
SETTINGS = {"name": "s", "seed": 3, "max_new_tokens": 40}


def joining(engine: SwarmEngine, folder: Path, token: WorkerToken) -> list[str]:
    """The arguments of a worker that keeps its files in ``folder``."""
    file = folder / f"{token.name}.token"
    file.touch(0o600)
    file.write_text(token.text)
    return ["worker", "--join", engine.url, "--token-file", str(file), "--cache", str(folder / "cache")]


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of Python, which is killed in the end."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


async def said(worker: asyncio.subprocess.Process, text: str) -> str:
    """Return what the process says up to a line that holds ``text``."""
    assert worker.stderr is not None
    lines = ""
    while text not in lines:
        line = (await worker.stderr.readline()).decode()
        assert line, f"the worker ended with: {lines}"
        lines += line
    return lines


async def test_a_worker_process_serves_is_killed_comes_back_and_leaves(tmp_path: Path) -> None:
    model = saved(tiny_model(), tmp_path / "model")
    root = tmp_path / "swarm"
    alone = [token for token, _ in flat(await expected(model, **SETTINGS))]
    async with asyncio.timeout(within(100)), swarm(root, model) as engine:
        token = token_of(root)
        command = ("-m", "rollover", *joining(engine, tmp_path, token), *ENGINE)
        async with process(*command) as worker:
            text = await said(worker, "serving version 0")
            assert re.search(r"^laptop: connected to ws://\S+ as 'laptop': run sums, epoch 1", text, re.M)
            assert [t for t, _ in flat(await collected(engine, **SETTINGS))] == alone
            worker.kill()
        async with process(*command) as worker:
            await said(worker, "serving version 0")
            chunks = await collected(engine, **{**SETTINGS, "call": 1})
            assert [t for t, _ in flat(chunks)] == alone
            worker.send_signal(signal.SIGTERM)
            text = await said(worker, "left the swarm")
            assert "handing over; press Ctrl-C again to stop immediately" in text
            assert await worker.wait() == 0
            assert token.secret not in text
        assert engine.coordinator.members["laptop"].last_error == "laptop has left: stopped by its user"


# -- what a user may get wrong ----------------------------------------------------------------------------------------


@pytest.mark.real_time
async def test_a_token_with_another_key_ends_the_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, root = saved(tiny_model(), tmp_path / "model"), tmp_path / "swarm"
    async with asyncio.timeout(within(60)), swarm(root, model) as engine:
        token = Credentials(root / "workers.json").add("laptop", Ed25519PrivateKey.generate().public_key())
        assert await asyncio.to_thread(cli.main, [*joining(engine, tmp_path, token), *ENGINE]) == 2
    error = capsys.readouterr().err
    assert "not signed by the publisher whose key this worker was given with its token: ask the run's owner" in error
    assert "Traceback" not in error


@pytest.mark.real_time
async def test_another_model_ends_a_worker_that_had_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "swarm"
    model = saved(tiny_model(), tmp_path / "model")
    async with (
        asyncio.timeout(within(90)),
        swarm(root, model) as engine,
        worker(root, engine, tmp_path / "cache") as lines,
    ):
        while not any("serving version 0" in line for line in lines):
            await asyncio.sleep(0.01)
    (model / "tokenizer.json").write_text("{}")
    async with asyncio.timeout(within(90)), swarm(root, model) as engine:
        arguments = joining(engine, tmp_path, token_of(root, "again"))
        assert await asyncio.to_thread(cli.main, [*arguments, *ENGINE]) == 2
    error = capsys.readouterr().err
    assert "has a config or tokenizer other than version 0, which this worker has had" in error and "--cache" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--join'"),
        (["--join", "swarm.example"], "not a coordinator's address"),
        (["--join", "ws://swarm.example"], "give --insecure"),
        (["--join", "ws://127.0.0.1"], "ws://127.0.0.1: the port is missing"),
        (["--join", "ws://127.0.0.1:1", "--token-file", "none"], "none: the worker's token cannot be read"),
        (["--join", "ws://127.0.0.1:1", "--engine.kind", "vlm"], "'vlm' is not allowed; did you mean 'vllm'?"),
        (["--join", "ws://127.0.0.1:1", "--max_held_token", "3"], "did you mean '--max_held_tokens'?"),
        (["--join", "ws://127.0.0.1:1", "--max_held_tokens", "0"], "max_held_tokens must be positive, got 0"),
        (["--join", "ws://127.0.0.1:1", "--engine.kind", "vllm"], "urls or launch = true"),
        (["--join", "ws://127.0.0.1:1", "--engine.colocated", "true"], "engine.colocated has no effect in a worker"),
        ([*LAUNCHED, "--deterministic", "true"], "deterministic = true needs the embedded engine"),
        (["--join", "wss://127.0.0.1:1", "--ca-file", "none"], "none: holds no readable certificates"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN.text)
    assert cli.main(["worker", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert TOKEN.secret not in error


def test_two_workers_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN.text)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["worker", "--join", "ws://127.0.0.1:1", "--cache", str(tmp_path)]) == 2
    assert "is in use by another worker: give this one a folder of its own with --cache" in capsys.readouterr().err
