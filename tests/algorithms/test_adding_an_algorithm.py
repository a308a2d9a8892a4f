"""An algorithm is one row: the configuration, the trainer, the dry run and the generated page know it by that alone.

So is an advantage or an objective, with the function that computes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollover import cli
from rollover.algorithms import ALGORITHMS, Algorithm
from tests import runs
from tests.algorithms.batches import row
from tests.package_copy import PackageCopy
from tests.trainer.builders import assert_same, clones, make_batch, make_folder, make_trainer

SETTINGS: dict[str, Any] = {
    "advantage": "group_mean",
    "ratio_level": "sequence",
    "clip_high": 0.4,
    "aggregation": "token-mean",
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new row."""
    monkeypatch.setitem(ALGORITHMS, "centred-gspo", Algorithm(name="centred-gspo", **SETTINGS))
    return "centred-gspo"


def test_the_trainer_trains_with_it_as_with_the_settings_given_one_by_one(tmp_path: Path, named: str) -> None:
    folder = make_folder(tmp_path)
    by_name, spelled_out = (make_trainer(folder, algorithm=each) for each in (named, row("grpo", **SETTINGS)))
    before = clones(by_name.weights())
    assert by_name.step(make_batch()).metrics["loss"] == spelled_out.step(make_batch()).metrics["loss"]
    assert_same(by_name.weights(), spelled_out.weights())
    assert not all(torch.equal(before[name], tensor) for name, tensor in by_name.weights().items())


def test_the_dry_run_says_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str) -> None:
    (tmp_path / "work").mkdir()
    with runs.working_in(tmp_path / "work", runs.save_model(tmp_path / "tiny")):
        assert cli.main(["train", "run.toml", "--dry-run", "--algorithm.name", named]) == 0
    out = capsys.readouterr()
    assert 'name = "centred-gspo"' in out.out + out.err
    assert "algorithm centred-gspo;" in out.out + out.err


ADVANTAGE = """

@_advantage
def group_best(algorithm: Algorithm, batch: BatchRewards) -> Tensor:
    best_G = batch.rewards_B.new_zeros(int(batch.group_B.max()) + 1).index_reduce(
        0, batch.group_B, batch.rewards_B, "amax", include_self=False
    )
    return (batch.rewards_B - best_G[batch.group_B])[batch.sample_T]
"""

OBJECTIVE = """

@_objective
def unclipped(algorithm: Algorithm, ratio_T: Tensor, trainer_T: Tensor, advantages_T: Tensor) -> TokenLosses:
    never_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    return TokenLosses(loss_T=-ratio_T * advantages_T, ratio_T=ratio_T, low_T=never_T, high_T=never_T, dual_T=never_T)
"""

USE = """
import os
from pathlib import Path
import rollover  # before the tests look for it elsewhere
from rollover.algorithms import resolve
from rollover.algorithms.advantages import compute_advantages
from rollover.algorithms.losses import token_losses
from rollover.errors import ConfigError
from rollover.run.building import build_config, restore
from rollover.settings.plain import resolved
from tests.algorithms.batches import f64, worked_batch
import torch

assert Path(rollover.__file__).is_relative_to(os.getcwd())
config = build_config("quickstart", ["--algorithm.name", "best-of-group"])
assert restore(resolved(config), "config.json") == config
algorithm = resolve(config.algorithm)
rewards_B, group_B, sample_T = f64(1.0, 0.25, 0.0, -1.0), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 2, 3])
print(compute_advantages(
    algorithm, rewards_B=rewards_B, group_B=group_B, sample_T=sample_T, loss_mask_T=torch.ones(5)
).tolist())
print([round(x, 6) for x in token_losses(algorithm, worked_batch()).loss_T.tolist()])
for wrong in (["--rollout.group_size", "1"], ["--algorithm.advantage_eps", "1e-4"], ["--algorithm.dual_clip", "3.0"],
              ["--algorithm.objective", "uncliped"]):
    try:
        build_config("quickstart", ["--algorithm.name", "best-of-group", *wrong])
    except ConfigError as error:
        print(error)
"""


def test_an_advantage_and_an_objective_are_one_function_and_one_row_each(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    room = tmp_path / "rollover" / "algorithms"
    for file, function in (("advantages.py", ADVANTAGE), ("losses.py", OBJECTIVE)):
        (room / file).write_text((room / file).read_text() + function)
    table = room / "registry.py"
    rows = {
        '    "history": AdvantageRow(compares="history", divides=True),\n': (
            '    "group_best": AdvantageRow(compares="siblings", divides=False),\n'
        ),
        '    "reinforce": ObjectiveRow(has_ratio=False),\n': (
            '    "unclipped": ObjectiveRow(has_ratio=True, trains_ratio=True),\n'
        ),
        '        Algorithm(name="grpo", paper="arXiv 2402.03300", advantage="group_std"),\n': (
            '        Algorithm(name="best-of-group", paper="our own", advantage="group_best", objective="unclipped"),\n'
        ),
    }
    text = table.read_text()
    for before, added in rows.items():
        assert text.count(before) == 1
        text = text.replace(before, before + added)
    table.write_text(text)

    advantages, losses, alone, eps, dual, misspelled = package.run(USE).splitlines()
    assert advantages == "[0.0, -0.75, -0.75, 0.0, -1.0]"
    assert losses == "[-1.5, -0.9, 0.7]", "minus ratio times advantage"
    assert "the advantage 'group_best' of algorithm 'best-of-group' compares siblings" in alone
    assert "algorithm.advantage_eps has no effect while advantage is 'group_best'" in eps
    assert "algorithm.dual_clip has no effect while objective is 'unclipped'" in dual
    assert misspelled.endswith("algorithm.objective: 'uncliped' is not allowed; did you mean 'unclipped'?")
    page = package.configuration_page()
    assert '| `best-of-group` | our own | `advantage = "group_best"`, `objective = "unclipped"` |' in page
    assert '`"history"`, `"group_best"`' in page
