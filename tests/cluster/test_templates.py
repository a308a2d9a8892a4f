"""The templates of the docs for SLURM and Kubernetes: their script run with stubs, their YAML read."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from tests.speed import within

FOLDER = Path(__file__).parents[2] / "docs" / "how-to" / "clusters"
STUB = """\
#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  scontrol*) printf 'node-a\\nnode-b\\n' ;;
  *hostname*) echo "10.0.0.7 fe80::1" ;;
  srun*node-b*ray*start*) [ -z "${SECOND_ENDS:-}" ] && exec sleep 300; exit 1 ;;
  srun*ray*start*) exec sleep 300 ;;
  rollover*) exit "${RUN_EXITS:-0}" ;;
esac
"""
RAY = """\
import os
from pathlib import Path


def init(**kwargs):
    assert kwargs["address"] == "10.0.0.7:6379", kwargs


def nodes():
    calls = Path(os.environ["CALLS"])
    with calls.open("a") as file:
        file.write("nodes\\n")
    started = calls.read_text().count("ray start")
    joined = min(calls.read_text().count("nodes\\n"), started, int(os.environ["JOIN"]))
    return [{"Alive": True}] * joined + [{"Alive": False}] * 5
"""
"""In place of Ray: of the nodes where it was started one more has joined each time that somebody asks, up to
``JOIN``."""


def started(tmp_path: Path, *argv: str, says: str = "", **env: str) -> tuple[int, list[list[str]]]:
    """Run the script with stubs of what it calls, and expect ``says`` among its messages. Returns its exit code and all
    calls."""
    stubs, venv, calls = tmp_path / "bin", tmp_path / "venv" / "bin", tmp_path / "calls"
    stubs.mkdir()
    venv.mkdir(parents=True)
    (venv / "activate").write_text("")
    for name in ("scontrol", "srun", "ray", "rollover"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (stubs / "python").symlink_to(sys.executable)
    (stubs / "ray.py").write_text(RAY)
    given = {
        "PYTHONPATH": str(stubs),
        "JOIN": "2",
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "VENV": str(venv.parent),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "4",
        "HEAD_STARTS_S": "0",
        **env,
    }
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), *argv],
        env=given,
        timeout=within(60),
        capture_output=True,
        text=True,
        check=False,
    )
    assert says in done.stderr
    return done.returncode, [shlex.split(line, posix=False) for line in calls.read_text().splitlines()]


def test_the_slurm_script_starts_ray_on_all_nodes_and_the_run_on_one(tmp_path: Path) -> None:
    code, calls = started(tmp_path, "run.toml", "--trainer.num_devices", "8", NODE_TYPE="h100")
    assert code == 0
    rays = sorted(" ".join(call) for call in calls if call[0] == "srun" and "start" in call)
    assert len(rays) == 2
    assert "--nodelist=node-a ray start --head --port=6379 --node-ip-address=10.0.0.7 --num-gpus=4" in rays[0]
    assert "--nodelist=node-b ray start --address=10.0.0.7:6379 --num-gpus=4" in rays[1]
    assert all('--resources={"h100": 4} --block' in line for line in rays)
    (run,) = (call for call in calls if call[0] == "rollover")
    assert run[1:5] == ["train", "run.toml", "--trainer.num_devices", "8"]
    assert run[5:7] == ["--cluster.address", "10.0.0.7:6379"]
    assert calls[: calls.index(run)].count(["nodes"]) >= 2  # it has waited for the second


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"JOIN": "1", "NODES_START_S": "2"}, "slurm.sh: 1 of 2 nodes have joined Ray at 10.0.0.7:6379 within 2 s"),
        ({"JOIN": "1", "SECOND_ENDS": "1"}, "slurm.sh: 'ray start' has ended on node-b; its output above says why"),
    ],
)
def test_the_slurm_script_begins_no_run_without_all_nodes(tmp_path: Path, env: dict[str, str], says: str) -> None:
    code, calls = started(tmp_path, "run.toml", says=says, **env)
    assert code == 1
    assert not any(call[0] == "rollover" for call in calls)


def test_the_slurm_script_counts_the_nodes_of_a_cluster(cluster: Any) -> None:
    (program,) = re.findall(r"python -c '\n(.*?)'", (FOLDER / "slurm.sh").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program, cluster.address],
        timeout=within(120),
        capture_output=True,
        text=True,
        check=True,
    )
    there = connect(ClusterConfig(address=cluster.address)).nodes()
    assert int(done.stdout.splitlines()[-1]) == sum(node["Alive"] for node in there) >= 3


def test_the_slurm_script_launches_plans_and_hands_the_exit_code_on(tmp_path: Path) -> None:
    code, calls = started(tmp_path, "--launch", "plan.json", "run.toml", RUN_EXITS="2")
    assert code == 2
    (run,) = (call for call in calls if call[0] == "rollover")
    assert run[1:4] == ["launch", "plan.json", "run.toml"]
    assert any("--resources={}" in " ".join(call) for call in calls)


def test_the_slurm_script_asks_for_nodes_devices_and_time() -> None:
    head = (FOLDER / "slurm.sh").read_text().split("set -euo")[0]
    assert all(f"#SBATCH --{key}" in head for key in ("nodes=", "ntasks-per-node=1", "gpus-per-node=", "time="))


def test_the_rayjob_has_the_form_that_kuberay_asks_for() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["entrypoint"].startswith("rollover train /config/run.toml --run-dir /runs/")
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert mounted["runs"] == "/runs"
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        ((name, amount),) = json.loads(json.loads(group["rayStartParams"]["resources"])).items()
        (container,) = group["template"]["spec"]["containers"]
        assert str(amount) == container["resources"]["limits"]["nvidia.com/gpu"], name
