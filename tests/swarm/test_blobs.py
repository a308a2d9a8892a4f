"""What is read under a digest has this digest, whatever happened to the disk or to the process that wrote it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover.errors import ResourceError
from rollover.swarm.publication import blobs
from rollover.swarm.publication.blobs import BlobFolder, replace_file
from rollover.swarm.publication.manifest import PublicationError, digest_of

CONTENT = b"weights"
NAME = digest_of(CONTENT)
OTHER = digest_of(b"other")


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def files(folder: BlobFolder) -> set[str]:
    return set(os.listdir(folder.root))


def test_a_blob_is_found_under_the_sha256_of_its_content(folder: BlobFolder) -> None:
    assert NAME not in folder
    assert folder.put(CONTENT) == NAME
    assert NAME in folder and folder.read(NAME) == CONTENT
    assert files(folder) == {NAME}


def test_a_blob_is_written_once_unless_it_is_damaged(folder: BlobFolder) -> None:
    folder.put(CONTENT)
    before = folder.path(NAME).stat()
    folder.put(CONTENT)
    after = folder.path(NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    folder.path(NAME).write_bytes(b"weighty")
    folder.put(CONTENT)
    assert folder.read(NAME) == CONTENT


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc/passwd", NAME.upper(), NAME[:-1], f"{NAME}0", f"{NAME}\n", ".." * 32]
)
def test_no_other_name_becomes_a_path(folder: BlobFolder, name: str) -> None:
    for use in (folder.path, folder.read, folder.partial, folder.accept, folder.__contains__):
        with pytest.raises(PublicationError, match="is not a blob name"):
            use(name)
    with pytest.raises(PublicationError, match="is not a blob name"):
        folder.keep([name])


def test_a_damaged_blob_is_found_out_and_deleted(folder: BlobFolder) -> None:
    folder.put(CONTENT)
    folder.path(NAME).write_bytes(b"weightz")
    with pytest.raises(PublicationError, match=f"{NAME} has content other than its name says"):
        folder.read(NAME)
    with pytest.raises(PublicationError, match="is not in"):
        folder.read(NAME)


def test_a_download_that_two_threads_finish_is_accepted_once(folder: BlobFolder) -> None:
    """A fetch that was given up may still be checking what the next one has found to be whole."""
    folder.partial(NAME).write_bytes(CONTENT)
    folder.accept(NAME)
    folder.accept(NAME)
    assert folder.read(NAME) == CONTENT
    with pytest.raises(PublicationError, match=f"what was sent as blob {OTHER} was damaged"):
        folder.accept(OTHER)  # which the other has deleted


def test_only_what_is_kept_stays(folder: BlobFolder) -> None:
    folder.put(CONTENT)
    folder.put(b"other")
    folder.partial(NAME).write_bytes(b"weig")
    folder.partial(OTHER).write_bytes(b"oth")
    (folder.root / "README").write_text("not ours")
    folder.keep([NAME])
    assert files(folder) == {NAME, f".partial-{NAME}", "README"}


def test_what_a_crash_left_half_written_is_gone_and_a_download_can_go_on(folder: BlobFolder) -> None:
    (folder.root / ".new-abc").write_bytes(b"wei")
    folder.partial(NAME).write_bytes(b"weig")
    again = BlobFolder(folder.root)
    assert files(again) == {f".partial-{NAME}"}
    with again.partial(NAME).open("ab") as file:
        file.write(b"hts")
    again.accept(NAME)
    assert files(again) == {NAME}


def test_a_download_of_another_content_is_refused_and_deleted(folder: BlobFolder) -> None:
    folder.partial(NAME).write_bytes(b"weightz")
    with pytest.raises(PublicationError, match=f"what was sent as blob {NAME} has the digest"):
        folder.accept(NAME)
    assert files(folder) == set()


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing(
    folder: BlobFolder, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    monkeypatch.setattr(blobs.os, call, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ResourceError, match=f"no space left on the disk of .*: blob {NAME} was not written"):
        folder.put(CONTENT)
    assert files(folder) == set()


def test_a_small_file_has_the_old_content_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "publications.json"
    replace_file(file, b"old")
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(blobs.os, call, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(ResourceError, match=r"publications\.json was not written"):
                replace_file(file, b"new")
        assert file.read_bytes() == b"old" and os.listdir(tmp_path) == ["publications.json"]
    replace_file(file, b"new")
    assert file.read_bytes() == b"new"
