"""Measured times as efficiencies of the cost model, checked on times that are held out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from rollover.devices.costs.passes import forward_flops, read_parameters
from rollover.devices.costs.records import TrainingPart
from rollover.devices.costs.rollout import replica_costs
from rollover.devices.costs.training import trainer_costs, training_plan
from rollover.devices.model_shape import parse
from rollover.devices.records import Device, Efficiency, Link, ModelShape, WorkloadSpec
from rollover.devices.workload import length_buckets
from rollover.settings import toml

Work = Literal["decode", "prefill", "train"]

_FITTED: Mapping[Work, tuple[str, ...]] = {
    "decode": ("bandwidth", "decode", "step_s"),
    "prefill": ("prefill",),
    "train": ("train",),
}
"""The efficiencies that are fitted to the times of each kind of work."""
_STARTS = {"decode": (0.3, 0.2, 0.8, 0.6), "step_s": (1e-4, 1e-3, 1e-5, 1e-2)}
_OTHER_STARTS = (0.3, 0.8, 0.1, 0.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured time: the median of several."""

    work: Work
    """``decode``: one iteration over ``count`` samples with ``tokens`` cached tokens each. ``prefill``: one prompt of
    ``tokens``. ``train``: a step over ``count`` sequences, each a prompt of ``tokens`` and a response of as many."""
    count: int
    tokens: float
    seconds: float
    held_out: bool
    """True if the point is only predicted, not fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one machine with one model."""

    title: str
    """The device's name, as its driver reports it."""
    model: Mapping[str, Any]
    """The ``config.json`` of the measured model."""
    weight_bytes: float
    """Bytes per parameter in the engine."""
    kv_bytes: float
    """Bytes per cached scalar."""
    memory_bytes: float
    flops: float
    """FLOP/s of the largest product of two matrices, in the engine's number format."""
    copy_bytes_per_s: float
    """Bytes read and written per second by a copy within the device's memory."""
    link_bytes_per_s: float
    """The link, one way, to another device of this machine, or to the host if there is none."""
    link_latency_s: float
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A device that the planner can use."""

    device: Device
    errors: tuple[tuple[Point, float], ...]
    """For each point the relative error of its prediction: 0.05 if it is predicted to take 5 % longer."""

    @property
    def worst(self) -> float:
        """Return the largest relative error among the held-out times."""
        return max(abs(error) for point, error in self.errors if point.held_out)


def fit(measured: Measurements, key: str) -> Calibration:
    """Return the device called ``key``; figures are the best ones measured, so no efficiency exceeds 1."""
    model = parse(measured.model, name=key)
    device = _plain(measured, key, model)
    for work in _FITTED:
        device = _fitted(work, device, model, measured)
    errors = tuple((p, _predicted_s(device, model, measured, p) / p.seconds - 1) for p in measured.points)
    return Calibration(device=device, errors=errors)


def entry(device: Device) -> str:
    """Return the device as a file for ``catalogues`` of a fleet."""
    efficiency = device.efficiency

    def short(value: float) -> float:
        return float(f"{value:.4g}")

    names = ("train", "prefill", "decode", "bandwidth", "link", "memory")
    content = {
        "name": device.title,
        "bf16_tflops": short(device.flops / 1e12),
        "hbm_gbps": short(device.hbm_bytes_per_s / 1e9),
        "hbm_gib": short(device.hbm_bytes / 2**30),
        "link_gbps": short(2 * device.link.bytes_per_s / 1e9),
        "source": efficiency.source,
        "verified": True,
        "efficiency": {
            **{name: short(getattr(efficiency, name)) for name in names},
            "step_ms": short(1e3 * efficiency.step_s),
            "link_latency_us": short(1e6 * device.link.latency_s),
            "source": efficiency.source,
        },
    }
    return toml.dumps({"devices": {device.name: content}})


def _plain(measured: Measurements, key: str, model: ModelShape) -> Device:
    """Return the device before any efficiency is known: each is 1."""
    decodes = [p for p in measured.points if p.work == "decode"]
    prefills = [p for p in measured.points if p.work == "prefill"]
    flops = max(
        measured.flops,
        *(forward_flops(model, p.count, p.tokens) / p.seconds for p in decodes),
        *(forward_flops(model, p.tokens, p.tokens / 2) / p.seconds for p in prefills),
    )
    token_bytes = measured.kv_bytes * model.num_layers * model.kv_width

    def read_bytes(point: Point) -> float:
        weight_bytes = measured.weight_bytes * read_parameters(model, point.count)
        return weight_bytes + point.count * point.tokens * token_bytes

    link = Link(bytes_per_s=measured.link_bytes_per_s, latency_s=measured.link_latency_s)
    ideal = dict.fromkeys(("train", "prefill", "decode", "bandwidth", "link"), 1.0)
    source = "measured by rollover calibrate"
    return Device(
        name=key,
        title=measured.title,
        flops=flops,
        hbm_bytes_per_s=max(measured.copy_bytes_per_s, *(read_bytes(p) / p.seconds for p in decodes)),
        hbm_bytes=measured.memory_bytes,
        node_size=1,
        link=link,
        network=link,
        price_per_hour=None,
        efficiency=Efficiency(**ideal, memory=0.9, step_s=0.0, source=source),
    )


def _fitted(work: Work, device: Device, model: ModelShape, measured: Measurements) -> Device:
    """Return the device with the efficiencies of ``work``, by least relative errors over the points not held out."""
    known = [p for p in measured.points if p.work == work and not p.held_out]
    names = _FITTED[work]

    def with_values(values: Iterable[float]) -> Device:
        found: dict[str, Any] = dict(zip(names, values, strict=True))
        return replace(device, efficiency=replace(device.efficiency, **found))

    def errors(values: npt.NDArray[np.float64], /) -> list[float]:
        found = with_values(values.tolist())
        return [math.log(_predicted_s(found, model, measured, p) / p.seconds) for p in known]

    least_s = min(p.seconds for p in known)
    lower = np.array([0.0 if name == "step_s" else 1e-4 for name in names])
    upper = np.array([least_s if name == "step_s" else 1.0 for name in names])
    starts = zip(*(_STARTS.get(name, _OTHER_STARTS) for name in names), strict=True)
    inside = [np.clip(start, lower + 1e-9, upper - 1e-9) for start in starts]
    fits = [least_squares(errors, start, bounds=(lower, upper), x_scale=upper) for start in inside]
    best = min(fits, key=lambda found: float(found.cost))
    return with_values(best.x.tolist())


def _predicted_s(device: Device, model: ModelShape, measured: Measurements, point: Point) -> float:
    spec = WorkloadSpec(
        name="measured",
        num_groups=point.count if point.work == "train" else 1,
        group_size=1,
        prompt_tokens=point.tokens,
        buckets=length_buckets([int(point.tokens) if point.work == "train" else 1], group_size=1, num_groups=1),
        rollout_weight_bytes=measured.weight_bytes,
        kv_bytes=measured.kv_bytes,
        proximal_pass=False,  # with a single mini-batch the training pass yields those log-probs
    )
    if point.work == "train":
        part = TrainingPart(device=device.name, dp=1, tp=1, pp=1, sharded=False, recompute=False, share=1.0)
        return training_plan((trainer_costs(model, spec, device, part),)).step_s
    costs = replica_costs(model, spec, device, 1, 1)
    return costs.step_s(point.count, point.tokens) if point.work == "decode" else costs.prefill_s(point.tokens)
