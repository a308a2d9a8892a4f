"""Plans that are run: the settings that they give a run, and what is refused before it begins. That such a run trains is in
``tests/cluster/test_whole.py``."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollover.devices.costs.training import trainer_costs
from rollover.devices.records import BF16_BYTES
from rollover.errors import ConfigError, PlanError
from rollover.planner.plan import Plan
from rollover.run.launching import check_types, launched_config, plan_settings, read_plan, who_goes_where
from tests.planner.test_doubts import pipelined
from tests.planner.test_doubts import plan as plan  # a fixture
from tests.planner.test_plan import QWEN_7B
from tests.runs import CONFIG, UNSEEN

ENGINE = "[engine]\nkind = 'embedded_server'\nkv_cache_bytes = 4194304\nstream_interval_tokens = 2\n"
RUN = re.sub(r"\[engine\]\n(?:\w+ = \d+\n)+", ENGINE, CONFIG)
VLLM_RUN = RUN.replace(ENGINE, "[engine]\nkind = 'vllm'\n")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """``run.toml``, of a run with vLLM."""
    file = tmp_path / "run.toml"
    file.write_text(VLLM_RUN)
    return file


def test_a_plan_says_how_many_of_what_go_where_and_how_large_a_step_is(plan: Plan) -> None:
    settings = plan_settings(plan, "vllm", 4096)
    part = plan.solution.plan.parts[0]
    assert settings["trainer"]["num_devices"] == part.dp
    assert settings["rollout"]["rollout_batch_size"] == 32 and settings["rollout"]["max_staleness"] == 4
    active = plan.solution.active
    for c, group in zip(active, settings["cluster"]["engines"], strict=True):
        kind = plan.problem.replica_kinds[c]
        assert (group["count"], group["max_running"]) == (plan.solution.replicas[c], kind.batch_cap)
        sizes = ["--tensor-parallel-size", str(kind.tp), "--pipeline-parallel-size", str(kind.pp)]
        assert group["args"][:6] == [*sizes, "--max-model-len", "4096"]
        assert group["resources"] == {}  # one type of device alone
    assert len({group["max_running"] for group in settings["cluster"]["engines"]}) == len(active)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_trains_as_the_plan_computed(plan: Plan, file: Path, recompute: bool) -> None:
    (part,) = plan.solution.plan.parts
    part = replace(part, recompute=recompute)
    training = replace(plan.solution.plan, parts=(part,))
    plan = replace(plan, solution=replace(plan.solution, plan=training))
    costs = trainer_costs(plan.model, plan.workload, plan.fleet.by_name[part.device], part)
    other = f"dtype = 'float32'\nmicro_batch_tokens = 100\ngradient_checkpointing = {str(not recompute).lower()}"
    file.write_text(VLLM_RUN.replace("[trainer]", f"[trainer]\n{other}"))
    trainer = launched_config(plan, str(file), ())[0].trainer
    assert trainer.num_devices == part.num_devices
    assert getattr(torch, trainer.dtype).itemsize == BF16_BYTES
    assert trainer.gradient_checkpointing is recompute
    assert trainer.micro_batch_tokens == math.ceil(costs.micro_tokens)
    assert launched_config(plan, str(file), ("--trainer.dtype", "float32"))[0].trainer.dtype == "float32"


def test_a_reference_policy_that_the_plan_has_no_memory_for_is_refused(plan: Plan, file: Path) -> None:
    file.write_text(f"{VLLM_RUN}[algorithm]\nkl_coef = 0.01\n")
    with pytest.raises(ConfigError, match=r"needs a reference policy .*rollover plan --reference-model"):
        launched_config(plan, str(file), ())
    counted = replace(plan, workload=replace(plan.workload, reference_model=True))
    assert launched_config(counted, str(file), ())[0].algorithm.kl_coef == 0.01
    assert launched_config(plan, str(file), ("--algorithm.kl_coef", "0"))[0].algorithm.kl_coef == 0


def test_only_a_plan_that_can_be_run_is_read(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(pipelined(plan).to_json())
    with pytest.raises(PlanError, match=r"cannot be run: .*not pipeline parallel \d+.* --for-launch"):
        read_plan(file)
    remedy = r"make one with rollover plan FLEET --for-launch --json plan\.json"
    file.write_text('{"fleet": {}}')
    with pytest.raises(PlanError, match=rf"is not a plan of this version: fleet\.name: .*; {remedy}"):
        read_plan(file)
    file.write_text("")
    with pytest.raises(PlanError, match=rf"is not a plan of this version: Invalid JSON: EOF [^:]*; {remedy}"):
        read_plan(file)
    file.write_text(plan.to_json())
    assert read_plan(file) == plan


def test_a_config_in_place_of_the_plan_is_not_to_be_written_over(tmp_path: Path) -> None:
    said = {"run.toml": "the plan comes first, as in rollover launch plan.json run.toml", "mine": "is not a plan"}
    for name in said:
        file = tmp_path / name
        file.write_text(VLLM_RUN)
        with pytest.raises(PlanError, match=said[name]) as error:
            read_plan(file)
        assert f"--json {name}" not in str(error.value)


@pytest.mark.parametrize("kind", ["embedded", "swarm"])
def test_an_engine_of_this_process_is_refused(plan: Plan, file: Path, kind: str) -> None:
    file.write_text(RUN.replace(ENGINE, ""))
    overrides = () if kind == "embedded" else ("--engine.kind", kind)
    with pytest.raises(ConfigError, match=rf"run\.toml: engine\.kind is '{kind}', and a plan is run with servers"):
        launched_config(plan, str(file), overrides)


def test_mistakes_are_located_in_the_users_file_or_in_the_plan(plan: Plan, file: Path) -> None:
    def refused(run: str, *overrides: str, group_size: int = 8) -> str:
        file.write_text(run)
        made = replace(plan, workload=replace(plan.workload, group_size=group_size))
        with pytest.raises(ConfigError) as error:
            launched_config(made, str(file), overrides, name="plan.json")
        assert "launched.toml" not in str(error.value)
        return str(error.value).replace(str(file), "run.toml")

    assert refused("stepz = 3\n" + VLLM_RUN).startswith("run.toml:1: stepz: unknown key")
    assert refused(VLLM_RUN, "--rollout.group_sise", "2").startswith("command line: --rollout.group_sise: unknown key")
    shared = VLLM_RUN.replace("[trainer]", "[trainer]\ncontext_parallel = 5")
    line = shared.splitlines().index("context_parallel = 5") + 1
    said = refused(shared)
    num_devices = plan.solution.plan.num_devices
    assert said.startswith(f"run.toml:{line}: trainer.context_parallel")
    assert said.endswith(f"(plan.json sets trainer.num_devices = {num_devices})")
    said = refused(shared, "--trainer.num_devices", "4")
    assert said.startswith("command line: --trainer.context_parallel") and "plan.json" not in said
    assert refused(VLLM_RUN, group_size=1).startswith("plan.json sets rollout.group_size = 1: rollout.group_size is 1")
    named = VLLM_RUN + "[algorithm]\nname = 'grpo'\n"
    assert refused(named, group_size=1).startswith("plan.json sets rollout.group_size = 1: ")


def test_each_setting_that_the_plan_replaces_is_said(plan: Plan, file: Path) -> None:
    was, size = 2, plan.workload.group_size
    text = VLLM_RUN.replace("[trainer]", "[trainer]\ndtype = 'bfloat16'\ngradient_checkpointing = true")
    file.write_text(f"{text}[cluster]\nengines = 3\n")
    notes = launched_config(plan, str(file), ())[1]
    assert f"the plan replaces rollout.group_size {was} by {size}" in notes
    assert "the plan replaces trainer.gradient_checkpointing true by false" in notes
    assert "the plan replaces cluster.engines" in notes
    assert not any("trainer.dtype" in note or "max_running" in note for note in notes)
    below = file.with_name("april.toml")
    below.write_text("extends = 'run.toml'\n[rollout.strategy]\nkind = 'april'\n")
    config, notes = launched_config(plan, str(below), ())
    assert "the plan replaces rollout.strategy 'april' by 'bounded_async'" in notes
    assert config.rollout.strategy.kind == "bounded_async" and config.rollout.group_size == size
    options = ("--rollout.strategy", "sync", "--rollout.max_staleness", "0", "--rollout.group_size", "2")
    config, notes = launched_config(plan, str(below), options)
    assert config.rollout.strategy.kind == "sync" and config.rollout.group_size == 2
    assert not any("rollout.strategy" in note or "rollout.group_size" in note for note in notes)


@pytest.mark.parametrize("key", ["rollout.max_new_tokens", "eval.max_new_tokens", "eval.sets.unseen.max_new_tokens"])
def test_servers_have_context_for_all_that_the_run_generates(plan: Plan, file: Path, key: str) -> None:
    file.write_text(VLLM_RUN + UNSEEN)
    longest = max(bucket.max_tokens for bucket in plan.workload.buckets)
    for options, tokens in (((), longest), ((f"--{key}", str(2 * longest)), 2 * longest)):
        config = launched_config(plan, str(file), options)[0]
        assert config.cluster is not None and not isinstance(config.cluster.engines, int)
        for group in config.cluster.engines:
            context = group.args[group.args.index("--max-model-len") + 1]
            assert context == str(config.tasks.max_prompt_tokens + tokens)


@pytest.mark.parametrize(("num_layers", "others"), [(28, 0), (56, 1)])
def test_a_plan_for_a_model_of_another_size_is_said(plan: Plan, file: Path, num_layers: int, others: int) -> None:
    model = file.parent
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    (model / "config.json").write_text(json.dumps(QWEN_7B | shape | {"num_hidden_layers": num_layers}))
    notes = launched_config(plan, str(file), ("--model.path", str(model)))[1]
    assert [note.split(":")[0] for note in notes if "made for" in note] == others * [
        f"the plan was made for qwen-1.5b (1.78 billion parameters), but {model} has 3.09 billion"
    ]


def test_the_table_shows_what_will_run(plan: Plan, file: Path) -> None:
    options = ("--trainer.num_devices", "2", "--cluster.trainer_resources", "{x = 1}", "--cluster.engines.0.count", "7")
    train, *rollout = who_goes_where(plan, launched_config(plan, str(file), options)[0])
    assert (train.count, train.each, train.resources) == (2, "1 x h100-sxm", {"x": 1.0})
    assert rollout[0].count == 7
    kind = plan.problem.replica_kinds[plan.solution.active[0]]
    assert (rollout[0].each, rollout[0].running) == (f"{kind.num_devices} x h100-sxm", kind.batch_cap)


def test_nodes_that_do_not_name_their_type_are_told_how_to(plan: Plan, file: Path) -> None:
    other = replace(plan.fleet.nodes[0].device, name="l4")
    mixed = replace(
        plan, fleet=replace(plan.fleet, nodes=(*plan.fleet.nodes, replace(plan.fleet.nodes[0], device=other)))
    )
    config, mixed_config = (launched_config(made, str(file), ())[0] for made in (plan, mixed))
    check_types(plan, config, [{"GPU": 4.0}])
    check_types(mixed, mixed_config, [{"GPU": 4.0, "h100-sxm": 4.0}])
    with pytest.raises(ConfigError, match=r"'h100-sxm', by which .*\n  ray start .*--resources='\{\"h100-sxm\": 4\}'"):
        check_types(mixed, mixed_config, [{"GPU": 4.0}])
