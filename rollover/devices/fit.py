"""``rollover calibrate``: measured times as efficiencies of the cost model, checked on times that are held out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.optimize import least_squares, minimize_scalar

from rollover.devices.costs.passes import forward_flops, read_parameters
from rollover.devices.costs.records import TrainingPart
from rollover.devices.costs.rollout import replica_costs
from rollover.devices.costs.training import trainer_costs, training_plan
from rollover.devices.measurements import Decode, Measurements, Prefill, Step
from rollover.devices.model_shape import parse
from rollover.devices.records import Device, Efficiency, Link, ModelShape, WorkloadSpec
from rollover.devices.workload import length_buckets
from rollover.errors import ModelError
from rollover.settings import toml

Measured = TypeVar("Measured", Prefill, Step)
ACCURACY = 0.15
"""Relative error of predictions that a calibration should not exceed."""
_STARTS = ((0.3, 0.3, 1e-4), (0.8, 0.2, 1e-3), (0.1, 0.8, 1e-5), (0.6, 0.6, 1e-2))
"""(bandwidth, decode, step_s)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A measured time, and the calibrated cost model's prediction.

    Example: ``measured_s=0.020, predicted_s=0.021`` has ``error`` 0.05.
    """

    what: str
    measured_s: float
    predicted_s: float
    held_out: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A device that the planner can use.

    Example: with held-out errors of -0.04 and 0.07, ``worst`` is 0.07.
    """

    device: Device
    predictions: tuple[Prediction, ...]

    @property
    def worst(self) -> float:
        """Return the largest relative error among the held-out times."""
        return max(abs(p.error) for p in self.predictions if p.held_out)


def fit(measured: Measurements, key: str) -> Calibration:
    """Return the device called ``key``; figures are the best ones measured, so no efficiency exceeds 1."""
    model = parse(measured.model, name=key)
    device = _plain(measured, key, model)
    device = _decoding(device, model, measured)
    device = _one("prefill", lambda d, p: _prefill_s(d, model, measured, p), device, measured.prefills)
    device = _one("train", lambda d, s: _step_s(d, model, measured, s), device, measured.steps)
    return Calibration(device=device, predictions=tuple(_predictions(device, model, measured)))


def entry(calibration: Calibration, key: str) -> str:
    """Return the device as a file for ``catalogues`` of a fleet."""
    d, e = calibration.device, calibration.device.efficiency

    def short(value: float) -> float:
        return float(f"{value:.4g}")

    content = {
        "devices": {
            key: {
                "name": d.title,
                "bf16_tflops": short(d.flops / 1e12),
                "hbm_gbps": short(d.hbm_bytes_per_s / 1e9),
                "hbm_gib": short(d.hbm_bytes / 2**30),
                "link_gbps": short(2 * d.link.bytes_per_s / 1e9),
                "source": e.source,
                "verified": True,
                "efficiency": {
                    **{k: short(getattr(e, k)) for k in ("train", "prefill", "decode", "bandwidth", "link", "memory")},
                    "step_ms": short(1e3 * e.step_s),
                    "link_latency_us": short(1e6 * d.link.latency_s),
                    "source": e.source,
                },
            }
        }
    }
    return toml.dumps(content)


# --- Fitting ----------------------------------------------------------------------------------------------------------


def _plain(measured: Measurements, key: str, model: ModelShape) -> Device:
    """Return the device before any efficiency is known: each is 1."""
    flops = max(
        measured.flops,
        *(forward_flops(model, d.batch, d.context) / d.seconds for d in measured.decodes),
        *(forward_flops(model, p.tokens, p.tokens / 2) / p.seconds for p in measured.prefills),
    )
    token = measured.kv_bytes * model.num_layers * model.kv_width
    bandwidth = max(
        measured.copy_bytes_per_s,
        *(
            (measured.weight_bytes * read_parameters(model, d.batch) + d.batch * d.context * token) / d.seconds
            for d in measured.decodes
        ),
    )
    link = Link(bytes_per_s=measured.link_bytes_per_s, latency_s=measured.link_latency_s)
    reached = Efficiency(
        train=1.0,
        prefill=1.0,
        decode=1.0,
        bandwidth=1.0,
        link=1.0,
        memory=0.9,
        step_s=0.0,
        source="measured by rollover calibrate",
    )
    return Device(
        name=key,
        title=measured.title,
        flops=flops,
        hbm_bytes_per_s=bandwidth,
        hbm_bytes=measured.memory_bytes,
        node_size=1,
        link=link,
        network=link,
        price_per_hour=None,
        efficiency=reached,
    )


def _set(device: Device, **efficiency: float) -> Device:
    reached: dict[str, Any] = dict(efficiency)
    return replace(device, efficiency=replace(device.efficiency, **reached))


