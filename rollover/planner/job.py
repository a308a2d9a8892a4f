"""``rollover plan``: from a fleet file to a table, a page and a record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rich.console import Console

from rollover.devices import model_shape as models
from rollover.devices import workload
from rollover.devices.records import ModelShape, WorkloadSpec
from rollover.errors import ConfigError, PlanError, nearest
from rollover.planner import fleet as fleets
from rollover.planner.alternatives import alternatives, launchable, leaner, unlimited
from rollover.planner.plan import Plan, step_tokens
from rollover.planner.problem import PlanSpec
from rollover.planner.records import Fleet, Server, Tail
from rollover.planner.report import render_page, show
from rollover.planner.search import make_plan
from rollover.report.page import write_page
from rollover.settings import toml
from rollover.workload.source import read_lengths

DEFAULT_WORKLOAD = "math-16k"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Options of ``rollover plan``; ``None`` means not given.

    Example: ``PlanRequest(fleet="h800-h20", model="Qwen/Qwen3-8B", max_staleness=2)``.
    """

    fleet: str
    """A fleet file, or the name of a packaged example."""
    model: str
    workload: str = DEFAULT_WORKLOAD
    max_staleness: int = 4
    aim: Literal["throughput", "cost"] = "throughput"
    target: float | None = None
    """Required rate, in trained tokens per second."""
    budget: float | None = None
    """Maximum cost per hour, in the fleet's currency."""
    num_groups: int = 128
    group_size: int = 8
    cap_tokens: int | None = None
    reference_model: bool = False
    keeps_kv: bool = False
    reward_s: float = 0.0
    tail: Tail = "soft"
    quick: bool = False
    for_launch: bool = False
    """Plan only what ``rollover launch`` can run."""
    page: Path | None = None
    json: Path | None = None
    server: Server | None = None
    """Kind of servers with ``for_launch``; vLLM if not given."""

    def __post_init__(self) -> None:
        if (self.aim == "cost") != (self.target is not None):
            raise PlanError("--aim cost needs --target, and --target needs --aim cost")
        if self.aim == "cost" and self.budget is not None:
            raise PlanError("--budget has no effect with --aim cost: omit one of them")
        if self.server is not None and not self.for_launch:
            raise PlanError("--server has no effect without --for-launch")


def plan(request: PlanRequest) -> None:
    """Plan, and write the requested files. Raises ``RolloverError`` if the fleet, the model, the workload or the aim is
    invalid; the message says how."""
    console = Console(highlight=False)
    fleet = _with_budget(_read_fleet(request.fleet), request)
    model = models.load(request.model)
    lengths = workload.load(
        request.workload,
        num_groups=request.num_groups,
        group_size=request.group_size,
        cap_tokens=request.cap_tokens,
        reference_model=request.reference_model,
        keeps_kv=request.keeps_kv,
        reward_s=request.reward_s,
    )
    spec = _spec(request, model, lengths)
    with console.status("planning"):
        made = make_plan(fleet, spec)
        if request.for_launch:
            made = replace(made, unlimited=unlimited(made))
        else:
            made = replace(made, launchable=launchable(made))
    if not request.quick:
        with console.status("simulating, and planning alternatives"):
            made = _checked(request, made)
    show(console, made)
    _write(console, request, made)


def _read_fleet(name: str) -> Fleet:
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return fleets.load(path)
    examples = {
        file.name.removesuffix(".toml"): file for file in files("rollover.planner").joinpath("fleets").iterdir()
    }
    if name not in examples:
        raise ConfigError(f"{name} is neither a .toml file nor a packaged fleet{nearest(name, examples)}")
    return fleets.parse(toml.parse(examples[name].read_text(encoding="utf-8"), f"{name}.toml"))


def _with_budget(fleet: Fleet, request: PlanRequest) -> Fleet:
    if request.aim == "cost":
        return replace(fleet, budget_per_hour=None)
    budget = fleet.budget_per_hour if request.budget is None else request.budget
    missing = [device.name for device in fleet.devices if device.price_per_hour is None]
    if budget is not None and missing:
        raise PlanError(
            f"--budget: the price of {' and '.join(missing)} is not known in {fleet.currency}:"
            f" write price_per_hour in its [[nodes]] of {request.fleet}"
        )
    return replace(fleet, budget_per_hour=budget)


def _spec(request: PlanRequest, model: ModelShape, workload: WorkloadSpec) -> PlanSpec:
    return PlanSpec(
        model=model,
        workload=workload,
        max_staleness=request.max_staleness,
        target_steps_per_s=None if request.target is None else request.target / step_tokens(workload),
        tail=request.tail,
        launchable=(request.server or "vllm") if request.for_launch else None,
    )


def _checked(request: PlanRequest, made: Plan) -> Plan:
    """Add the simulated rate and the alternatives."""
    from rollover.planner.simulation import check

    lengths = read_lengths(request.workload, cap_tokens=request.cap_tokens).workload(0)
    return replace(
        made,
        simulated_steps_per_s=check(made, lengths).steps_per_s,
        alternatives=alternatives(made),
        leaner=leaner(made),
    )


def _write(console: Console, request: PlanRequest, made: Plan) -> None:
    if request.page is not None:
        console.print(f"page: {write_page(request.page, render_page(made))}", markup=False)
    if request.json is not None:
        request.json.write_text(made.to_json(), encoding="utf-8")
        console.print(f"plan: {request.json}", markup=False)
