"""A catalogue of accelerators: the packaged one, overridden by the user's figures.

Every figure keeps its provenance: one given by the user counts as the user's, and a figure that the catalogue marks
unverified stays so. Nothing is converted here; ``surroundings`` makes a ``Device`` in SI units once its node is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from typing import Any

from rollover.devices.records import Device, Efficiency, Link
from rollover.errors import ConfigError, nearest
from rollover.settings import toml
from rollover.settings.schema import build

FIGURES = ("bf16_tflops", "hbm_gbps", "hbm_gib", "link_gbps")
"""Figures that a device needs to be planned with."""
DOLLAR, RELATIVE = "USD", "L20"
"""The currencies of the catalogue's prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyEntry:
    """Table ``[efficiency]``, or ``efficiency`` of a device: unset keys keep the default."""

    train: float | None = None
    """Fraction of bf16_tflops that training reaches."""
    prefill: float | None = None
    """Fraction of bf16_tflops that prefill reaches."""
    decode: float | None = None
    """Fraction of bf16_tflops that compute-bound decoding reaches."""
    bandwidth: float | None = None
    """Fraction of hbm_gbps that decoding reaches."""
    link: float | None = None
    """Fraction of a link's bandwidth that transfers reach."""
    memory: float | None = None
    """Fraction of hbm_gib that weights, caches and activations may fill."""
    step_ms: float | None = None
    """Fixed time of a decoding iteration, ms."""
    link_latency_us: float | None = None
    """Latency of a message between two devices of a node, µs."""
    source: str | None = None
    """Source of the figures."""

    def __post_init__(self) -> None:
        for key in ("train", "prefill", "decode", "bandwidth", "link", "memory"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{key} is a fraction: it must be above 0 and at most 1, got {value}")
        for key in ("step_ms", "link_latency_us"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{key} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """Table ``[devices.KEY]``: figures from vendors and price lists. Unset keys keep the catalogue's values."""

    name: str | None = None
    """Human-readable name of the device."""
    bf16_tflops: float | None = None
    """Dense bf16 TFLOP/s."""
    hbm_gbps: float | None = None
    """Memory bandwidth, GB/s."""
    hbm_gib: float | None = None
    """Memory that its driver reports, GiB: the advertised size less error correction and the driver's share."""
    link_gbps: float | None = None
    """Link inside a node, GB/s, both directions together."""
    price_per_hour_usd: float | None = None
    """Price per device in dollars."""
    relative_price: float | None = None
    """Relative price if no dollar price is known; NVIDIA L20 = 1."""
    source: str | None = None
    """Source of the figures."""
    verified: bool | None = None
    """True if every figure was read in a primary source or a public catalogue."""
    unverified: tuple[str, ...] | None = None
    """Names of the figures that were not."""
    efficiency: EfficiencyEntry | None = None
    """Fractions of these figures that are reached."""

    def __post_init__(self) -> None:
        for key in (*FIGURES, "relative_price", "price_per_hour_usd"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{key} must be above zero, got {value}")
        for name in self.unverified or ():
            if name not in FIGURES:
                raise ValueError(f"unverified: no figure is called {name!r}{nearest(name, FIGURES)}")
        if self.verified and self.unverified:
            raise ValueError(f"verified cannot be true while unverified names {', '.join(self.unverified)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """A file of devices by key, or several layered over each other; the packaged one has all figures.

    Example: ``packaged().find("h100-sxm").bf16_tflops`` is 989.
    """

    efficiency: EfficiencyEntry = field(default_factory=EfficiencyEntry)
    """Efficiencies of devices without figures of their own."""
    devices: dict[str, DeviceEntry] = field(default_factory=dict)

    def find(self, key: str) -> DeviceEntry:
        """Return the entry of ``key``; raises ``ConfigError`` with the nearest name."""
        if key not in self.devices:
            raise ConfigError(f"unknown device {key!r}{nearest(key, self.devices)}")
        return self.devices[key]

    def extended(self, more: Catalogue, document: toml.Document) -> Catalogue:
        """Lay the user's file over this catalogue; ``more`` was read from ``document``."""
        devices = dict(self.devices)
        for key, entry in more.devices.items():
            known = devices.get(key)
            devices[key] = _overlaid(known, entry) if known else entry
            missing = [figure for figure in FIGURES if getattr(devices[key], figure) is None]
            if missing:
                line = document.lines.get(("devices", key))
                place = f"{document.name}:{line}" if line else document.name
                raise ConfigError(
                    f"{place}: devices.{key}: a device that is not in the catalogue needs {', '.join(missing)}"
                )
        return Catalogue(devices=devices, efficiency=_merged(self.efficiency, more.efficiency))

    def surroundings(
        self, key: str, *, name: str, node_size: int, network: Link | None, price_per_hour: float | None
    ) -> Device:
        """Return the device ``key`` in its node; without a ``network`` of its own the node is the whole fleet."""
        entry = self.find(key)
        reached = _merged(self.efficiency, entry.efficiency or EfficiencyEntry())
        assert entry.bf16_tflops and entry.hbm_gbps and entry.hbm_gib and entry.link_gbps
        figures = {f.name: getattr(reached, f.name) for f in fields(Efficiency) if f.name != "step_s"}
        link = Link(bytes_per_s=entry.link_gbps * 1e9 / 2, latency_s=(reached.link_latency_us or 0.0) / 1e6)
        return Device(
            name=name,
            title=entry.name or key,
            flops=entry.bf16_tflops * 1e12,
            hbm_bytes_per_s=entry.hbm_gbps * 1e9,
            hbm_bytes=entry.hbm_gib * 2**30,
            node_size=node_size,
            link=link,
            network=network or link,
            price_per_hour=price_per_hour,
            efficiency=Efficiency(step_s=(reached.step_ms or 0.0) / 1e3, **figures),
            unverified=entry.unverified or (),
        )


def price_of(entry: DeviceEntry, currency: str) -> float | None:
    """Return the catalogue's price of a device; ``None`` in other currencies than its own two."""
    return {DOLLAR: entry.price_per_hour_usd, RELATIVE: entry.relative_price}.get(currency)


def packaged() -> Catalogue:
    """Return the catalogue that comes with Rollover."""
    text = files("rollover.devices").joinpath("devices.toml").read_text()
    return build(Catalogue, toml.parse(text, "devices.toml"))


def read(documents: Sequence[toml.Document]) -> Catalogue:
    """Return the packaged catalogue overridden by the user's files; later files take precedence."""
    catalogue = packaged()
    for document in documents:
        catalogue = catalogue.extended(build(Catalogue, document), document)
    return catalogue


def _merged(below: EfficiencyEntry, above: EfficiencyEntry) -> EfficiencyEntry:
    return replace(below, **_set_keys(above))


def _overlaid(known: DeviceEntry, own: DeviceEntry) -> DeviceEntry:
    """Lay ``own`` over ``known``: a figure that the user gives counts as verified, and a price replaces both prices."""
    doubts = () if own.verified else tuple(f for f in known.unverified or () if getattr(own, f) is None)
    changes = {"verified": None, "unverified": doubts, **_set_keys(own)}
    if own.price_per_hour_usd or own.relative_price:
        known = replace(known, price_per_hour_usd=None, relative_price=None)
    if known.efficiency and own.efficiency:
        changes["efficiency"] = _merged(known.efficiency, own.efficiency)
    return replace(known, **changes)


def _set_keys(entry: DeviceEntry | EfficiencyEntry) -> dict[str, Any]:
    return {f.name: value for f in fields(entry) if (value := getattr(entry, f.name)) is not None}
