"""What a power cut leaves of a run: nothing that somebody else relies on is missing from its journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rollover import cli
from rollover.rollout.events import SampleStarted, SegmentEnded
from rollover.rollout.generation import sample_key
from rollover.rollout.journal import Journal
from rollover.trainer.local import LocalTrainer
from rollover.types import SampleId
from tests import runs
from tests.power import Disk
from tests.rollout.kit import make_rig
from tests.rollout.test_placement import Asked


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def started(number: int) -> SampleStarted:
    return SampleStarted(time_s=0.0, sample_id=SampleId(number, 0), policy_version=0)


def test_what_was_synced_survives_a_power_cut_and_what_was_not_may_be_lost(tmp_path: Path, disk: Disk) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.append([started(0), started(1)])
    journal.sync()
    journal.append([started(2)])
    found = disk.journal_after_a_power_cut(journal.path, tmp_path / "found")
    assert [event for _, event in found.read()] == [started(0), started(1)]
    found.close()
    journal.sync()
    found = disk.journal_after_a_power_cut(journal.path, tmp_path / "found")
    assert found.last_seq == journal.last_seq == 3
    found.close()
    journal.close()


class Everywhere(Asked):
    """Promises a place to everybody, and looks at the disk whenever a member may forget tokens."""

    def __init__(self, look: Callable[[list[tuple[str, int]]], None]) -> None:
        super().__init__()
        self._look = look

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        self._look(list(tokens))


async def test_members_forget_tokens_only_when_a_power_cut_cannot_take_them(tmp_path: Path, disk: Disk) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    looks = 0

    def look(tokens: list[tuple[str, int]]) -> None:
        nonlocal looks
        found = disk.journal_after_a_power_cut(journal.path, tmp_path / "found")
        held: dict[str, int] = {}
        for _, event in found.read():
            if isinstance(event, SegmentEnded):
                key = sample_key(event.sample_id)
                held[key] = held.get(key, 0) + len(event.segment.token_ids)
        found.close()
        assert all(held[key] >= number for key, number in tokens)
        looks += bool(tokens)

    await make_rig(journal=journal, placement=Everywhere(look)).train(3)
    assert looks > 6
    journal.close()


async def test_a_batch_that_is_handed_out_survives_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    rig = make_rig(journal=journal)
    for step in range(3):
        batch = await rig.driver.next_batch()
        found = disk.journal_after_a_power_cut(journal.path, tmp_path / "found")
        assert found.last_seq == journal.last_seq
        found.close()
        await rig.publish(batch.step + 1)
        assert batch.step == step
    journal.close()


def test_no_checkpoint_is_newer_than_the_journal(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = LocalTrainer.save, []

    def check_and_save(trainer: LocalTrainer, path: Path, extra: dict[str, int]) -> None:
        found = disk.journal_after_a_power_cut(Path("out/journal.sqlite").resolve(), tmp_path / "found")
        assert found.last_seq >= extra["journal_seq"] > 0
        found.close()
        saved.append(path.name)
        save(trainer, path, extra)

    monkeypatch.setattr(LocalTrainer, "save", check_and_save)
    with runs.working_in(tmp_path, runs.save_model(tmp_path / "source")):
        assert cli.main(["train", "run.toml", "--run-dir", "out"]) == 0
    assert saved == ["step_2", "step_4"]
