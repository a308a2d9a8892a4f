"""Folders of values on their way: which versions stay, and whose folders are cleared away."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover.trainer import staging
from rollover.trainer.staging import Staging
from tests.speed import within

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(staging, "_SHARED_MEMORY", shared)
    return shared


def test_a_publication_that_is_repeated_leaves_the_version_before_it(tmp_path: Path) -> None:
    """Ranks are lost in it, twice."""
    own = Staging(0, fallback=tmp_path)
    first = own.filled(6, lambda folder: (folder / "six").touch())

    def fail(folder: Path) -> None:
        (folder / "part").touch()
        raise RuntimeError("rank 1 was lost")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            own.filled(7, fail)
    second = own.filled(7, lambda folder: (folder / "seven").touch())
    assert own.filled(7, fail) == second  # it is there
    assert sorted(path.name for path in own.path.glob("*/*")) == ["seven", "six"]
    own.filled(9, lambda folder: None)
    assert second.exists() and not first.exists()
    own.close()
    own.close()
    assert not own.path.exists()


def test_a_folder_of_another_container_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share memory, and do not see each other's processes."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # nobody here has it
        theirs = Staging(0, fallback=tmp_path)
    ours = Staging(0, fallback=tmp_path)
    assert theirs.path.exists()
    theirs.close()
    ours.close()


def test_the_folder_of_a_process_that_was_killed_is_cleared_away(shared_memory: Path, tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from rollover.trainer import staging\n"
        f"staging._SHARED_MEMORY = Path({str(shared_memory)!r})\n"
        f"staging.Staging(0, fallback=Path()).meeting(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=within(60), check=False)
    assert len([*shared_memory.glob("*/ranks-*")]) == 1
    own = Staging(0, fallback=tmp_path)
    assert [*shared_memory.iterdir()] == [own.path]
    own.close()


def test_a_folder_that_another_trainer_clears_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = staging.tempfile.mkdtemp
    taken: list[Path] = []

    def taken_at_first(**given: Path | str) -> str:
        folder = Path(made(**given))
        if not taken:
            taken.append(folder)
            folder.rmdir()
        return str(folder)

    monkeypatch.setattr(staging.tempfile, "mkdtemp", taken_at_first)
    own = Staging(0, fallback=tmp_path)
    assert own.path.exists() and own.path != taken[0]
    own.close()


def test_without_locks_nothing_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    theirs, ours = Staging(0, fallback=tmp_path), Staging(0, fallback=tmp_path)
    assert theirs.path.exists() and ours.path.exists()
    for own in (theirs, ours):
        own.close()
        assert not own.path.exists()


def test_values_lie_below_the_run_where_shared_memory_is_too_small(tmp_path: Path) -> None:
    own = Staging(2**62, fallback=tmp_path / "staging")
    assert own.path.parent == tmp_path / "staging"
    own.close()


def test_what_a_killed_process_left_makes_room_before_room_is_measured(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = shared_memory / "rollover-staging-left"
    left.mkdir()
    free = staging.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: free._replace(free=0 if left.exists() else 2**40))
    own = Staging(2**30, fallback=tmp_path / "disk")
    assert own.path.parent == shared_memory and not left.exists()
    own.close()
