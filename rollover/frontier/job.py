"""``rollover simulate``: from the command line's options to a table, a page and a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from rollover.errors import ConfigError, RolloverError
from rollover.frontier import engine, report
from rollover.frontier.advice import instead
from rollover.frontier.replay import Recorded, read_recorded
from rollover.frontier.settings import check_strategies, default_strategies, setting
from rollover.frontier.setup import ScenarioFile, Setup, Unit, build_scenario, read_scenario, shaped
from rollover.frontier.study import Bench, Progress, Study, study
from rollover.frontier.sweep import Length
from rollover.report.page import write_page
from rollover.report.timeline import Timeline
from rollover.rollout.lag import LagOf
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import Lengths, capped, read_lengths
from rollover.workload.trace import Trace

DEFAULT_WORKLOAD = "r1-16k"
DEFAULT_STEPS = 60
_FEW_STEPS = 24
_OF_DEVICE = ("c0_s", "b0", "prefill_tokens_per_s", "kv_tokens")
"""Figures of an engine that the note on a device tells."""
_SOME_LAG = 0.5
"""The lag of the settings that a run without lag is compared with."""
_WARMUP_SHARE = 3
"""One step in this many is warm-up by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """Options of ``rollover simulate``; ``None`` means not given."""

    workload: str | None = None
    run: Path | None = None
    """A run that supplies the lengths, the batch and the engine."""
    strategies: tuple[str, ...] = ()
    lag_budgets: tuple[float, ...] = ()
    lag_of: LagOf | None = None
    max_staleness: int | None = None
    scenario: Path | None = None
    device: str | None = None
    model: str | None = None
    catalogue: Path | None = None
    """A file of further devices."""
    tp: int = 1
    replicas: int | None = None
    batch_size: int | None = None
    group_size: int | None = None
    cap_tokens: int | None = None
    steps: int | None = None
    warmup: int | None = None
    seeds: int = 3
    jobs: int = 1
    page: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.run is not None and self.workload is not None:
            raise ConfigError("--from names a run whose lengths are used: omit WORKLOAD")
        if (self.device is None) != (self.model is None):
            raise ConfigError("--device needs --model, and --model needs --device: an engine is a model on a device")
        if self.device is not None and self.run is not None:
            raise ConfigError("--device and --from each describe the engine; give only one")
        for option, given in (("--tp", self.tp != 1), ("--catalogue", self.catalogue is not None)):
            if given and self.device is None:
                raise ConfigError(f"{option} has no effect without --device and --model")
        if any(budget < 0 for budget in self.lag_budgets):
            raise ConfigError(f"--lag must be at least 0 versions, got {min(self.lag_budgets):g}")


def simulate(request: StudyRequest) -> None:
    """Simulate the strategies, print the results, and write the requested files."""
    console = Console(highlight=False)
    recorded = read_recorded(request.run) if request.run else None
    setup = _setup(request, recorded)
    names = request.strategies or default_strategies(setup)
    steps = request.steps or (recorded.num_steps if recorded else DEFAULT_STEPS)
    warmup = steps // _WARMUP_SHARE if request.warmup is None else request.warmup
    with _bars(console) as progress:
        found = study(
            setup,
            check_strategies(names, setup),
            Length(steps=steps, warmup=warmup),
            num_seeds=request.seeds,
            lag_budgets=sorted(request.lag_budgets),
            jobs=request.jobs,
            progress=progress,
        )
    checked = () if recorded is None else (_checked(request, found, recorded),)
    _say(console, found, checked)
    if request.page is not None:
        console.print(f"page: {write_page(request.page, report.render_study(found, checked))}")
    if request.json is not None:
        request.json.write_text(report.study_json(found), encoding="utf-8")
        console.print(f"data: {request.json}")


