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

    def memory(self, num_parameters: int, *, on_gpu: bool, capacity: int | None) -> dict[str, int]:
        return {"weights": 4 * num_parameters}

    def mismatch_remedy(self, number_format: str) -> str:
        return "use another engine"
'''

ENGINE = '''
"""The plain engine: a forward pass of transformers over the whole response for each token."""

from __future__ import annotations

import asyncio

import torch
from transformers import AutoModelForCausalLM

from rollover.engine.base import Capabilities, Chunk, EngineStats
from rollover.types import FinishReason


class PlainEngine:
    takes = "memory"

    def __init__(self, folder, config):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.capabilities = Capabilities(max_running=config.max_running, max_context_tokens=80)
        self.version, self.num_decoded, self.open, self.is_free = 0, 0, {}, asyncio.Event()
        self.is_free.set()

    async def generate(self, request):
        aborted = self.open[request.request_id] = asyncio.Event()
        ids, params = [*request.response_ids], request.params
        try:
            while True:
                await asyncio.sleep(0)
                if aborted.is_set():
                    yield self.chunk((), (), FinishReason.ABORT)
                    return
                await self.is_free.wait()
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
                logprobs = torch.log_softmax(logits / params.temperature, -1)
                noise = torch.Generator().manual_seed(hash((request.seed, len(ids))))
                token = int(torch.multinomial(logprobs.exp(), 1, generator=noise))
                ids.append(token)
                self.num_decoded += 1
                ends = FinishReason.STOP if token in params.stop_token_ids else None
                ends = ends or (FinishReason.LENGTH if len(ids) >= params.max_new_tokens else None)
                yield self.chunk((token,), (float(logprobs[token]),), ends)
                if ends is not None:
                    return
        finally:
            del self.open[request.request_id]

    def chunk(self, ids, logprobs, reason):
        return Chunk(
            token_ids=ids, logprobs=logprobs, policy_version=self.version, kv_version=self.version, finish_reason=reason
        )

    async def abort(self, request_ids):
        for request_id in request_ids:
            if (aborted := self.open.get(request_id)) is not None:
                aborted.set()
        while any(request_id in self.open for request_id in request_ids):
            await asyncio.sleep(0)

    def stats(self):
        return EngineStats(
            num_running=len(self.open), num_waiting=0, policy_version=self.version, decoded_tokens=self.num_decoded
        )

    async def close(self):
        for aborted in self.open.values():
            aborted.set()

    async def pause(self):
        self.is_free.clear()

    async def load(self, version, source):
        self.model.load_state_dict(dict(source.tensors()), strict=False)
        self.version = version

    async def resume(self):
        self.is_free.set()
'''

KIND = '''
"""The plain engine as a kind of engine."""

from __future__ import annotations

from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.plain.config import PlainConfig


async def _open(config: PlainConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.plain.engine import PlainEngine

    engine = PlainEngine(setup.folder, config)
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
from rollover.run.loading import load, restore
from rollover.settings.plain import resolved
from tests import runs

assert Path(rollover.__file__).is_relative_to(os.getcwd())
os.chdir("experiment")
chosen = ["--engine.kind", "plain", "--engine.max_running", "8", "--steps", "2", "--rollout.max_new_tokens", "12"]
config = load("run.toml", chosen)
assert restore(resolved(config), "config.json") == config
lines = dry_run(config)
print(next(line for line in lines if line.startswith("plain")))
print(any("engines' weights" in line for line in lines))
for wrong in (["--engine.max_running", "0"], ["--engine.kv_cache_bytes", "9"]):
    try:
        load("run.toml", ["--engine.kind", "plain", *wrong])
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
    for name, text in (("__init__", ""), ("config", CONFIG), ("engine", ENGINE), ("kind", KIND)):
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
