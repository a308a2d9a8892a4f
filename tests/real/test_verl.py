"""The integration with the real verl, whose trainer runs on a CPU up to the gradient: ``make test-verl``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest

from rollover.report.metrics import read_metrics
from rollover.rollout.journal import read_events
from rollover.rollout.state import RolloutState
from tests import runs
from tests.integrations.slime.kit import shows_its_run
from tests.speed import within

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[2]
STEPS, BATCH, GROUP, LENGTH, PROMPTS, EVALUATED = 5, 3, 4, 40, 12, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 100, "right": ground_truth}
"""


def documented() -> list[str]:
    """The settings that the page adds to verl's command."""
    page = (ROOT / "docs/how-to/verl.md").read_text()
    (command,) = re.findall(r"^\$ python -m verl\.trainer\.main_ppo \.\.\. (.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [word for word in command.split() if word != "\\"]


def settings(folder: Path) -> list[str]:
    """Settings of a small run of verl, without Rollover's."""
    model = runs.save_model(folder / "model")
    described = model / "tokenizer_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "chat_template": TEMPLATE}))
    (folder / "reward.py").write_text(REWARD)
    for name, number in (("train", PROMPTS), ("val", EVALUATED)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{i}+{i}="}],
                "data_source": "sums",
                "reward_model": {"ground_truth": str(2 * i)},
                "extra_info": {"index": i},
            }
            for i in range(number)
        ]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    given = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.max_num_seqs": 32,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "critic.enable": False,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "val.parquet",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 16,
        "data.max_response_length": LENGTH,
        "data.dataloader_num_workers": 0,
        "data.seed": 5,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 2,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": folder / "out",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
    }
    return [f"{key}={value}" for key, value in given.items()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What the run wrote, and its folder."""
    folder = tmp_path_factory.mktemp("verl")
    written = folder / "seen.jsonl"
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [os.environ["VERL_PYTHON"], "-m", "tests.real.verl_run", str(written), *settings(folder), *documented()],
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(800),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads(line) for line in written.read_text().splitlines()], folder


def steps(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "step" in line]


def test_each_batch_has_whole_groups_once(run: tuple[list[dict[str, Any]], Path]) -> None:
    batches = steps(run[0])
    assert [batch["step"] for batch in batches] == [*range(1, STEPS + 1)]
    keys = Counter(key for batch in batches for key in batch["keys"])
    assert set(keys.values()) == {1} and len(keys) == STEPS * BATCH * GROUP
    groups = Counter((batch["step"], key.split("_")[0]) for batch in batches for key in batch["keys"])
    assert set(groups.values()) == {GROUP}


def test_verl_trains_what_its_servers_sampled(run: tuple[list[dict[str, Any]], Path]) -> None:
    resumed = 0
    for batch in steps(run[0]):
        for key, tag, row in zip(batch["keys"], batch["tags"], batch["rows"], strict=True):
            assert key == f"{row['uid']}_{row['session_id']}_0"
            assert 0 < len(row["responses"]) == tag["response_len"] <= LENGTH
            assert row["input_ids"] == row["prompts"] + row["responses"]
            assert row["response_mask"] == row["loss_mask"] == [1] * len(row["responses"])
            assert row["old_log_probs"] == row["rollout_log_probs"], "verl reads them in its bypass mode"
            first, last = tag["min_global_steps"], tag["max_global_steps"]
            assert batch["step"] - 1 - 4 <= first <= last <= batch["step"] - 1
            resumed += first < last
    assert resumed >= GROUP, "each response to the slow prompt is stopped and resumed"
    assert all(batch["metrics"]["rollover/staleness/max"] <= 4 for batch in steps(run[0]))


def test_rewards_and_advantages_are_verls(run: tuple[list[dict[str, Any]], Path]) -> None:
    for batch in steps(run[0]):
        by_group: dict[str, list[float]] = {}
        for row in batch["rows"]:
            text = len(row["responses"]) - (row["responses"][-1] == 0)  # one character for each token but the end
            assert row["rm_scores"][-1] == pytest.approx(text / 100)
            assert row["extra_fields"]["reward_extra_info"]["right"] == row["reward_model"]["ground_truth"]
            by_group.setdefault(row["uid"], []).append(row["advantages"][-1])
        assert all(sum(advantages) == pytest.approx(0.0, abs=1e-4) for advantages in by_group.values())


def test_more_prompts_are_submitted_than_a_batch_has(run: tuple[list[dict[str, Any]], Path]) -> None:
    assert len(steps(run[0])[0]["pending"]) >= BATCH


def test_servers_are_stopped_and_opened_before_they_sleep(run: tuple[list[dict[str, Any]], Path]) -> None:
    (servers,) = [line["servers"] for line in run[0] if "servers" in line]
    assert [server["wrong"] for server in servers] == [[], []]
    assert all(server["num_aborts"] >= 1 for server in servers)


def test_evaluations_go_through_verls_own_agent_loops(run: tuple[list[dict[str, Any]], Path]) -> None:
    evaluated = [line for line in run[0] if "validated" in line]
    assert [line["validated"] for line in evaluated] == [0, 2, 4, 5]
    assert all("val-core/sums/reward/mean@1" in line["metrics"] for line in evaluated)


def test_the_run_can_be_reported_and_simulated(run: tuple[list[dict[str, Any]], Path]) -> None:
    folder = run[1] / "out/rollover/from_step_0"
    rows = read_metrics(folder)
    assert [row.step for row in rows] == [*range(STEPS)]
    for row in rows:
        assert 0.0 < row.values["time/rollout_s"] <= row.values["time/step_s"]
    state = RolloutState(event for _, event in read_events(folder / "journal.sqlite", effective=True))
    state.ledger.check()
    trained = sum(len(row["responses"]) for batch in steps(run[0])[:-1] for row in batch["rows"])
    assert state.ledger.tokens.trained >= trained and not state.ledger.tokens.wasted.total()
    shows_its_run(folder)
