"""A folder is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rollover.errors import ResourceError
from rollover.hf.folder import write_folder


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken disk")])
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
    def write(partial: Path) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors words it

    with pytest.raises(ResourceError, match=r"v2 was not written, earlier ones are intact; buy a disk"):
        write_folder(tmp_path / "v2", write, remedy="buy a disk")
    assert not list(tmp_path.iterdir())
