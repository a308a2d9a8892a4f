"""An engine is one folder and one row: config, command line, checks, runs and documentation then know it."""

from __future__ import annotations

from pathlib import Path

from tests import runs
from tests.package_copy import PackageCopy

CONFIG = '''
"""Settings of the plain engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.engine.config import DeclaredCapabilities, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig(EngineConfig):
    """Computes the whole response again for each token."""

    kind: Literal["plain"] = "plain"
    max_running: int = 4
    """Samples decoded at the same time."""
    logprob_tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(max_running=self.max_running, in_process=True, in_flight_update=False)

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def memory(self, num_parameters: int, model: object, *, on_gpu: bool, capacity: int | None) -> dict[str, int]:
        return {"weights": 4 * num_parameters}

    def mismatch_remedy(self, number_format: str) -> str:
        return "use another engine"
'''

KIND = '''
"""The plain engine as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.plain.config import PlainConfig


async def _open(config: PlainConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.embedded.config import EmbeddedConfig
    from rollover.engine.embedded.engine import EmbeddedEngine

    plain = EmbeddedConfig(max_running=config.max_running, kv_cache_bytes=2**22, cpu_kernels="torch")
    engine = EmbeddedEngine.from_folder(setup.folder, plain)
    return OpenedEngine(engine=engine, weights=engine)


def _preflight(config, facts):
    return [f"plain: a response of {facts.longest_tokens} tokens takes as many passes"]


PLAIN = EngineKind(config=PlainConfig, open=_open, preflight=_preflight)
'''

USE = """
import os
from pathlib import Path
import rollover
from rollover import cli
from rollover.errors import ConfigError
from rollover.run.dry_run import dry_run
from rollover.run.building import build_config, restore
from rollover.settings.plain import resolved
from tests import runs

assert Path(rollover.__file__).is_relative_to(os.getcwd())
os.chdir("experiment")
chosen = ["--engine.kind", "plain", "--engine.max_running", "8", "--steps", "2", "--rollout.max_new_tokens", "12"]
config = build_config("run.toml", chosen)
assert restore(resolved(config), "config.json") == config
lines = dry_run(config)
print(next(line for line in lines if line.startswith("plain")))
print(any("engines' weights" in line for line in lines))
for wrong in (["--engine.max_running", "0"], ["--engine.kv_cache_bytes", "9"]):
    try:
        build_config("run.toml", ["--engine.kind", "plain", *wrong])
    except ConfigError as error:
        print(error)
assert cli.main(["train", "run.toml", *chosen, "--run-dir", "out", "--quiet"]) == 0
tokens = runs.ledger(Path("out")).tokens
assert [row["step"] for row in runs.rows(Path("out"))] == [0, 1] and tokens.trained > 0
samples = [sample for group in runs.batches(Path("out"))[1].groups for sample in group.trajectories]
print({segment.policy_version for sample in samples for segment in sample.segments})
"""


def added(folder: Path) -> PackageCopy:
    package = PackageCopy(folder)
    room = folder / "rollover/engine/plain"
    room.mkdir()
    for name, text in (("__init__", ""), ("config", CONFIG), ("kind", KIND)):
        (room / f"{name}.py").write_text(text)
    table = folder / "rollover/run/kinds.py"
    text, row = table.read_text(), "    SWARM,\n"
    assert text.count(row) == 1
    table.write_text(
        text.replace(row, f"{row}    PLAIN,\n").replace(
            "from rollover.engine.kind", "from rollover.engine.plain.kind import PLAIN\nfrom rollover.engine.kind", 1
        )
    )
    return package


def test_an_engine_is_one_folder_and_one_row(tmp_path: Path) -> None:
    package = added(tmp_path)
    (tmp_path / "experiment").mkdir()
    runs.write_experiment(tmp_path / "experiment", runs.save_model(tmp_path / "model"))
    planned, is_counted, too_few, unknown, *_, versions = package.run(USE).splitlines()
    assert planned == "plain: a response of 28 tokens takes as many passes"
    assert is_counted == "True"
    assert too_few == "command line: --engine.max_running must be at least 1, got 0"
    assert unknown.startswith("command line: --engine.kv_cache_bytes: unknown key of kind 'plain'; it belongs to")
    assert versions in ("{1}", "{0, 1}")
    page = package.configuration_page()
    assert '`[engine]` of kind `"plain"`\n\nComputes the whole response again for each token.\n' in page
