"""A plan as files to run: a script of engine servers for each node, the trainer's settings, and a list of what runs
where.

Every figure comes from the plan, and host names are the fleet's node names.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollover.devices.costs.passes import longest_tokens
from rollover.devices.costs.records import ReplicaKind
from rollover.planner.placement import Pipeline
from rollover.planner.plan import Plan
from rollover.planner.records import Server
from rollover.planner.report import cannot_run
from rollover.settings import toml

FIRST_PORT = 8000
MAX_PROMPT_TOKENS = 1024
"""Longest admitted prompt, as a multiple of the mean: a workload knows only the mean."""
_RENDEZVOUS_PORT = 20000
"""Port at which the nodes of a replica that spans several nodes find each other; the replica's number is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """A replica with the address it answers at."""

    number: int
    kind: ReplicaKind
    pipeline: Pipeline
    nodes: tuple[str, ...]
    """Names of its nodes; the first one answers requests."""
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.nodes[0]}:{self.port}"

    def devices(self, plan: Plan, node: str) -> str:
        """Return ``CUDA_VISIBLE_DEVICES`` of the replica on a node."""
        stages = (s for s in self.pipeline.stages if plan.fleet.nodes[s.node].name == node)
        return ",".join(str(device) for stage in stages for device in stage.devices)


def launch_files(plan: Plan, *, model: str, server: Server) -> dict[str, str]:
    """Return the contents of the files by name. ``model`` is the folder or hub id that servers and trainer load."""
    replicas = _replicas(plan)
    files = {
        "README.md": _readme(plan),
        "trainer.toml": _trainer(plan, replicas, model=model, server=server),
    }
    for node in dict.fromkeys(name for r in replicas for name in r.nodes):
        files[f"rollout-{node}.sh"] = _script(plan, replicas, node, model=model, server=server)
    return files


def _readme(plan: Plan) -> str:
    """Say what the files are for, and which parts of the plan they cannot carry out."""
    lines = [
        f"# {plan.fleet.name}: {plan.model.name}",
        "",
        "`rollout-NODE.sh` starts the rollout servers of a node; `trainer.toml` holds the trainer's settings.",
    ]
    lines += ["", *cannot_run(plan)]
    return "\n".join(lines).rstrip() + "\n"


def _replicas(plan: Plan) -> list[_Replica]:
    """Return the replicas in the order of the plan; ports count up on each node."""
    ports: dict[str, int] = {}
    found = []
    for number, pipeline in enumerate(plan.placement.replicas):
        nodes = tuple(dict.fromkeys(plan.fleet.nodes[node].name for node in pipeline.nodes))
        port = ports[nodes[0]] = ports.get(nodes[0], FIRST_PORT - 1) + 1
        kind = plan.problem.replica_kinds[pipeline.member]
        found.append(_Replica(number=number, kind=kind, pipeline=pipeline, nodes=nodes, port=port))
    return found


def _script(plan: Plan, replicas: list[_Replica], node: str, *, model: str, server: Server) -> str:
    mine = [r for r in replicas if node in r.nodes]
    lines = [
        "#!/bin/bash",
        f"# {len(mine)} rollout replica{'s' * (len(mine) > 1)} on {node}; run it there.",
        "set -eu",
        "# Anyone who can reach a port controls its server: HOST must be an address on a private network.",
        f': "${{HOST:?set HOST to the address of {node} on the private network}}"',
        "trap 'kill 0' EXIT",
    ]
    for replica in mine:
        lines += ["", *_commands(plan, replica, node, model=model, server=server)]
    return "\n".join([*lines, "", "wait", ""])


def _commands(plan: Plan, replica: _Replica, node: str, *, model: str, server: Server) -> Iterator[str]:
    c = replica.kind
    shape = f"{c.num_devices} x {c.device}: tensor parallel {c.tp}, pipeline parallel {c.pp}"
    yield f"# replica {replica.number}, {shape}, up to {c.batch_cap} samples at once"
    devices = f"CUDA_VISIBLE_DEVICES={replica.devices(plan, node)}"
    rank = replica.nodes.index(node)
    head = replica.nodes[0]
    rendezvous = _RENDEZVOUS_PORT + replica.number
    if server == "sglang":
        several = ["--nnodes", str(len(replica.nodes)), "--node-rank", str(rank)]
        several += ["--dist-init-addr", f"{head}:{rendezvous}"]
        arguments = _sglang(plan, replica, model) + several * (len(replica.nodes) > 1)
        yield f'{devices} python -m sglang.launch_server {shlex.join(arguments)} --host "$HOST" &'
        return
    several = ["--distributed-executor-backend", "ray"] * (len(replica.nodes) > 1)
    command = f"vllm serve {shlex.join(_vllm(plan, replica, model) + several)}"
    if len(replica.nodes) > 1 and rank > 0:
        yield f"{devices} ray start --address {head}:{rendezvous} --block &"
        return
    address = ""
    if len(replica.nodes) > 1:
        yield f"{devices} ray start --head --port {rendezvous}"
        address = f"RAY_ADDRESS={head}:{rendezvous} "
    yield f'{address}{devices} VLLM_SERVER_DEV_MODE=1 {command} --host "$HOST" &'