def instead_of(run: Path, timeline: Timeline) -> str:
    """Return a sentence on what another setting would have gained in a run with this ``timeline``, by few steps of
    simulation. Empty if the run cannot be modelled."""
    try:
        recorded = read_recorded(run, timeline)
        setup = _setup(StudyRequest(run=run), recorded)
        steps = min(_FEW_STEPS, recorded.num_steps)
        length = Length(steps=steps, warmup=steps // _WARMUP_SHARE)
        bench = Bench(setup, length, 1, map, lambda what, done, total: None)
        (in_use,) = tried = bench.points("", [setup.rollout])
        lag = round(in_use.lag, 2) or _SOME_LAG
        others = [setting("april", setup, 1 + lag), setting("rollover", setup, lag)]
        return instead(in_use, [*tried, *bench.points("", others)])
    except RolloverError:
        return ""


def _setup(request: StudyRequest, recorded: Recorded | None) -> Setup:
    """Combine the options, the scenario file and the run; an option overrides the others."""
    file, file_cap = read_scenario(request.scenario) if request.scenario else (ScenarioFile(), None)
    cap = request.cap_tokens or file_cap
    rollout = file.rollout or (recorded.rollout if recorded else SimulatedRollout())
    rollout = shaped(rollout, batch_size=request.batch_size, group_size=request.group_size)
    replicas = request.replicas or file.engine.replicas or 1
    if recorded is not None:
        unit: Unit = "s"
        name, notes, known = str(request.run), recorded.notes, recorded.scenario
        lengths = capped(recorded.trace, cap)
    else:
        name = request.workload or DEFAULT_WORKLOAD
        lengths = read_lengths(name, cap_tokens=cap)
        replica, note, unit = _engine(request, file, lengths, rollout, replicas)
        notes, known = (note,), Scenario(replicas=(replica,))
        if isinstance(lengths, Trace) and lengths.held_s and file.turns is None:
            notes += (f"{name} has episodes, simulated without turns: give --from, or [turns] in a scenario file.",)
    if isinstance(lengths, Trace) and (lacking := lengths.missing_siblings(rollout.group_size)):
        notes += (lacking,)
    return Setup(
        name=name,
        lengths=lengths,
        rollout=replace(rollout, max_new_tokens=lengths.cap_tokens),
        is_in_use=file.rollout is not None or recorded is not None,
        scenario=build_scenario(known, file, replicas),
        unit=unit,
        notes=notes,
        max_staleness=request.max_staleness,
        lag_of=request.lag_of or (recorded.lag_of if recorded else "batch"),
        takes_turns=recorded is not None and recorded.takes_turns and file.colocated is None,
    )


def _engine(
    request: StudyRequest, file: ScenarioFile, lengths: Lengths, rollout: SimulatedRollout, replicas: int
) -> tuple[ReplicaModel, str, Unit]:
    """Return a replica, its origin, and the unit of its times."""
    if request.device is not None and request.model is not None:
        replica, note = engine.of_device(
            request.device, request.model, lengths, rollout, tp=request.tp, catalogue=request.catalogue
        )
        if given := [key for key in _OF_DEVICE if getattr(file.engine, key) is not None]:
            note += f" {request.scenario} sets its own {', '.join(given)}."
        return replica, note, "s"
    replica, note = engine.assumed(rollout, replicas, file.engine, request.scenario)
    return replica, note, "c0" if file.engine.c0_s is None else "s"


def _checked(request: StudyRequest, found: Study, recorded: Recorded) -> str:
    """Return how accurate the model of the run is, without the options that ask for another one."""
    measured = recorded.tokens_per_s(min(found.length.warmup, recorded.num_steps - 1))
    own = _setup(StudyRequest(run=request.run), recorded)
    (point,) = Bench(own, found.length, request.seeds, map, lambda what, done, total: None).points("", [own.rollout])
    simulated = point.mean("tokens_per_s")
    return (
        f"The run trained {measured:,.0f} tokens/s; simulated under its own setting it trains {simulated:,.0f}"
        f" ({simulated / measured - 1:+.0%}): expect the other figures to be off by a similar amount"
    )


def _say(console: Console, found: Study, checked: tuple[str, ...]) -> None:
    console.print(report.study_table(found, console.width))
    console.print(f"[dim]{report.legend()}[/]")
    for sentence in (*report.assumptions(found), *(f"{c}." for c in checked)):
        console.print(sentence, markup=False)
    if found.instead:
        console.print(f"\n{found.instead}", style="bold", markup=False)
    for advice in found.advice:
        console.print(f"\n{report.recommendation(advice)}", style="bold", markup=False)
        if compared := report.rivals(found, advice):
            console.print(compared, markup=False)
        console.print(advice.toml(), end="", markup=False)


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    """Show a bar for each part of the work, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)  # type: ignore[arg-type]  # rich's own name for a whole number

        yield progress
