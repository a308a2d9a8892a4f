"""Turns a plan into a run on a Ray cluster: which ranks and servers go to nodes of which type, and with which settings.

A node offers a resource that is named after its device type in the plan, one for each of its devices, as in ``ray start
--resources='{"h20": 8}'``. A plan with a single type needs none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollover.algorithms.config import resolve
from rollover.devices.costs import passes
from rollover.devices.costs.records import ReplicaKind
from rollover.devices.model_shape import read_shape
from rollover.errors import ConfigError, ModelError, PlanError
from rollover.planner.plan import Plan
from rollover.run.building import SettingsLayer, build_config, replaced, written_kind
from rollover.run.config import RunConfig, longest_tokens
from rollover.settings.toml import literal

_SIZES = {"vllm": ("--tensor-parallel-size", "--pipeline-parallel-size"), "sglang": ("--tp-size", "--pp-size")}
_NO_SERVERS = ("embedded", "swarm")
"""Kinds of engine that a plan cannot place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One line of the table of who goes where."""

    role: str
    count: int
    each: str
    running: int | None
    """Samples that a server runs at the same time."""
    resources: Mapping[str, float]
    """Custom resources of its node."""


def read_plan(file: Path) -> Plan:
    """Read the output of ``rollover plan --json``. Raises ``PlanError`` when it is not a plan or cannot be run; the
    message says why."""
    if file.suffix == ".toml":
        raise PlanError(
            f"{file} is a TOML file, not a plan: the plan comes first, as in rollover launch plan.json {file.name}"
        )
    try:
        plan = TypeAdapter(Plan).validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        what = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        # The file may be anything: the remedy must not write over it.
        raise PlanError(
            f"{file} is not a plan of this version: {what}; make one with rollover plan FLEET --for-launch --json"
            " plan.json"
        ) from None
    if found := plan.obstacles:
        raise PlanError(
            f"{file} cannot be run: {'; '.join(found)}. Make another with rollover plan --for-launch --json {file.name}"
        )
    return plan


def launched_config(
    plan: Plan, config: str, overrides: Sequence[str], *, name: str = "the plan"
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config of a run of ``plan``: the user's file, with the plan's settings in place of its own, and then
    the overrides. Also return one line for each setting of the file that the plan replaces by a different value, and
    one if the plan was made for a model of another size.

    Args:
        name: the plan's file, for messages.

    Raises ``ConfigError`` for a config that the plan cannot be run with.
    """
    kind = written_kind(config, overrides, "engine")
    if kind in _NO_SERVERS:
        raise ConfigError(
            f"{config}: engine.kind is {kind!r}, and a plan is run with servers: choose 'vllm', 'sglang' or"
            " 'embedded_server'"
        )
    asked = build_config(config, overrides, SettingsLayer(name=name, settings=plan_settings(plan, "", 0)))
    if resolve(asked.algorithm).needs_ref and asked.trainer.lora is None and not plan.workload.reference_model:
        raise ConfigError(
            f"{config}: algorithm {asked.algorithm.name!r} needs a reference policy (kl_coef), for which the plan has"
            " no memory: plan with rollover plan --reference-model, or set algorithm.kl_coef = 0"
        )
    layer = SettingsLayer(name=name, settings=plan_settings(plan, kind, longest_tokens(asked)))
    notes = (_replacement(key, old, new) for key, old, new in replaced(config, overrides, layer))
    return build_config(config, overrides, layer), (*notes, *_other_size(plan, asked.model.path))


def _other_size(plan: Plan, path: str | None) -> Iterator[str]:
    """Say that the model in a folder is not of the size of the plan's."""
    if path is None or not Path(path).is_dir():
        return
    try:
        own, planned = read_shape(path).parameters, plan.model.parameters
    except ModelError:
        return
    if not math.isclose(own, planned, rel_tol=0.01):  # a vocabulary may be padded
        yield (
            f"the plan was made for {plan.model.name} ({planned / 1e9:.3g} billion parameters), but {path} has"
            f" {own / 1e9:.3g} billion: make another with rollover plan --for-launch --model {path}"
        )


def _replacement(key: str, old: Any, new: Any) -> str:
    """Say that the plan replaces a setting; tables of servers are too long to repeat, and may hold secrets."""
    if isinstance(new, list):
        return f"the plan replaces {key}"
    shown = (repr(value) if isinstance(value, str) else literal(value) for value in (old, new))
    return f"the plan replaces {key} {' by '.join(shown)}"


