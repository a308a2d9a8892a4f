"""``rollover worker`` with servers that run already: a process that has no torch, before a scripted vLLM."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rollover.engine.servers.vllm.dialect import call_seed
from rollover.swarm.coordinator.engine import SwarmEngine
from tests.engine.contract import update
from tests.engine.models import saved, tiny_model
from tests.engine.servers.scripted_server import ScriptedVLLM, serve, token_at
from tests.speed import within
from tests.swarm.test_worker_command import joining, process, said
from tests.swarm.test_worker_real import collected, flat, swarm, token_of, weights

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


def command(engine: SwarmEngine, folder: Path, port: int) -> list[str]:
    """Of a worker in whose process the trainer's packages cannot be imported, over the server on ``port``."""
    return [
        *("-c", WITHOUT_TORCH, *joining(engine, folder, token_of(folder / "swarm")), "--engine.kind", "vllm"),
        *("--engine.urls", f'["http://127.0.0.1:{port}"]', "--engine.weights_dir", str(folder / "shared")),
    ]


async def test_a_worker_over_a_server_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    models = [saved(tiny_model(seed=seed), tmp_path / f"v{seed}") for seed in range(2)]
    server = ScriptedVLLM(tick_s=0.001)
    async with (
        asyncio.timeout(within(100)),
        swarm(tmp_path / "swarm", models[0], max_context_tokens=512) as engine,
        serve(server) as port,
        process(*command(engine, tmp_path, port)) as worker,
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
