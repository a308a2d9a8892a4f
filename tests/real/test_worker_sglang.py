"""A worker of a swarm that has started a real SGLang server: ``make test-sglang``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollover.engine.servers.sglang.config import SGLangConfig
from tests.real.models import real_model
from tests.real.servers import PATIENT
from tests.real.sglang_server import ARGUMENTS, COMMAND, ENV
from tests.real.swarms import WATCHFUL, check_worker

pytestmark = pytest.mark.sglang


def test_a_worker_over_sglang_does_all_that_a_worker_does(tmp_path: Path) -> None:
    models = [real_model(tmp_path / f"v{seed}", seed=seed) for seed in range(2)]
    config = SGLangConfig(
        launch=True,
        launch_command=COMMAND,
        launch_args=ARGUMENTS,
        launch_env=ENV,
        max_running=8,
        stream_interval_tokens=1,
        **PATIENT,
        **WATCHFUL,
    )
    asyncio.run(check_worker(config, models, tmp_path))
