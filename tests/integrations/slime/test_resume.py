"""Where a run inside slime begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover.errors import RunError
from rollover.integrations.slime.resume import Beginning, SlimeProgress, beginning

RUN = SlimeProgress(first_rollout=0, cursors={4: 30, 9: 55})


def written(folder: Path, progress: SlimeProgress = RUN, started: str = "today") -> str:
    (folder / "rollover").mkdir(parents=True)
    progress.write(folder / "rollover")
    (folder / "rollover/config.json").write_text(json.dumps({"meta": {"started": started}}))
    (folder / "rollover/journal.sqlite").write_bytes(b"events")
    return str(folder)


def test_nothing_there_begins_with_rollout_0(tmp_path: Path) -> None:
    start = beginning("ref_model", str(tmp_path / "ckpt"), -1)
    assert start == Beginning(
        folder=tmp_path / "ckpt/rollover", progress=SlimeProgress(), step=0, restore=None, position=0
    )


@pytest.mark.parametrize(
    ("saved", "step", "restore", "position"),
    [
        pytest.param(9, 10, 9, 55, id="its newest"),
        pytest.param(4, 5, 4, 30, id="an older one"),
        pytest.param(14, 15, 9, 55, id="slime was killed between its model and its data source"),
    ],
)
def test_a_run_goes_on_after_its_checkpoint(tmp_path: Path, saved: int, step: int, restore: int, position: int) -> None:
    place = written(tmp_path / "ckpt")
    start = beginning(place, place, saved)
    assert (start.step, start.restore, start.position, start.progress) == (step, restore, position, RUN)


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    place = written(tmp_path / "ckpt", SlimeProgress())
    start = beginning("ref_model", place, -1)
    assert (start.step, start.restore, start.position) == (0, None, 0)
    assert start.progress == SlimeProgress()


def test_a_checkpoint_of_slime_alone_is_where_the_count_begins(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    start = beginning(str(tmp_path / "theirs"), str(tmp_path / "ckpt"), 19)
    assert (start.progress.first_rollout, start.step, start.restore, start.position) == (20, 0, 19, 0)
    place = written(tmp_path / "ckpt", start.progress.saved(24, 17))
    assert SlimeProgress.read(Path(place) / "rollover") == SlimeProgress(first_rollout=20, cursors={24: 17})
    later = beginning(place, place, 24)
    assert (later.step, later.restore, later.position) == (5, 24, 17)


def test_a_run_that_is_to_go_on_elsewhere_is_copied(tmp_path: Path) -> None:
    source = written(tmp_path / "one")
    start = beginning(source, str(tmp_path / "two"), 9)
    assert start.folder == tmp_path / "two/rollover" and start.step == 10
    assert (tmp_path / "two/rollover/journal.sqlite").read_bytes() == b"events"
    assert SlimeProgress.read(tmp_path / "one/rollover") == RUN


def test_a_copy_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    source = written(tmp_path / "one")
    (tmp_path / "two/.rollover.part").mkdir(parents=True)
    (tmp_path / "two/.rollover.part/metrics").write_text("half")
    beginning(source, str(tmp_path / "two"), 9)
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["rollover"]
    assert not (tmp_path / "two/rollover/metrics").exists()


@pytest.mark.parametrize(
    ("load_after", "step", "restore"), [(9, 10, 9), (4, 5, 4)], ids=["before its first checkpoint", "from an older one"]
)
def test_a_copy_goes_on_though_load_is_the_original(tmp_path: Path, load_after: int, step: int, restore: int) -> None:
    one, two = written(tmp_path / "one"), str(tmp_path / "two")
    beginning(one, two, load_after)
    (tmp_path / "two/rollover/journal.sqlite").write_bytes(b"more events")
    again = beginning(one, two, load_after)
    assert (again.folder, again.step, again.restore) == (tmp_path / "two/rollover", step, restore)
    assert (tmp_path / "two/rollover/journal.sqlite").read_bytes() == b"more events"


def test_a_run_that_starts_from_the_weights_of_another_takes_none_of_its_rollouts(tmp_path: Path) -> None:
    earlier, new = written(tmp_path / "one"), str(tmp_path / "two")
    start = beginning(earlier, new, -1)
    assert (start.progress, start.step, start.restore) == (SlimeProgress(), 0, None)
    assert not (tmp_path / "two").exists()
    written(tmp_path / "two", SlimeProgress(), "later")  # killed before its first checkpoint
    assert beginning(earlier, new, -1).progress == SlimeProgress()


def test_the_directory_of_another_run_is_not_written_over(tmp_path: Path) -> None:
    one = written(tmp_path / "one")
    branch = SlimeProgress(first_rollout=0, cursors={4: 30, 9: 56})
    for name, progress, started in (("two", RUN, "yesterday"), ("three", branch, "today")):
        other = written(tmp_path / name, progress, started)
        with pytest.raises(RunError, match=rf"{name}/rollover holds the rollouts of another run than .*one/rollover"):
            beginning(one, other, 9)
    late = written(tmp_path / "late", SlimeProgress(first_rollout=20))
    with pytest.raises(RunError, match="a different run, not the one that resumes after rollout 9"):
        beginning(None, late, 9)


def test_a_run_that_saves_nothing_has_no_directory(tmp_path: Path) -> None:
    start = beginning(written(tmp_path / "ckpt"), None, 9)
    assert (start.folder, start.progress.first_rollout, start.restore) == (None, 10, 9)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    place = written(tmp_path / "ckpt")
    (tmp_path / "ckpt/rollover/slime.json").write_text('{"format": 1}')
    with pytest.raises(RunError, match=r"slime\.json cannot be read"):
        beginning(place, place, 9)
    (tmp_path / "ckpt/rollover/slime.json").write_text('{"format": 2}')
    with pytest.raises(RunError, match="has format 2"):
        beginning(place, place, 9)


def test_a_checkpoint_voids_those_of_later_rollouts() -> None:
    assert RUN.saved(7, 44).cursors == {4: 30, 7: 44}


def test_batches_are_kept_for_as_many_checkpoints_as_asked() -> None:
    assert [RUN.oldest_step(kept) for kept in (1, 2, 3)] == [10, 5, 0]
