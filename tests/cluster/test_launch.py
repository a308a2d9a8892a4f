"""Plans that are run: from `rollover plan` to a run on nodes of two types, and what is refused before it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover import cli
from rollover.devices.costs.training import trainer_costs
from rollover.devices.records import BF16_BYTES
from rollover.errors import ConfigError, PlanError
from rollover.planner.plan import Plan
from rollover.run.launching import check_types, launched_config, plan_settings, read_plan, who_goes_where
from tests import runs
from tests.planner.test_doubts import pipelined
from tests.planner.test_doubts import plan as plan  # a fixture
from tests.runs import CONFIG, rows, save_model, working_in

FLEET = """\
network = { gbit_s = 10 }
[[nodes]]
device = "one"
num_devices = 2
[[nodes]]
device = "two"
num_devices = 2
""" + "".join(
    f"""\
[devices.{name}]
name = "a processor"
bf16_tflops = {tflops}
hbm_gbps = 21.2
hbm_gib = 16
link_gbps = 22.0
source = "made up"
verified = true
[devices.{name}.efficiency]
train = 0.8
prefill = 0.7
decode = 0.5
bandwidth = 1.0
link = 1.0
memory = 0.9
step_ms = 1.0
link_latency_us = 2.0
source = "made up"
"""
    for name, tflops in (("one", 0.4), ("two", 0.2))
)
ENGINE = "[engine]\nkind = 'embedded_server'\nkv_cache_bytes = 4194304\nstream_interval_tokens = 2\n"
RUN = re.sub(r"\[engine\]\n(?:\w+ = \d+\n)+", ENGINE, CONFIG)
VLLM_RUN = RUN.replace(ENGINE, "[engine]\nkind = 'vllm'\n")


@pytest.fixture
def experiment(tmp_path: Path) -> Iterator[Path]:
    model = save_model(tmp_path / "policy")
    with working_in(tmp_path, model):
        Path("run.toml").write_text(RUN)
        Path("fleet.toml").write_text(FLEET)
        yield tmp_path


@pytest.mark.slow
def test_a_plan_for_two_types_of_node_is_made_and_run(
    cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = ("--workload", "light-8k", "--cap", "256", "--num-groups", "16", "--max-staleness", "2")
    assert (
        cli.main(["plan", "fleet.toml", "--model", "model", *workload, "--quick", "--for-launch", "--json", "p.json"])
        == 0
    )
    train, *rollout = who_goes_where(read_plan(Path("p.json")))
    assert [(placed.count, placed.resources) for placed in (train, *rollout)] == [
        (1, {"one": 1.0}),
        (1, {"one": 1.0}),
        (2, {"two": 1.0}),
    ]
    assert rollout[0].running != rollout[1].running
    smaller = ("--rollout.rollout_batch_size", "4", "--rollout.group_size", "2", "--rollout.max_new_tokens", "40")
    options = ("--cluster.address", cluster.address, "--logging.progress", "plain", *smaller)
    capsys.readouterr()
    assert cli.main(["launch", "p.json", "run.toml", "--run-dir", "run", *options]) == 0, capsys.readouterr().err
    said = " ".join("".join(capsys.readouterr()).split())
    assert "1 x two" in said and "trainer: rank 0 on node " in said
    assert [row["step"] for row in rows(Path("run"))] == [0, 1, 2, 3]
    names = {name for batch in runs.batches(Path("run")) for name in engines_of(batch)}
    assert names <= {"engine-0", "engine-1", "engine-2"} and len(names) > 1
    before, after = (
        {f.name: f.read_bytes() for f in Path(f"run/checkpoints/step_{n}").glob("*.safetensors")} for n in (2, 4)
    )
    assert len(after) == 1 and before.keys() == after.keys() and before != after


def engines_of(batch: Any) -> set[str]:
    return {span.engine for group in batch.groups for sample in group.trajectories for span in sample.segments}


def test_a_plan_says_how_many_of_what_go_where_and_how_large_a_step_is(plan: Plan) -> None:
    settings = plan_settings(plan, "vllm", 512)
    part = plan.solution.plan.parts[0]
    assert settings["trainer"]["num_devices"] == part.dp
    assert settings["rollout"]["rollout_batch_size"] == 32 and settings["rollout"]["max_staleness"] == 4
    active = plan.solution.active
    longest = settings["rollout"]["max_new_tokens"]
    for c, group in zip(active, settings["cluster"]["engines"], strict=True):
        kind = plan.problem.replica_kinds[c]
        assert (group["count"], group["max_running"]) == (plan.solution.replicas[c], kind.batch_cap)
        assert group["args"][:4] == ["--tensor-parallel-size", str(kind.tp), "--max-model-len", str(512 + longest)]
        assert group["resources"] == {}  # one type of device alone
    assert len({group["max_running"] for group in settings["cluster"]["engines"]}) == len(active)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_trains_in_the_way_whose_time_and_memory_the_plan_has_worked_out(
    plan: Plan, tmp_path: Path, recompute: bool
) -> None:
    (part,) = plan.solution.plan.parts
    part = replace(part, recompute=recompute)
    training = replace(plan.solution.plan, parts=(part,))
    plan = replace(plan, solution=replace(plan.solution, plan=training))
    costs = trainer_costs(plan.model, plan.workload, plan.fleet.by_name[part.device], part)
    file = tmp_path / "run.toml"
    other = f"dtype = 'float32'\nmicro_batch_tokens = 100\ngradient_checkpointing = {str(not recompute).lower()}"
    file.write_text(VLLM_RUN.replace("[trainer]", f"[trainer]\n{other}"))
    trainer = launched_config(plan, str(file), (), tmp_path).trainer
    assert trainer.num_devices == part.num_devices
    assert getattr(torch, trainer.dtype).itemsize == BF16_BYTES
    assert trainer.gradient_checkpointing is recompute
    assert trainer.micro_batch_tokens == math.ceil(costs.micro_tokens)
    assert launched_config(plan, str(file), ("--trainer.dtype", "float32"), tmp_path).trainer.dtype == "float32"


def test_a_reference_policy_that_the_plan_has_no_memory_for_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"{VLLM_RUN}[algorithm]\nkl_coef = 0.01\n")
    with pytest.raises(ConfigError, match=r"needs a reference policy .*rollover plan --reference-model"):
        launched_config(plan, str(file), (), tmp_path)
    counted = replace(plan, workload=replace(plan.workload, reference_model=True))
    assert launched_config(counted, str(file), (), tmp_path).algorithm.kl_coef == 0.01
    assert launched_config(plan, str(file), ("--algorithm.kl_coef", "0"), tmp_path).algorithm.kl_coef == 0


def test_only_a_plan_that_can_be_run_is_read(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(pipelined(plan).to_json())
    with pytest.raises(PlanError, match=r"cannot be run: it trains pipeline parallel \d+ .* --for-launch"):
        read_plan(file)
    file.write_text('{"fleet": {}}')
    with pytest.raises(PlanError, match=r"is not a plan of this version: fleet\.name: .*rollover plan FLEET --json"):
        read_plan(file)
    file.write_text(plan.to_json())
    assert read_plan(file) == plan


def test_an_engine_of_this_process_is_refused(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\npath = 'm'\n")
    with pytest.raises(ConfigError, match=r"engine\.launch"):
        launched_config(plan, str(file), (), tmp_path)


def test_nodes_that_do_not_name_their_type_are_told_how_to(plan: Plan) -> None:
    other = replace(plan.fleet.nodes[0].device, name="l4")
    mixed = replace(
        plan, fleet=replace(plan.fleet, nodes=(*plan.fleet.nodes, replace(plan.fleet.nodes[0], device=other)))
    )
    check_types(plan, [{"GPU": 4.0}])
    check_types(mixed, [{"GPU": 4.0, "h100-sxm": 4.0}])
    with pytest.raises(ConfigError, match=r"'h100-sxm', by which .*\n  ray start .*--resources='\{\"h100-sxm\": 4\}'"):
        check_types(mixed, [{"GPU": 4.0}])