def plan_settings(plan: Plan, kind: str, context: int) -> dict[str, Any]:
    """Return the settings that a plan determines, for servers of one kind with a context of so many tokens: the size of
    a step, how far rollout may run ahead, and what its times and its memory count on. Passes are in bfloat16, over as
    many tokens as the longest sequence has, with or without recomputing activations (``devices.costs.training``)."""
    parts, workload, staleness = plan.solution.plan.parts, plan.workload, plan.problem.max_staleness
    longest_response = max(bucket.max_tokens for bucket in workload.buckets)
    return {
        "rollout": {
            "strategy": "bounded_async" if staleness else "sync",
            "rollout_batch_size": workload.num_groups,
            "group_size": workload.group_size,
            "max_new_tokens": longest_response,
            **({"max_staleness": staleness} if staleness else {}),
        },
        "engine": {"launch": True, **({"kv_on_update": "keep"} if workload.keeps_kv else {})},
        "trainer": {
            "num_devices": parts[0].num_devices,
            "dtype": "bfloat16",
            "micro_batch_tokens": math.ceil(passes.longest_tokens(workload)),
            "gradient_checkpointing": any(part.recompute for part in parts),
        },
        "cluster": {
            "trainer_resources": _of_type(plan, parts[0].device, 1),
            "engines": [_group(plan, kind, c, count, context) for c, count in _replicas(plan)],
        },
    }


def _group(plan: Plan, kind: str, c: ReplicaKind, count: int, context: int) -> dict[str, Any]:
    return {
        "count": count,
        "devices": c.num_devices,
        "max_running": c.batch_cap,
        "resources": _of_type(plan, c.device, c.num_devices),
        "args": _arguments(plan, kind, c, context),
    }


def _arguments(plan: Plan, kind: str, c: ReplicaKind, context: int) -> list[str]:
    share = f"{plan.fleet.by_name[c.device].efficiency.memory:g}"
    if kind in _SIZES:
        tensor, pipeline = _SIZES[kind]
        sizes = [tensor, str(c.tp), pipeline, str(c.pp)]  # a setting of launch_args comes before these
        if kind == "vllm":
            return [*sizes, "--max-model-len", str(context), "--gpu-memory-utilization", share]
        return [*sizes, "--context-length", str(context), "--mem-fraction-static", share]
    if kind and c.num_devices > 1:
        raise ConfigError(
            f"the plan has replicas of {c.num_devices} {c.device}, and a server of engine.kind {kind!r} has one device:"
            f" choose 'vllm' or 'sglang', or plan with rollover plan --for-launch --server {kind}"
        )
    return []


def _replicas(plan: Plan) -> list[tuple[ReplicaKind, int]]:
    kinds, counts = plan.problem.replica_kinds, plan.solution.replicas
    return [(kinds[c], counts[c]) for c in plan.solution.active]


def _of_type(plan: Plan, device: str, count: int) -> dict[str, float]:
    """Return the resource that only nodes of this type have; none is needed if all are of one type."""
    return {device: float(count)} if len(plan.fleet.devices) > 1 else {}


def who_goes_where(plan: Plan, config: RunConfig) -> Iterator[Placed]:
    """List the roles of a run of ``plan``, training first, as its config says: overrides may differ from the plan."""
    assert config.cluster is not None and not isinstance(config.cluster.engines, int), "the plan sets both"
    resources = config.cluster.trainer_resources
    count = config.trainer.num_devices
    yield Placed(role="train", count=count, each=_each(plan, 1, resources), running=None, resources=resources)
    for group in config.cluster.engines:
        each = _each(plan, group.devices or 1, group.resources)
        yield Placed(role="rollout", count=group.count, each=each, running=group.max_running, resources=group.resources)


def _each(plan: Plan, count: int, resources: Mapping[str, float]) -> str:
    """Return what one rank or server runs on, such as ``2 x h20``; the type is known by its resource."""
    names = [device.name for device in plan.fleet.devices]
    device = names[0] if len(names) == 1 else next((name for name in names if name in resources), "any type")
    return f"{count} x {device}"


def check_types(plan: Plan, config: RunConfig, offered: Sequence[Mapping[str, float]]) -> None:
    """Raise ``ConfigError`` with the commands that start the nodes correctly when no node offers a type's resource.

    Args:
        offered: the resources of each node that is alive.
    """
    sizes = {node.device.name: node.num_devices for node in plan.fleet.nodes}
    missing = [
        name
        for placed in who_goes_where(plan, config)
        for name in placed.resources
        if name in sizes and not any(name in node for node in offered)
    ]
    if missing:
        commands = "\n".join(
            f"  ray start --address=HEAD:6379 --resources='{{\"{name}\": {sizes[name]}}}'    on each {name} node"
            for name in dict.fromkeys(missing)
        )
        raise ConfigError(
            f"no node of the Ray cluster offers the resource {missing[0]!r}, by which the plan tells its types of node"
            f" apart; start them with\n{commands}"
        )