def _decoding(device: Device, model: ModelShape, measured: Measurements) -> Device:
    """Fit bandwidth, compute and fixed time of an iteration by least relative errors over the known points."""
    known = [d for d in measured.decodes if not d.held_out]
    least_s = min(d.seconds for d in known)

    def with_values(values: Iterable[float]) -> Device:
        bandwidth, decode, step_s = values
        return _set(device, bandwidth=bandwidth, decode=decode, step_s=step_s)

    def errors(values: npt.NDArray[np.float64], /) -> list[float]:
        found = with_values(values.tolist())
        return [math.log(_decode_s(found, model, measured, d) / d.seconds) for d in known]

    lower, upper = np.array([1e-3, 1e-3, 0.0]), np.array([1.0, 1.0, least_s])
    starts = [np.clip(start, lower + 1e-9, upper - 1e-9) for start in _STARTS]
    fits = [least_squares(errors, start, bounds=(lower, upper), x_scale=(1, 1, least_s)) for start in starts]
    best = min(fits, key=lambda found: float(found.cost))
    return with_values(best.x.tolist())


def _one(
    name: str, predicted_s: Callable[[Device, Measured], float], device: Device, points: Sequence[Measured]
) -> Device:
    """Fit the efficiency ``name`` by least relative errors over the points not held out."""

    def error(log_value: float) -> float:
        found = _set(device, **{name: math.exp(log_value)})
        return sum(math.log(predicted_s(found, p) / p.seconds) ** 2 for p in points if not p.held_out)

    best = minimize_scalar(error, bounds=(math.log(1e-4), 0.0), method="bounded")
    return _set(device, **{name: math.exp(float(best.x))})


# --- Predicting -------------------------------------------------------------------------------------------------------


def _spec(measured: Measurements, *, prompt: float, response: int, sequences: int = 1) -> WorkloadSpec:
    return WorkloadSpec(
        name="measured",
        num_groups=sequences,
        group_size=1,
        prompt_tokens=prompt,
        buckets=length_buckets([response], group_size=1, num_groups=1),
        rollout_weight_bytes=measured.weight_bytes,
        kv_bytes=measured.kv_bytes,
        proximal_pass=False,  # with a single mini-batch the training pass yields those log-probs
    )


def _decode_s(device: Device, model: ModelShape, measured: Measurements, point: Decode) -> float:
    spec = _spec(measured, prompt=point.context, response=1)
    return replica_costs(model, spec, device, 1, 1).step_s(point.batch, point.context)


def _prefill_s(device: Device, model: ModelShape, measured: Measurements, point: Prefill) -> float:
    spec = _spec(measured, prompt=point.tokens, response=1)
    return replica_costs(model, spec, device, 1, 1).prefill_s(point.tokens)


def _step_s(device: Device, model: ModelShape, measured: Measurements, point: Step) -> float:
    spec = _spec(measured, prompt=point.prompt_tokens, response=point.response_tokens, sequences=point.sequences)
    part = TrainingPart(device=device.name, dp=1, tp=1, pp=1, sharded=False, recompute=False, share=1.0)
    return training_plan((trainer_costs(model, spec, device, part),)).step_s


def _predictions(device: Device, model: ModelShape, measured: Measurements) -> Iterator[Prediction]:
    for d in measured.decodes:
        what = f"decoding iteration, batch {d.batch}, {d.context:.0f} tokens each"
        predicted = _decode_s(device, model, measured, d)
        yield Prediction(what=what, measured_s=d.seconds, predicted_s=predicted, held_out=d.held_out)
    for p in measured.prefills:
        predicted = _prefill_s(device, model, measured, p)
        what = f"prefill of {p.tokens} tokens"
        yield Prediction(what=what, measured_s=p.seconds, predicted_s=predicted, held_out=p.held_out)
    for s in measured.steps:
        predicted = _step_s(device, model, measured, s)
        what = f"training step, {s.sequences} sequences of {s.prompt_tokens + s.response_tokens} tokens"
        yield Prediction(what=what, measured_s=s.seconds, predicted_s=predicted, held_out=s.held_out)


def calibrate(*, out: Path, key: str | None = None, model: Path | None = None, device: str = "auto") -> Calibration:
    """Measure this machine and write the entry to ``out``. Raises ``ModelError`` if ``model`` is no model folder."""
    from rollover.devices.measure import measure

    if model is not None and not (model / "config.json").is_file():
        raise ModelError(f"{model} is not a model folder: it has no config.json")
    console = Console(highlight=False)
    found = measure(model, device=device)
    key = key or re.sub(r"[^a-z0-9]+", "-", found.title.lower()).strip("-")
    calibration = fit(found, key)
    console.print(_table(calibration))
    verdict = "within" if calibration.worst <= ACCURACY else "NOT within"
    text = f"Held-out times are predicted to {calibration.worst:.0%}, {verdict} {ACCURACY:.0%}"
    if calibration.worst > ACCURACY:
        text += ": measure again on an idle machine, or with the model you will use"
    console.print(f"{text}.", markup=False)
    comment = f"# {found.title}, measured by rollover calibrate; {text[0].lower()}{text[1:]}.\n"
    out.write_text(comment + entry(calibration, key), encoding="utf-8")
    console.print(f"device {key!r}: {out}; list the file under catalogues in a fleet file", markup=False)
    return calibration


def _table(calibration: Calibration) -> Table:
    table = Table("", "measured, ms", "predicted, ms", "error", "")
    for p in calibration.predictions:
        held = "held out" if p.held_out else ""
        table.add_row(
            Text(p.what), f"{1e3 * p.measured_s:,.2f}", f"{1e3 * p.predicted_s:,.2f}", f"{p.error:+.1%}", held
        )
    return table
