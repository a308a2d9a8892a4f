"""``--what-if``: the same question about another fleet, price, budget or staleness bound.

    staleness=2   budget=60   count.h20=+8   price.h20=1.20,count.h800-sxm=16

Changes between commas are one scenario. A sign makes a count, a budget or a bound relative to what it is now.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from rollover.errors import PlanError, nearest
from rollover.planner.records import MAX_DEVICES, Fleet, Node

_KEYS = ("staleness", "budget", "count.DEVICE", "price.DEVICE")
_CHANGE = re.compile(r"\s*(?P<key>[a-z]+)(\.(?P<device>[^=\s]+))?\s*=\s*(?P<value>[+-]?\S+)\s*")

_LOOSEST = 10**9
"""Maximum staleness bound; a larger one is taken for a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScenario:
    """The fleet and the staleness bound that a plan is made for.

    Example: ``changed(scenario, "count.h20=+8,staleness=2")`` has 8 more H20 and a bound of 2.
    """

    fleet: Fleet
    max_staleness: int


def changed(scenario: PlanScenario, text: str) -> PlanScenario:
    """Apply the changes in ``text``; raises ``PlanError`` naming the one that cannot be."""
    for part in text.split(","):
        found = _CHANGE.fullmatch(part)
        if found is None:
            raise PlanError(f"--what-if {part.strip()!r}: write KEY=NUMBER with one of {', '.join(_KEYS)}")
        scenario = _change(scenario, part.strip(), found["key"], found["device"], found["value"])
    return scenario


def _change(scenario: PlanScenario, part: str, key: str, device: str | None, text: str) -> PlanScenario:
    fleet = scenario.fleet
    if key not in ("staleness", "budget", "count", "price") or (device is None) != (key in ("staleness", "budget")):
        raise PlanError(f"--what-if {part!r}: unknown key; choose from {', '.join(_KEYS)}")
    try:
        number = float(text)
    except ValueError:
        raise PlanError(f"--what-if {part!r}: {text!r} is not a number") from None
    relative = text[0] in "+-"
    names = [d.name for d in fleet.devices]
    if device is not None and device not in names:
        raise PlanError(f"--what-if {part!r}: no device {device!r} in this fleet{nearest(device, names)}")
    if key == "staleness":
        bound = _whole(part, number, relative * scenario.max_staleness, most=_LOOSEST)
        return replace(scenario, max_staleness=bound)
    if key == "budget":
        if relative and fleet.budget_per_hour is None:
            raise PlanError(f"--what-if {part!r}: there is no budget to change; write budget=NUMBER")
        budget = number + (fleet.budget_per_hour or 0.0) * relative
        return replace(scenario, fleet=replace(fleet, budget_per_hour=_positive(part, budget)))
    if key == "price":
        price = _positive(part, number)
        nodes = tuple(
            replace(n, device=replace(n.device, price_per_hour=price)) if n.device.name == device else n
            for n in fleet.nodes
        )
        return replace(scenario, fleet=replace(fleet, nodes=nodes))
    now = sum(n.num_devices for n in fleet.nodes if n.device.name == device)
    count = _whole(part, number, relative * now, most=MAX_DEVICES)
    total = count + sum(n.num_devices for n in fleet.nodes) - now
    if total > MAX_DEVICES:
        raise PlanError(f"--what-if {part!r}: a fleet has at most {MAX_DEVICES} devices; this one would have {total}")
    return replace(scenario, fleet=replace(fleet, nodes=_resized(fleet, str(device), count, part)))


def _resized(fleet: Fleet, device: str, count: int, part: str) -> tuple[Node, ...]:
    """Take nodes of a type away from the end, or add them after the last one."""
    mine = [n for n in fleet.nodes if n.device.name == device]
    size = mine[0].num_devices
    if count % size:
        raise PlanError(f"--what-if {part!r}: {device} comes in nodes of {size}; use a multiple of that")
    more = count // size - len(mine)
    added = tuple(replace(mine[-1], name=f"{mine[-1].name}+{i + 1}") for i in range(more))
    kept = {n.name for n in mine[: len(mine) + min(0, more)]}
    nodes = tuple(n for n in fleet.nodes if n.device.name != device or n.name in kept) + added
    if not nodes:
        raise PlanError(f"--what-if {part!r}: this would leave no node")
    return nodes


def _whole(part: str, number: float, now: int, *, most: int) -> int:
    """Return ``number`` more than there are ``now``, which is 0 where the number has no sign."""
    value = number + now
    if not math.isfinite(value) or value != int(value) or not 0 <= value <= most:
        sum_ = f"{now} {'-' if number < 0 else '+'} {abs(number):.12g} = " if now else ""
        raise PlanError(f"--what-if {part!r}: must be a whole number from 0 to {most}, got {sum_}{value:.12g}")
    return int(value)


def _positive(part: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise PlanError(f"--what-if {part!r}: must be above zero, got {value:g}")
    return value
