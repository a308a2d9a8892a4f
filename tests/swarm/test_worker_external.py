"""``rollover worker`` with servers that run already: a process that has no torch, before a scripted vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollover.engine.servers.vllm.dialect import call_seed
from rollover.swarm.coordinator.engine import SwarmEngine
from tests.engine.contract import update
from tests.engine.models import saved, tiny_model
from tests.engine.servers.scripted_server import ScriptedVLLM, serve, token_at
from tests.speed import within
from tests.swarm.test_worker_command import ROOT, make_token, said, token_file
from tests.swarm.test_worker_real import collected, flat, swarm, weights

SEED = 5
WITHOUT_TORCH = """\
import sys

for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None
from rollover.cli import main

sys.exit(main(sys.argv[1:]))
"""


def response_of(server: ScriptedVLLM) -> list[int]:
    """What the server draws, with the weights that it has now, for a call from its beginning."""
    return [token_at(call_seed(SEED, 0), i, server.weights) for i in range(12)]


@asynccontextmanager
async def worker_of(engine: SwarmEngine, folder: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process in which the trainer's packages cannot be imported, over the server at ``url``."""
    token = token_file(folder, make_token(folder / "swarm"))
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WITHOUT_TORCH, "worker", "--join", engine.url, "--token-file", str(token)),
        *("--cache", str(folder / "cache"), "--engine.kind", "vllm", "--engine.urls", f'["{url}"]'),
        *("--engine.weights_dir", str(folder / "shared")),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


async def test_a_worker_over_a_server_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    models = [saved(tiny_model(seed=seed), tmp_path / f"v{seed}") for seed in range(2)]
    server = ScriptedVLLM(tick_s=0.001)
    async with (
        asyncio.timeout(within(100)),
        swarm(tmp_path / "swarm", models[0], max_context_tokens=512) as engine,
        serve(server) as port,
        worker_of(engine, tmp_path, f"http://127.0.0.1:{port}") as worker,
    ):
        await said(worker, "serving version 0")
        chunks = await collected(engine, name="s", seed=SEED, max_new_tokens=12)
        assert [t for t, _ in flat(chunks)] == response_of(server)
        await update(engine, weights(1, models[1]))
        await said(worker, "serving version 1")
        assert Path(server.weights).parent == tmp_path / "shared" / "worker-laptop"
        assert server.version == "rollover:worker-laptop:1"
        chunks = await collected(engine, name="t", seed=SEED, max_new_tokens=12)
        assert [t for t, _ in flat(chunks)] == response_of(server)
        assert {chunk.policy_version for chunk in chunks} == {1}
        worker.send_signal(signal.SIGTERM)
        await said(worker, "left the swarm")
        assert await worker.wait() == 0
        assert server.version == "rollover:worker-laptop:1:free"
