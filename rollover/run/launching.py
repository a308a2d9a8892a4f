"""Turns a plan into a run on a Ray cluster: which ranks and servers go to nodes of which type, and with which settings.

A node offers a resource that is named after its device type in the plan, one for each of its devices, as in ``ray start
--resources='{"h20": 8}'``. A plan with a single type needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollover.algorithms.config import resolve
from rollover.devices.costs.records import ReplicaKind
from rollover.errors import ConfigError, PlanError
from rollover.planner.launchable import can_train
from rollover.planner.plan import Plan
from rollover.planner.settings import engine_settings, rollout_settings, trainer_settings
from rollover.run.config import RunConfig
from rollover.run.loading import find
from rollover.run.loading import load as load_config

_SIZES = {
    "vllm": ("--tensor-parallel-size", "--pipeline-parallel-size"),
    "sglang": ("--tp-size", "--pp-size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One line of the table of who goes where.

    Example: ``Placed(role="rollout", count=4, each="2 x h20", running=64, resources={"h20": 2.0})``
    """

    role: str
    count: int
    each: str
    running: int | None
    """Samples that a server runs at the same time."""
    resources: Mapping[str, float]
    """Custom resources of its node."""


def read_plan(file: Path) -> Plan:
    """Read the output of ``rollover plan --json``.

    Raises ``PlanError`` when it is not a plan, or one that cannot be run; the message says why.
    """
    try:
        plan = TypeAdapter(Plan).validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"{file} is not a plan of this version: {where}: {first['msg']}; make one with rollover plan FLEET --json"
            f" {file.name}"
        ) from None
    if found := plan.obstacles:
        raise PlanError(
            f"{file} cannot be run: {'; '.join(found)}. Make one that can with rollover plan --for-launch --json"
            f" {file.name}"
        )
    return plan


def launched_config(plan: Plan, config: str, overrides: Sequence[str], folder: Path) -> RunConfig:
    """Return the config of a run of ``plan``: the user's file, with the plan's settings in place of its own, and then
    the overrides.

    Args:
        folder: where the file that is loaded, ``launched.toml``, is written.

    Raises ``ConfigError`` for a config that the plan cannot be run with.
    """
    from rollover.settings import toml

    file = folder / "launched.toml"
    base = str(find(config).resolve())

    def loaded(changes: Mapping[str, Any]) -> RunConfig:
        file.write_text(toml.dumps({"extends": base, **changes}), encoding="utf-8")
        return load_config(file, overrides)

    asked = loaded(plan_settings(plan, "", 0))
    kind = str(getattr(asked.engine, "kind", ""))
    if kind not in (*_SIZES, "embedded_server"):
        raise ConfigError(
            f"{config}: engine.kind is {kind!r}, and a plan is run with servers: choose 'vllm', 'sglang' or"
            " 'embedded_server'"
        )
    if resolve(asked.algorithm).needs_ref and asked.trainer.lora is None and not plan.workload.reference_model:
        raise ConfigError(
            f"{config}: algorithm {asked.algorithm.name!r} needs a reference policy (kl_coef), for which the plan has"
            " no memory: plan with rollover plan --reference-model, or set algorithm.kl_coef = 0"
        )
    return loaded(plan_settings(plan, kind, asked.tasks.max_prompt_tokens))


def plan_settings(plan: Plan, kind: str, max_prompt_tokens: int) -> dict[str, Any]:
    """Return the settings that a plan determines, for servers of one kind."""
    part, rollout = plan.solution.plan.parts[0], rollout_settings(plan)
    context = max_prompt_tokens + rollout["max_new_tokens"]
    return {
        "rollout": rollout,
        "engine": {"launch": True, **engine_settings(plan)},
        "trainer": {"num_devices": part.num_devices, **trainer_settings(plan)},
        "cluster": {
            "trainer_resources": _of_type(plan, part.device, 1),
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
        sizes = [tensor, str(c.tp), *([pipeline, str(c.pp)] if c.pp > 1 else [])]
        if kind == "vllm":
            return [*sizes, "--max-model-len", str(context), "--gpu-memory-utilization", share]
        return [*sizes, "--context-length", str(context), "--mem-fraction-static", share]
    if kind and c.num_devices > 1:
        raise ConfigError(
            f"the plan has replicas of {c.num_devices} {c.device}, and a server of engine.kind {kind!r} has one device:"
            " choose 'vllm' or 'sglang'"
        )
    return []


def _replicas(plan: Plan) -> list[tuple[ReplicaKind, int]]:
    kinds, counts = plan.problem.replica_kinds, plan.solution.replicas
    return [(kinds[c], counts[c]) for c in plan.solution.active]


def _of_type(plan: Plan, device: str, count: int) -> dict[str, float]:
    """Return the resource that only nodes of this type have; none is needed if all are of one type."""
    return {device: float(count)} if len(plan.fleet.devices) > 1 else {}


def who_goes_where(plan: Plan) -> Iterator[Placed]:
    """List the roles of a plan, training first."""
    part = plan.solution.plan.parts[0]
    assert can_train(part), "other plans are refused when they are read"
    resources = _of_type(plan, part.device, 1)
    yield Placed(role="train", count=part.num_devices, each=f"1 x {part.device}", running=None, resources=resources)
    for c, count in _replicas(plan):
        resources = _of_type(plan, c.device, c.num_devices)
        each = f"{c.num_devices} x {c.device}"
        yield Placed(role="rollout", count=count, each=each, running=c.batch_cap, resources=resources)


def check_types(plan: Plan, offered: Sequence[Mapping[str, float]]) -> None:
    """Raise ``ConfigError`` with the commands that start the nodes correctly when no node offers a type's resource.

    Args:
        offered: the resources of each node that is alive.
    """
    missing = [
        name
        for placed in who_goes_where(plan)
        for name in placed.resources
        if not any(name in node for node in offered)
    ]
    if missing:
        sizes = {node.device.name: node.num_devices for node in plan.fleet.nodes}
        commands = "\n".join(
            f"  ray start --address=HEAD:6379 --resources='{{\"{name}\": {sizes[name]}}}'    on each {name} node"
            for name in dict.fromkeys(missing)
        )
        raise ConfigError(
            f"no node of the Ray cluster offers the resource {missing[0]!r}, by which the plan tells its types of node"
            f" apart; start them with\n{commands}"
        )