def _vllm(plan: Plan, replica: _Replica, model: str) -> list[str]:
    c = replica.kind
    return [
        *(model, "--port", str(replica.port)),
        *("--tensor-parallel-size", str(c.tp), "--pipeline-parallel-size", str(c.pp)),
        *("--max-num-seqs", str(c.batch_cap), "--max-model-len", str(_context(plan))),
        *("--gpu-memory-utilization", f"{plan.fleet.by_name[c.device].efficiency.memory:g}"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--seed", str(replica.number)),  # two servers must not draw the same noise
        "--enable-prompt-tokens-details",
    ]


def _sglang(plan: Plan, replica: _Replica, model: str) -> list[str]:
    c = replica.kind
    return [
        *("--model-path", model, "--port", str(replica.port)),
        *("--tp-size", str(c.tp), "--pp-size", str(c.pp)),
        *("--max-running-requests", str(c.batch_cap), "--context-length", str(_context(plan))),
        *("--mem-fraction-static", f"{plan.fleet.by_name[c.device].efficiency.memory:g}"),
        *("--random-seed", str(replica.number)),
        "--incremental-streaming-output",
    ]


def _context(plan: Plan) -> int:
    """Return the context length, in tokens, that the longest admitted prompt and the longest response need."""
    return MAX_PROMPT_TOKENS + max(b.max_tokens for b in plan.workload.buckets)


def _trainer(plan: Plan, replicas: list[_Replica], *, model: str, server: Server) -> str:
    """Return the settings for ``rollover train``: a file to extend with tasks."""
    caps = [r.kind.batch_cap for r in replicas]
    settings = {
        "model": {"path": model},
        "tasks": {"max_prompt_tokens": MAX_PROMPT_TOKENS},
        "rollout": rollout_settings(plan),
        "engine": {
            "kind": server,
            "urls": [r.url for r in replicas],
            "max_running": caps[0] if len(set(caps)) == 1 else caps,
            **engine_settings(plan),
        },
        "trainer": trainer_settings(plan),
    }
    head = [
        "# The trainer's side of the plan. Use it from a file of your own that adds the tasks:",
        '#     extends = "trainer.toml"',
        "# and run it on the first training node, with engine.weights_dir set to a folder that all servers can read.",
        "#",
        "# Where the plan places training:",
    ]
    for member, part in enumerate(plan.solution.plan.parts):
        state = "sharded over data-parallel ranks" if part.sharded else "whole on every data-parallel rank"
        activations = "recomputed" if part.recompute else "kept"
        head.append(
            f"#   {part.num_devices} x {part.device}: data parallel {part.dp}, tensor parallel {part.tp}, pipeline"
            f" parallel {part.pp}, {part.share:.0%} of each batch;"
        )
        head.append(f"#     optimizer state {state}, activations {activations}; on")
        head += [f"#     {line}" for line in _places(plan, member)]
    head += [f"# {line}" for sentence in cannot_run(plan) for line in textwrap.wrap(sentence, 116)]
    return "\n".join(head) + "\n\n" + toml.dumps(settings)


def _places(plan: Plan, member: int) -> Iterator[str]:
    """Yield the devices of a training part, node by node."""
    found: dict[int, list[int]] = {}
    for pipeline in plan.placement.training:
        if pipeline.member == member:
            for stage in pipeline.stages:
                found.setdefault(stage.node, []).extend(stage.devices)
    for node, devices in found.items():
        yield f"{plan.fleet.nodes[node].name}: {', '.join(map(str, sorted(devices)))}"


def rollout_settings(plan: Plan) -> dict[str, Any]:
    """Return the size of a step and how far rollout may run ahead.

    Example: ``{"strategy": "sync", "rollout_batch_size": 128, "group_size": 8, "max_new_tokens": 16384}`` of a plan
    with ``max_staleness=0``.
    """
    workload, staleness = plan.workload, plan.problem.max_staleness
    return {
        "strategy": "bounded_async" if staleness else "sync",
        "rollout_batch_size": workload.num_groups,
        "group_size": workload.group_size,
        "max_new_tokens": max(bucket.max_tokens for bucket in workload.buckets),
        **({"max_staleness": staleness} if staleness else {}),
    }


def engine_settings(plan: Plan) -> dict[str, Any]:
    """Return what engines do with their caches at a weight update, where the plan counts on keeping them."""
    return {"kv_on_update": "keep"} if plan.workload.keeps_kv else {}


def trainer_settings(plan: Plan) -> dict[str, Any]:
    """Return how passes run in the time and the memory that ``devices.costs.training`` works out: in bfloat16, over as
    many tokens as the longest sequence has, with or without recomputing activations.

    Example: ``{"dtype": "bfloat16", "micro_batch_tokens": 16640, "gradient_checkpointing": True}`` of a plan that
    recomputes them, for prompts of 256 tokens on average and responses of up to 16,384.
    """
    return {
        "dtype": "bfloat16",
        "micro_batch_tokens": math.ceil(longest_tokens(plan.workload)),
        "gradient_checkpointing": any(part.recompute for part in plan.solution.plan.parts),
    }
