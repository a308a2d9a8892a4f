"""A fleet file: nodes, links, prices and the budget.

Devices with equal figures, price, node size and links are one type, regardless of the nodes' names; where a device
occurs in different surroundings, its types are distinguished as ``KEY@NODE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollover.devices import catalogue as cat
from rollover.devices.records import Device, Link
from rollover.errors import ConfigError, nearest
from rollover.planner.records import MAX_DEVICES, Fleet, Node
from rollover.settings import toml
from rollover.settings.schema import build


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """A connection between nodes."""

    gbit_s: float
    """Bandwidth of a whole node, Gbit/s, one way."""
    latency_us: float = 20.0
    """Latency of a message, µs."""

    def __post_init__(self) -> None:
        if not 0 < self.gbit_s < float("inf"):
            raise ValueError(f"gbit_s must be above zero, got {self.gbit_s}")
        if not 0 <= self.latency_us < float("inf"):
            raise ValueError(f"latency_us must be zero or more, got {self.latency_us}")

    @property
    def link(self) -> Link:
        return Link(bytes_per_s=self.gbit_s * 1e9 / 8, latency_s=self.latency_us / 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry(NetworkEntry):
    """Table ``[[links]]``: the link between two nodes, or between each node of one entry and each of another."""

    between: tuple[str, ...]
    """Two names, each of an entry of nodes or of one of its nodes, such as ``a-0``."""

    def __post_init__(self) -> None:
        if len(self.between) != 2:
            raise ValueError(f"between must name two nodes, got {len(self.between)}")
        NetworkEntry.__post_init__(self)  # super() knows no class with slots


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """Table ``[[nodes]]``: machines of one kind."""

    device: str
    """Key of the device in the catalogue or in ``[devices]``."""
    num_devices: int
    """Number of devices in each node."""
    name: str | None = None
    """Name of the node, by default the device's key; with a ``count``, nodes are called ``NAME-0``, ``NAME-1``, ..."""
    count: int = 1
    """Number of nodes of this kind."""
    price_per_hour: float | None = None
    """Price of one device in the fleet's currency; the catalogue's if not given."""
    network: NetworkEntry | None = None
    """Network to other nodes; the fleet's if not given."""

    def __post_init__(self) -> None:
        for key in ("num_devices", "count"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if (total := self.count * self.num_devices) > MAX_DEVICES:
            raise ValueError(f"count times num_devices must be at most {MAX_DEVICES}, got {total}")
        if self.price_per_hour is not None and not 0 < self.price_per_hour < float("inf"):
            raise ValueError(f"price_per_hour must be above zero, got {self.price_per_hour}")

    @property
    def names(self) -> tuple[str, ...]:
        name = self.name or self.device
        return (name,) if self.count == 1 else tuple(f"{name}-{i}" for i in range(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFile:
    """A whole fleet file."""

    nodes: tuple[NodeEntry, ...]
    name: str | None = None
    """Name of the fleet; the file's name if not given."""
    currency: str | None = None
    """Unit of every ``price_per_hour`` and of the budget. If not given, USD, or L20 where the catalogue knows only
    relative prices (NVIDIA L20 = 1)."""
    budget_per_hour: float | None = None
    """Maximum total cost of all devices in use, per hour."""
    catalogues: tuple[str, ...] = ()
    """Additional files of devices, such as a calibration writes; paths are relative to the fleet file."""
    network: NetworkEntry | None = None
    """Network of every node that does not set its own."""
    links: tuple[LinkEntry, ...] = ()
    devices: dict[str, cat.DeviceEntry] = field(default_factory=dict)
    """Devices that the catalogue lacks, or figures that replace its own."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes: a fleet needs at least one [[nodes]] table")
        if (total := sum(entry.count * entry.num_devices for entry in self.nodes)) > MAX_DEVICES:
            raise ValueError(f"nodes: a fleet has at most {MAX_DEVICES} devices; this one has {total}")
        if self.budget_per_hour is not None and not 0 < self.budget_per_hour < float("inf"):
            raise ValueError(f"budget_per_hour must be above zero, got {self.budget_per_hour}")


def read_fleet(file: Path) -> Fleet:
    """Read the fleet described in ``file``; raises ``ConfigError`` with file and line."""
    return parse(toml.read(file), file.parent)


def parse(document: toml.Document, folder: Path = Path()) -> Fleet:
    """Read the fleet of a document whose ``catalogues`` are in ``folder``."""
    content = build(FleetFile, document)
    catalogue = cat.read([toml.read(folder / name) for name in content.catalogues])
    own = cat.Catalogue(devices=content.devices)
    return _Reader(document, content, catalogue.extended(own, document)).fleet()


class _Reader:
    """Turns a fleet file into records and reports mistakes with their line."""

    def __init__(self, document: toml.Document, content: FleetFile, catalogue: cat.Catalogue) -> None:
        self.document = document
        self.content = content
        self.catalogue = catalogue

    def fleet(self) -> Fleet:
        for i, entry in enumerate(self.content.nodes):
            if entry.device not in self.catalogue.devices:
                known = nearest(entry.device, self.catalogue.devices)
                raise self._error(("nodes", i, "device"), f"unknown device {entry.device!r}{known}")
        currency = self._currency()
        devices = self._devices(currency)
        nodes = tuple(
            Node(name=name, device=device, num_devices=entry.num_devices)
            for entry, device in zip(self.content.nodes, devices, strict=True)
            for name in entry.names
        )
        self._check_names()
        return Fleet(
            name=self.content.name or Path(self.document.name).stem,
            nodes=nodes,
            links=self._links(),
            currency=currency,
            budget_per_hour=self.content.budget_per_hour,
        )

    def _currency(self) -> str:
        """Return the user's currency, by default that of the catalogue's prices for all nodes that the user does not
        price."""
        if self.content.currency:
            return self.content.currency
        own = any(entry.price_per_hour is not None for entry in self.content.nodes)
        entries = [self.catalogue.find(entry.device) for entry in self.content.nodes]
        relative = all(cat.price_of(e, cat.RELATIVE) for e in entries)
        dollars = all(cat.price_of(e, cat.DOLLAR) for e in entries)
        return cat.RELATIVE if relative and not dollars and not own else cat.DOLLAR

    def _devices(self, currency: str) -> list[Device]:
        """Return the device of each entry of nodes; types are named after their key, with the node where keys
        repeat."""
        devices = [self._device(i, entry, currency) for i, entry in enumerate(self.content.nodes)]
        types = list(dict.fromkeys(devices))
        for device in types:
            if sum(other.name == device.name for other in types) > 1:
                first = devices.index(device)
                name = f"{device.name}@{self.content.nodes[first].name or first}"
                renamed = replace(device, name=name)
                devices = [renamed if other == device else other for other in devices]
        return devices

    def _device(self, index: int, entry: NodeEntry, currency: str) -> Device:
        network = entry.network or self.content.network
        if network is None and sum(e.count for e in self.content.nodes) > 1:
            message = "its connection to other nodes is missing: write network = { gbit_s = ... } here, or once for all"
            raise self._error(("nodes", index), message)
        price = entry.price_per_hour
        if price is None:
            price = cat.price_of(self.catalogue.find(entry.device), currency)
        if price is None and self.content.budget_per_hour is not None:
            message = (
                f"price_per_hour of {entry.device!r} is not known in {currency}, but the budget needs it: "
                "write price_per_hour here"
            )
            raise self._error(("nodes", index), message)
        return self.catalogue.surroundings(
            entry.device,
            name=entry.device,
            node_size=entry.num_devices,
            network=network.link if network else None,
            price_per_hour=price,
        )

    def _check_names(self) -> None:
        seen: set[str] = set()
        for i, entry in enumerate(self.content.nodes):
            for name in {*entry.names, entry.name or entry.device}:
                if name in seen:
                    raise self._error(("nodes", i), f"another node is called {name!r} too: give each node its own name")
            seen |= {*entry.names, entry.name or entry.device}

    def _links(self) -> tuple[tuple[str, str, Link], ...]:
        """Return the links between pairs of nodes, each pair once; a later entry overrides an earlier one."""
        members: dict[str, tuple[str, ...]] = {name: (name,) for entry in self.content.nodes for name in entry.names}
        members |= {entry.name or entry.device: entry.names for entry in self.content.nodes}
        links: dict[tuple[str, ...], Link] = {}
        for i, entry in enumerate(self.content.links):
            for name in entry.between:
                if name not in members:
                    raise self._error(("links", i, "between"), f"unknown node {name!r}{nearest(name, members)}")
            ends = [members[name] for name in entry.between]
            links |= {tuple(sorted((a, b))): entry.link for a in ends[0] for b in ends[1] if a != b}
        return tuple((a, b, link) for (a, b), link in sorted(links.items(), key=lambda item: item[0]))

    def _error(self, path: Sequence[Any], message: str) -> ConfigError:
        line = self.document.lines.get(tuple(path))
        place = f"{self.document.name}:{line}" if line else self.document.name
        return ConfigError(f"{place}: {'.'.join(map(str, path))}: {message}")
