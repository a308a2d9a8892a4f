"""A worker of a swarm that has started a real server: ``make test-vllm`` and ``make test-sglang``."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from tests.real import sglang_server, test_vllm
from tests.real.models import real_model
from tests.real.servers import PATIENT
from tests.real.swarms import WATCHFUL, check_worker

SHARED = {"launch": True, "max_running": 8, "stream_interval_tokens": 1, **PATIENT, **WATCHFUL}
VLLM = VLLMConfig(
    launch_command=test_vllm.COMMANDS[0],
    launch_args=("--max-model-len", "512", "--enforce-eager"),
    launch_env=test_vllm.ENV,
    **SHARED,  # type: ignore[arg-type]
)
SGLANG = SGLangConfig(
    launch_command=sglang_server.COMMAND,
    launch_args=sglang_server.ARGUMENTS,
    launch_env=sglang_server.ENV,
    **SHARED,  # type: ignore[arg-type]
)


@pytest.mark.real_time
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(VLLM, marks=pytest.mark.vllm, id="vllm"),
        pytest.param(SGLANG, marks=pytest.mark.sglang, id="sglang"),
    ],
)
async def test_a_worker_over_a_server_does_all_that_a_worker_does(tmp_path: Path, config: ServerConfig) -> None:
    await check_worker(config, [real_model(tmp_path / f"v{seed}", seed=seed) for seed in range(2)], tmp_path)
