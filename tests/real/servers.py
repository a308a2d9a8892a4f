"""Real servers as processes that a test can kill and freeze."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.engine import ServerEngine
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.start import supervisor
from rollover.engine.servers.start.launch import free_port
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.engine.servers.weights.ownership import Ownership
from rollover.trainer.packing import TrainingSample
from rollover.types import Trajectory
from rollover.weights.sources import FolderWeights
from tests.engine.contract import FullEngine
from tests.speed import within

START_S = within(900.0)
PATIENT = {"connect_timeout_s": 300.0, "first_token_timeout_s": 900.0, "token_timeout_s": 300.0}
PATIENT |= {"control_timeout_s": 300.0, "abort_timeout_s": 120.0, "all_down_timeout_s": 600.0}
"""For a machine that has other things to do."""


class RealServer:
    """A server on a port of its own. ``command`` makes its command line from the port."""

    def __init__(self, command: Callable[[int], Sequence[str]], env: dict[str, str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = list(command(self.port))
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to start; see ``wait_until_ready``."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, "20", *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert self._process.poll() is None, self._end_of_log("exited")
            assert time.monotonic() < give_up_s, self._end_of_log(f"is not ready after {START_S:g} s")
            time.sleep(0.2)

    def answers(self) -> bool:
        """Return whether it samples a token for somebody whom it has not met."""
        body = {"prompt": [1], "max_tokens": 1, "temperature": 0.0}
        try:
            done = httpx.post(f"{self.url}/v1/completions", json=body, timeout=within(60.0), trust_env=False)
        except httpx.HTTPError:
            return False
        return done.status_code == 200

    def kill(self) -> None:
        """SIGKILL to the server and all its workers."""
        self._signal(signal.SIGKILL)
        assert self._process is not None and self._process.stdin is not None
        self._process.wait()
        self._process.stdin.close()
        self._process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self.thaw()
        self._process.stdin.close()
        try:
            self._process.wait(within(30.0))
        finally:
            if self._process.poll() is None:
                self._signal(signal.SIGKILL)
                self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _end_of_log(self, what: str) -> str:
        return f"{self.url} {what}:\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def running(servers: Sequence[RealServer]) -> Iterator[None]:
    """They start side by side."""
    for server in servers:
        server.start()
    try:
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def engine_over(dialect: Any, url: str, folder: Path, config: ServerConfig) -> AsyncIterator[ServerEngine]:
    client, model = HTTPClient(url, config), ModelFolder.read(folder)
    engine = ServerEngine(
        client, config, model, dialect(client, config, model, WeightTerms()), ownership=Ownership("real")
    )
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


async def update(engine: FullEngine, version: int, folder: Path) -> None:
    await engine.pause()
    try:
        await engine.load(version, FolderWeights(version, folder))
    finally:
        await engine.resume()


def decode_with(engine: Mapping[str, Any]) -> None:
    """Put this section in place of the one in ``run.toml``."""
    before, _, after = Path("run.toml").read_text().partition("[engine]")
    env = engine.get("launch_env", {})
    lines = [f"{key} = {json.dumps(value)}" for key, value in engine.items() if value is not env]
    lines += ["[engine.launch_env]", *(f"{key} = {json.dumps(value)}" for key, value in env.items())]
    Path("run.toml").write_text("\n".join([before, "[engine]", *lines, after[after.index("[trainer]") :]]))


Drawn = Counter[tuple[tuple[int, ...], int, np.float32]]
"""How often a token was drawn behind some others, with its log-prob."""


@contextmanager
def drawn_by_servers() -> Iterator[Drawn]:
    """Note what servers answer meanwhile, in this process."""
    drawn, generate = Drawn(), ServerEngine.generate

    async def noted(self: ServerEngine, request: GenerateRequest) -> AsyncIterator[Chunk]:
        ids = request.prompt_ids + request.response_ids
        async with aclosing[Any](generate(self, request)) as chunks:
            async for chunk in chunks:
                for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                    drawn[ids, token, np.float32(logprob)] += 1
                    ids += (token,)
                yield chunk

    with mock.patch.object(ServerEngine, "generate", noted):
        yield drawn


def assert_trained_as_drawn(trajectories: Sequence[Trajectory], drawn: Drawn) -> None:
    """Each token is trained once, in a row in which it stands behind what the server had read before it."""
    trained = Drawn()
    for trajectory in trajectories:
        first, logprobs = 0, trajectory.rollout_logprobs
        for row in TrainingSample.all_of(trajectory):
            ids, num_sampled = row.prompt_ids + row.response_ids, row.num_sampled
            is_sampled = row.is_sampled or (True,) * num_sampled
            at = [place for place, sampled in enumerate(is_sampled, start=len(row.prompt_ids)) if sampled]
            for place, number in zip(at, row.places or range(num_sampled), strict=True):
                trained[ids[:place], ids[place], np.float32(logprobs[first + number])] += 1
            first += num_sampled
        assert first == trajectory.num_tokens
    assert trained <= drawn
