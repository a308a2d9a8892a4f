"""A strategy is one file and one row: config, command line, laws, simulator, dry run and documentation then know it."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import PackageCopy

STRATEGY = '''
"""A number of batches of work that is always open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rollover.engine.base import Capabilities
from rollover.rollout.shared import SharedConfig
from rollover.rollout.state import View
from rollover.rollout.strategies.config import Knob, StrategyConfig
from rollover.rollout.strategy import OnFull, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog(Strategy):
    """``num_batches`` batches of groups are open or ready at the start of a round."""

    num_batches: int

    on_full = OnFull.PARK

    def groups_to_open(self, view: View) -> int:
        return min(self.num_batches * self.batch_size - view.ledger.num_unconsumed, self.headroom(view))


@dataclass(frozen=True, kw_only=True)
class BacklogConfig(StrategyConfig):
    """Keeps a number of batches open and parks what is unfinished."""

    builds = Backlog
    knob = Knob(key="num_batches", symbol="k", scale="plain", values=(1, 2, 3))

    kind: Literal["backlog"] = "backlog"
    num_batches: int = 2
    """Batches of groups that are open at the same time."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "num_batches")

    def describe(self, shared: SharedConfig) -> str:
        return f"{self.num_batches} batches open"

    def staleness_needed(self, shared: SharedConfig) -> int:
        return self.num_batches - 1

    def arguments(self, shared: SharedConfig, engine: Capabilities) -> dict[str, Any]:
        return {**super().arguments(shared, engine), "num_batches": self.num_batches}
'''

USE = """
import os
from pathlib import Path
import rollover
from rollover import cli
from rollover.errors import ConfigError
from rollover.frontier.settings import label, settings
from rollover.run.building import build_config, restore
from rollover.settings.plain import resolved
from rollover.run.dry_run import dry_run
from tests.frontier.kit import small

assert Path(rollover.__file__).is_relative_to(os.getcwd())
config = build_config("quickstart", ["--rollout.strategy", "backlog"])
told = build_config("quickstart", ["--rollout.strategy", "backlog", "--rollout.strategy.num_batches", "3"])
print(config.rollout.strategy, told.rollout.strategy)
print(next(line for line in dry_run(told) if "backlog" in line))
assert restore(resolved(told), "config.json") == told
for wrong in (["--rollout.strategy.num_batches", "0"], ["--rollout.strategy.num_running", "3"]):
    try:
        build_config("quickstart", ["--rollout.strategy", "backlog", *wrong])
    except ConfigError as error:
        print(error)
print([label(setting) for setting in settings("backlog", small())])
assert cli.main(["simulate", "light-8k", "--strategies", "backlog", "--steps", "3", "--seeds", "1", "--cap", "100"]) == 0
"""

LAWS = """
import os, sys
from pathlib import Path
import rollover  # before pytest looks for it elsewhere
import pytest

assert Path(rollover.__file__).is_relative_to(os.getcwd())
tests = os.path.join(os.environ["PYTHONPATH"].split(os.pathsep)[1], "tests", "rollout", "test_strategies.py")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "backlog", tests]))
"""


def added(folder: Path) -> PackageCopy:
    package = PackageCopy(folder)
    (folder / "rollover/rollout/strategies/backlog.py").write_text(STRATEGY)
    table = folder / "rollover/rollout/strategies/__init__.py"
    text, row = table.read_text(), "    | RolloverConfig\n"
    assert row in text
    text = text.replace(row, f"{row}    | BacklogConfig\n")
    first = text.index("from rollover.rollout.strategies.")
    table.write_text(f"{text[:first]}from rollover.rollout.strategies.backlog import BacklogConfig\n{text[first:]}")
    return package


def test_a_strategy_is_one_file_and_one_row(tmp_path: Path) -> None:
    package = added(tmp_path)
    made, planned, too_few, unknown, tried, *simulated = package.run(USE).splitlines()
    assert made == "BacklogConfig(kind='backlog', num_batches=2) BacklogConfig(kind='backlog', num_batches=3)"
    assert planned == "strategy backlog: 3 batches open, staleness at most 4 versions"
    assert too_few == "command line: --rollout.strategy.num_batches must be at least 1, got 0"
    assert unknown.startswith("command line: --rollout.strategy.num_running: unknown key of kind 'backlog'; it belongs")
    assert tried == "['backlog k=1', 'backlog k=2', 'backlog k=3']"
    assert any("backlog k=2" in line for line in simulated)
    page = package.configuration_page()
    assert (
        '## `[rollout.strategy]` of kind `"backlog"`\n\nKeeps a number of batches open and parks what is unfinished.\n'
        in page
    )
    assert "- **`num_batches`** (whole number; default `2`). Batches of groups that are open at the same time" in page


def test_the_laws_of_strategies_hold_for_it_without_another_line(tmp_path: Path) -> None:
    package = added(tmp_path)
    assert "4 passed" in package.run(LAWS, writes_page=False)
