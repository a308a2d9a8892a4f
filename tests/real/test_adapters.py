"""Runs that give adapters alone to real vLLM and SGLang servers, started by the run, on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollover import cli
from rollover.run.export import export
from rollover.trainer.logprobs import all_logprobs
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from tests import runs
from tests.real import sglang_server, test_vllm
from tests.real.models import TOLERANCE
from tests.real.servers import decode_with
from tests.run.test_train import EVERY_VERSION

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 128}
"""Servers on a CPU want matrices and heads of usual sizes."""
LORA = ("--trainer.lora.rank", "4", "--trainer.lora.publish", "adapter", "--trainer.learning_rate", "0.01")


def vllm() -> dict[str, Any]:
    return {
        "kind": "vllm",
        "launch_command": [test_vllm.PYTHON, "-m", "vllm.entrypoints.cli.main", "serve"],
        "launch_args": ["--enforce-eager", "--max-model-len", "128"],
        "launch_env": test_vllm.ENV,
    }


def sglang() -> dict[str, Any]:
    """Its usual way to compute adapters needs a GPU."""
    return {
        "kind": "sglang",
        "launch_command": sglang_server.COMMAND,
        "launch_args": [*sglang_server.ARGUMENTS, "--lora-backend", "torch_native"],
        "launch_env": sglang_server.ENV,
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(vllm, marks=pytest.mark.vllm), pytest.param(sglang, marks=pytest.mark.sglang)]
)
def test_a_run_samples_from_the_adapters_of_the_version_that_a_token_has(tmp_path: Path, kind: Any) -> None:
    """Recorded log-probs are those of the merged model of each version; no publication after the first is larger than
    the adapters.

    The bound makes sure that the last of three batches has tokens of adapters, however fast this machine decodes.
    """
    model = runs.save_model(tmp_path / "source", **SHAPE)
    with runs.working_in(tmp_path, model):
        limits = {"max_running": 8, "control_timeout_s": 300.0, "abort_timeout_s": 60.0}
        decode_with({"launch": True, **limits, **kind()})
        options = ("--rollout.strategy", "april", "--rollout.max_staleness", "1", "--steps", "3")
        assert cli.main(["train", "run.toml", "--run-dir", "out", *EVERY_VERSION, *LORA, *options]) == 0
        batches = runs.batches(Path("out"))
        versions = [{v for t in batch.trajectories for v in t.policy_versions} for batch in batches]
        assert len(versions) == 3 and 0 in versions[0]
        assert all(step - 1 <= min(seen) <= max(seen) <= step for step, seen in enumerate(versions))
        trajectories = [t for batch in batches for t in batch.trajectories]
        samples = [TrainingSample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids) for t in trajectories]
        versions_T = torch.tensor([v for t in trajectories for v in t.policy_versions])
        recorded_T = torch.tensor([p for t in trajectories for p in t.rollout_logprobs])
        for version in versions_T.unique().tolist():
            folder = Path("model")
            if version:
                folder = Path(f"version-{version}")
                export(Path("out"), folder, step=version)
            logprobs_T = all_logprobs(open_model(folder), pack(samples, 1024), 1.0, num_tokens=len(recorded_T))
            distance_T = (logprobs_T - recorded_T)[versions_T == version].abs()
            assert float(distance_T.max()) < TOLERANCE, version
        published = {path.name: [*path.glob("adapter_model.safetensors")] for path in Path("out/weights").glob("v*")}
        assert published.keys() == {"v2", "v3"} and all(published.values())
