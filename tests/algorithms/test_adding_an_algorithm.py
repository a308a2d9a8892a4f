"""An algorithm is one row: the configuration, the trainer, the dry run and the generated page know it by that alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from rollover import cli
from rollover.algorithms import ALGORITHMS, Algorithm, AlgorithmConfig, resolve
from tests import runs
from tests.trainer.builders import make_batch, make_folder, make_trainer

ROW = Algorithm(
    name="centred-gspo",
    paper="our own",
    advantage="group_mean",
    ratio_level="sequence",
    clip_high=0.4,
    aggregation="token-mean",
)


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    monkeypatch.setitem(ALGORITHMS, ROW.name, ROW)
    return ROW


def test_the_configuration_takes_it_by_name_with_its_settings_and_with_changes() -> None:
    assert resolve(AlgorithmConfig(name="centred-gspo")) == ROW
    assert resolve(AlgorithmConfig(name="centred-gspo", clip_high=0.3)).clip_high == 0.3
    with pytest.raises(ValueError, match="did you mean 'centred-gspo'"):
        AlgorithmConfig(name="centred-gsp")


def test_the_trainer_trains_with_it_as_with_the_settings_given_one_by_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    by_name = make_trainer(folder, algorithm="centred-gspo")
    spelled_out = make_trainer(
        folder,
        algorithm=resolve(
            AlgorithmConfig(
                name="grpo", advantage="group_mean", ratio_level="sequence", clip_high=0.4, aggregation="token-mean"
            )
        ),
    )
    before = {name: value.clone() for name, value in by_name.weights().items()}
    assert by_name.step(make_batch()).metrics["loss"] == spelled_out.step(make_batch()).metrics["loss"]
    after = by_name.weights()
    assert all(torch.equal(after[name], value) for name, value in spelled_out.weights().items())
    assert not all(torch.equal(after[name], value) for name, value in before.items())


def test_the_dry_run_says_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work").mkdir()
    with runs.working_in(tmp_path / "work", runs.save_model(tmp_path / "tiny")):
        assert cli.main(["train", "run.toml", "--dry-run", "--algorithm.name", "centred-gspo"]) == 0
    out = capsys.readouterr()
    assert 'name = "centred-gspo"' in out.out + out.err
    assert "algorithm centred-gspo;" in out.out + out.err


def test_the_generated_page_lists_it_with_its_paper_and_settings() -> None:
    listed = '`advantage = "group_mean"`, `ratio_level = "sequence"`, `clip_high = 0.4`, `aggregation = "token-mean"`'
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_configuration.py"))["render"]()
    assert f"| `centred-gspo` | our own | {listed} |" in page
