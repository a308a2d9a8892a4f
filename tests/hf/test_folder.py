"""A folder is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover.errors import EngineError, ResourceError
from rollover.hf.folder import write_folder


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), OSError(errno.EIO, "broken disk"), EngineError("rank 1 failed: [Errno 5] broken disk")],
)
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    write_folder(tmp_path / "step_1", lambda p: (p / "a").write_text("old") and None)

    def write(partial: Path) -> None:
        (partial / "a").write_text("new")
        raise error

    with pytest.raises(type(error)):
        write_folder(tmp_path / "step_1", write)
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]
    assert (tmp_path / "step_1" / "a").read_text() == "old"
    write_folder(tmp_path / "step_1", lambda p: (p / "a").write_text("new") and None)
    assert (tmp_path / "step_1" / "a").read_text() == "new"


def test_a_full_disk_is_reported_with_the_mend_and_leaves_what_was_there(tmp_path: Path) -> None:
    write = Mock(side_effect=RuntimeError("I/O error: No space left on device (os error 28)"))
    copy = Mock(side_effect=shutil.Error([("a", "b", str(OSError(errno.ENOSPC, "No space left on device")))]))
    for fails in (write, copy):
        with pytest.raises(ResourceError, match=r"v2 was not written, earlier ones are intact; buy a disk"):
            write_folder(tmp_path / "v2", fails, remedy="buy a disk")
        assert not list(tmp_path.iterdir())


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], indirect=True, ids=oct)
def test_those_may_read_it_who_may_read_what_the_user_writes(tmp_path: Path, umask: int) -> None:
    """A server that runs as another user loads published weights, though safetensors lets nobody else read a file."""

    def write(partial: Path) -> None:
        (partial / "trainer").mkdir()
        for name in ("model.safetensors", "trainer/optimizer.safetensors"):
            (partial / name).write_text("weights")
            (partial / name).chmod(0o600)

    write_folder(tmp_path / "v1", write)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "v1", *(tmp_path / "v1").rglob("*"))}
    assert modes == {
        "v1": 0o777 & ~umask,
        "trainer": 0o777 & ~umask,
        "model.safetensors": 0o666 & ~umask,
        "optimizer.safetensors": 0o666 & ~umask,
    }
