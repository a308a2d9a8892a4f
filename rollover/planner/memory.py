"""Explains why a model fits on no device of a fleet: what each would need, and what it has."""

from __future__ import annotations

from rollover.devices.costs.passes import longest_tokens
from rollover.devices.costs.records import TrainingPart
from rollover.devices.costs.rollout import replica_costs
from rollover.devices.costs.training import trainer_costs
from rollover.devices.records import Device, ModelShape, WorkloadSpec
from rollover.planner.shapes import MAX_REPLICA_STAGES, MAX_TRAINING_STAGES, shapes


def no_room(stock: dict[Device, int], model: ModelShape, workload: WorkloadSpec, act: str) -> str:
    """Say what each device type would need, and has, where the model fits nowhere."""
    lines = [f"{model.name} ({model.parameters / 1e9:.1f}B parameters) cannot {act} on any device of this fleet:"]
    for device, count in stock.items():
        if act == "train":
            needs, shape = _least_training_bytes(device, count, model, workload)
        else:
            needs, shape = _least_rollout_bytes(device, count, model, workload)
        has = device.efficiency.memory * device.hbm_bytes
        lines.append(
            f"  {device.name}: {needs / 2**30:.1f} GiB per device needed even with {shape}, "
            f"{has / 2**30:.1f} of {device.hbm_bytes / 2**30:.1f} GiB usable"
        )
    lines.append("add devices of a type, or take ones with more memory, a smaller model or shorter responses")
    return "\n".join(lines)


def _least_rollout_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Return what a device of the widest replica needs (weights and the longest sample's KV cache), and its shape."""
    widest = [(tp * pp, tp, pp) for tp, pp in shapes(device, model, MAX_REPLICA_STAGES) if tp * pp <= count]
    size, tp, pp = max(widest)
    engine = replica_costs(model, workload, device, tp, pp)
    room = engine.kv_bytes_per_token * longest_tokens(workload)
    return (workload.rollout_weight_bytes * model.parameters + room) / size, f"tp {tp} x pp {pp}"


def _least_training_bytes(device: Device, count: int, model: ModelShape, workload: WorkloadSpec) -> tuple[float, str]:
    """Return what a device of the most divided plan needs, and its shape."""
    trainers = []
    for tp, pp in shapes(device, model, MAX_TRAINING_STAGES):
        dp = min(count // (tp * pp), workload.batch_size)
        if dp:
            part = TrainingPart(device=device.name, dp=dp, tp=tp, pp=pp, sharded=True, recompute=True, share=1.0)
            trainers.append(trainer_costs(model, workload, device, part))
    least = min(trainers, key=lambda trainer: trainer.memory_bytes)
    return least.memory_bytes, f"dp {least.dp} x tp {least.tp} x pp {least.pp}, sharded and recomputing"
