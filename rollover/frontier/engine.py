"""Engine parameters: from a catalogue device and a model's shape, or in relative units."""

from __future__ import annotations

from pathlib import Path

from rollover.devices import catalogue as cat
from rollover.devices import model_shape as models
from rollover.devices.costs.links import weight_update_s
from rollover.devices.costs.rollout import engine_model, replica_costs
from rollover.devices.workload import specify
from rollover.errors import ConfigError
from rollover.frontier.setup import PREFILL_PER_C0, PUBLISHED_LOAD, EngineSection
from rollover.rollout.config import RolloutConfig
from rollover.settings import toml
from rollover.sim.scenario import ReplicaModel
from rollover.workload.source import Lengths

_NODE_SIZE = 8


def assumed(rollout: RolloutConfig, replicas: int, given: EngineSection, file: Path | None) -> tuple[ReplicaModel, str]:
    """Return a replica with assumptions for the keys that ``given``, from ``file``, leaves open: time is counted in
    iterations over an empty batch, and a batch loads the replicas as in APRIL's published experiments."""
    c0_s, b0 = given.c0_s or 1.0, rollout.rollout_batch_size * rollout.group_size / PUBLISHED_LOAD / replicas
    replica = ReplicaModel(c0_s=c0_s, b0=b0, prefill_tokens_per_s=PREFILL_PER_C0 / c0_s)
    notes = {
        "c0_s": "times are in iterations over an empty batch (c0)",
        "b0": f"B0 = {b0:.0f} samples per replica, so that a batch is {PUBLISHED_LOAD} B0 as in APRIL's experiments",
        "prefill_tokens_per_s": f"{PREFILL_PER_C0:,.0f} tokens are prefilled per c0",
    }
    missing = [note for key, note in notes.items() if getattr(given, key) is None]
    origin = "No engine given" if len(missing) == len(notes) else f"Engine as in {file}"
    return replica, ": ".join([origin, *["; ".join(missing)] * bool(missing)]) + "."


def of_device(
    device: str, model: str, lengths: Lengths, rollout: RolloutConfig, *, tp: int, catalogue: Path | None = None
) -> tuple[ReplicaModel, str]:
    """Return a replica of ``tp`` devices, as the planner's cost model has it: the line through the iteration times of
    one sample and of a batch that fills the cache. The file ``catalogue`` lies over the packaged devices.

    Raises:
        ConfigError: there is no such device, its file is invalid, or the model and one sample do not fit.
        ModelError: the model's folder cannot be read.
    """
    if not 1 <= tp <= _NODE_SIZE:
        raise ConfigError(f"--tp must be between 1 and {_NODE_SIZE}, the number of devices in a node; got {tp}")
    known = cat.read([toml.read(catalogue)] if catalogue else [])
    found = known.surroundings(device, name=device, node_size=_NODE_SIZE, network=None, price_per_hour=None)
    shape = models.read_shape(model)
    if shape.num_heads % tp:
        raise ConfigError(f"--tp {tp}: the {shape.num_heads} attention heads of {shape.name} cannot be divided by {tp}")
    workload = specify("lengths", lengths, num_groups=rollout.rollout_batch_size, group_size=rollout.group_size)
    engine = replica_costs(shape, workload, found, tp, 1)
    if not engine.fits():
        raise ConfigError(
            f"{model} and its longest response do not fit on {tp} x {device}; raise --tp or use a larger device"
        )
    replica = engine_model(engine, pause_s=weight_update_s(shape, workload, found, found.network))
    note = (
        f"Engine: {tp} x {found.title} and {shape.name} by the cost model: c0 {1000 * replica.c0_s:.2f} ms,"
        f" B0 {replica.b0:.0f}, {replica.prefill_tokens_per_s:,.0f} tokens/s of prefill, a cache of"
        f" {replica.kv_tokens:,.0f} tokens. Efficiencies are the catalogue's: rollover calibrate measures your own."
    )
    if found.unverified:
        note += f" These figures of the device are unverified: {', '.join(found.unverified)}."
    return replica, note
