"""The templates of the docs for SLURM and Kubernetes: their script run with stubs, their YAML read."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "how-to" / "clusters"
STUB = """\
#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  scontrol*) printf 'node-a\\nnode-b\\n' ;;
  *hostname*) echo "10.0.0.7 fe80::1" ;;
  srun*ray*start*) exec sleep 300 ;;
  rollover*) # the run ends when Ray has been started on both nodes, and the job ends with it
    for _ in $(seq 600); do [ "$(grep -c "ray start" "$CALLS")" -ge 2 ] && break; sleep 0.1; done
    exit "${RUN_EXITS:-0}" ;;
esac
"""


def started(tmp_path: Path, *argv: str, **env: str) -> tuple[int, list[list[str]]]:
    """Run the script with stubs of what it calls. Returns its exit code and all calls."""
    stubs, venv, calls = tmp_path / "bin", tmp_path / "venv" / "bin", tmp_path / "calls"
    stubs.mkdir()
    venv.mkdir(parents=True)
    (venv / "activate").write_text("")
    for name in ("scontrol", "srun", "ray", "rollover"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    given = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "VENV": str(venv.parent),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_GPUS_ON_NODE": "4",
        "HEAD_STARTS_S": "0",
        **env,
    }
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), *argv], env=given, timeout=60, capture_output=True, text=True, check=False
    )
    return done.returncode, [shlex.split(line, posix=False) for line in calls.read_text().splitlines()]


def test_the_slurm_script_starts_ray_on_every_node_and_the_run_on_the_first(tmp_path: Path) -> None:
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


def test_the_slurm_script_launches_plans_and_hands_the_exit_code_on(tmp_path: Path) -> None:
    code, calls = started(tmp_path, "--launch", "plan.json", "run.toml", RUN_EXITS="2")
    assert code == 2
    (run,) = (call for call in calls if call[0] == "rollover")
    assert run[1:4] == ["launch", "plan.json", "run.toml"]
    assert any("--resources={}" in " ".join(call) for call in calls)


def test_the_slurm_script_has_no_error_that_bash_sees() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True, timeout=60)
    head = (FOLDER / "slurm.sh").read_text().split("set -euo")[0]
    assert all(f"#SBATCH --{key}" in head for key in ("nodes=", "ntasks-per-node=1", "gpus-per-node=", "time="))


@pytest.fixture
def job() -> Any:
    return yaml.safe_load((FOLDER / "kuberay.yaml").read_text())


def test_the_rayjob_has_the_form_that_kuberay_asks_for(job: Any) -> None:
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
