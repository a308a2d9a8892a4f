"""A test of a plan: its replicas and its trainer as models, and the whole loop under virtual time.

The planner works with means; here lengths are drawn, groups wait for their longest response, the staleness bound holds
back new groups, and calls go to the replica with the least load, since their lengths are unknown.
"""

from __future__ import annotations

from rollover.devices.costs.links import weight_update_s
from rollover.devices.costs.rollout import engine_model
from rollover.planner.placement import engine_on_links, weight_ways, weights_link
from rollover.planner.plan import Plan, step_tokens
from rollover.planner.topology import Topology
from rollover.rollout.strategies import BoundedAsync
from rollover.sim.result import Window
from rollover.sim.run import simulate
from rollover.sim.scenario import Latency, ReplicaModel, Scenario
from rollover.workload.base import Workload

WARMUP_STEPS = 12
MEASURED_STEPS = 24


def check(plan: Plan, lengths: Workload, *, warmup: int = WARMUP_STEPS, steps: int = MEASURED_STEPS) -> Window:
    """Simulate the plan under its staleness bound for ``warmup`` + ``steps`` training steps."""
    workload = plan.workload
    found = scenario(plan)
    strategy = BoundedAsync(
        batch_size=workload.num_groups,
        group_size=workload.group_size,
        max_staleness=plan.problem.max_staleness,
        num_running=found.max_running,
    )
    return simulate(strategy, lengths, found, steps=warmup + steps, seed=0).after(warmup)


def scenario(plan: Plan) -> Scenario:
    """Describe the plan's engines and trainer to the simulator."""
    workload, training = plan.workload, plan.solution.plan
    topology = Topology.of(plan.fleet)
    ways = weight_ways(topology, training, plan.placement, plan.placement.rollout_nodes)
    models: list[ReplicaModel] = []
    for c, kind in enumerate(plan.problem.replica_kinds):
        replicas = [r for r in plan.placement.replicas if r.member == c]
        engine = engine_on_links(topology, plan.model, workload, kind, replicas)
        device = engine.device
        pause_s = weight_update_s(plan.model, workload, device, weights_link(device, replicas, ways))
        models += [engine_model(engine, pause_s=pause_s, max_running=kind.batch_cap)] * len(replicas)
    return Scenario(
        replicas=tuple(models),
        trainer=Latency(base_s=training.sync_s, s_per_token=training.step_s / step_tokens(workload)),
        reward=Latency(base_s=workload.reward_s),
        kv_on_update="keep" if workload.keeps_kv else "recompute",
    )
