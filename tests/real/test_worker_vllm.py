"""A worker of a swarm that has started a real vLLM server: ``make test-vllm``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollover.engine.servers.vllm.config import VLLMConfig
from tests.real.models import real_model
from tests.real.servers import PATIENT
from tests.real.swarms import WATCHFUL, check_worker
from tests.real.test_vllm import ENV, PYTHON

pytestmark = pytest.mark.vllm


def test_a_worker_over_vllm_does_all_that_a_worker_does(tmp_path: Path) -> None:
    models = [real_model(tmp_path / f"v{seed}", seed=seed) for seed in range(2)]
    config = VLLMConfig(
        launch=True,
        launch_command=(os.path.join(os.path.dirname(PYTHON), "vllm"), "serve"),
        launch_args=("--max-model-len", "512", "--enforce-eager"),
        launch_env=ENV,
        max_running=8,
        stream_interval_tokens=1,
        **PATIENT,
        **WATCHFUL,
    )
    asyncio.run(check_worker(config, models, tmp_path))
