"""A version is visible when all that it needs is on disk, and nothing that happens on the way can make it unreadable."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rollover.errors import EngineError, ResourceError, RunError
from rollover.swarm.publication import blobs as blobs_module
from rollover.swarm.publication.keys import open_key
from rollover.swarm.publication.manifest import PublicationError, needed_blobs
from rollover.swarm.publication.materialise import materialise
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.swarm.wire.messages import Head
from rollover.weights.adapters import LowRank, MergedWeights
from rollover.weights.base import Manifest
from rollover.weights.sources import MemoryWeights
from tests.swarm.weights_kit import Weights, assert_same, manifest_of, open_publisher, served, source, versions

VERSIONS = versions(8)


def readable(publisher: SwarmPublisher, head: Head) -> Weights:
    """The weights of a publication from its blobs alone."""
    manifest = manifest_of(publisher, head)
    base: dict[str, Any] = {}
    if manifest.base_manifest is not None:
        assert manifest.base_version is not None
        below = readable(publisher, Head(version=manifest.base_version, manifest=manifest.base_manifest))
        base = {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in below.items()}
    contents = materialise(manifest, publisher.blobs, base)
    return {
        t.name: torch.from_numpy(contents[t.name].copy()).view(getattr(torch, t.dtype)).reshape(t.shape)
        for t in manifest.tensors
    }


def publish_all(publisher: SwarmPublisher, count: int, *, first: int = 0) -> list[Head]:
    return [publisher.publish(source(v, VERSIONS[v])).head for v in range(first, first + count)]


def test_the_first_is_full_and_then_deltas_bring_every_bit(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    assert publisher.head is None
    first = publisher.publish(source(0, VERSIONS[0]))
    assert (first.kind, first.full_bytes) == ("full", 2 * (300 * 64 + 64 * 64 + 64))
    second = publisher.publish(source(3, VERSIONS[1]))
    assert (second.kind, second.head.version) == ("delta", 3) and publisher.head == second.head
    assert second.wire_bytes < first.full_bytes / 30
    assert_same(readable(publisher, first.head), served(VERSIONS[0]))
    assert_same(readable(publisher, second.head), served(VERSIONS[1]))
    manifest = manifest_of(publisher, second.head)
    assert (manifest.base_version, manifest.base_manifest) == (0, first.head.manifest)
    assert (manifest.run_id, manifest.run_epoch, manifest.version) == ("sums", 1, 3)
    assert {t.name for t in manifest.tensors if not t.num_bytes} == {"model.norm.weight"}
    assert [file.name for file in manifest.files] == ["config.json", "tokenizer.json"]


def test_the_source_may_change_after_it_was_published(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    weights = {name: w.bfloat16() for name, w in VERSIONS[0].items()}
    publisher.publish(source(0, weights))
    for name, w in weights.items():
        w.copy_(VERSIONS[1][name])
    second = publisher.publish(source(1, weights))
    assert_same(readable(publisher, second.head), served(VERSIONS[1]))


def test_each_so_many_publications_one_is_full(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, anchor_every=3)
    published = [publisher.publish(source(v, VERSIONS[v])) for v in range(7)]
    assert [p.kind for p in published] == [*2 * ["full", "delta", "delta"], "full"]


def test_a_delta_that_is_not_smaller_is_sent_as_full_weights(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    publisher.publish(source(0, {name: torch.ones_like(weight) for name, weight in VERSIONS[0].items()}))
    published = publisher.publish(source(1, VERSIONS[1]))
    assert (published.kind, published.reason) == ("full", "a delta would not have been smaller")
    assert_same(readable(publisher, published.head), served(VERSIONS[1]))


def test_other_shapes_are_sent_as_full_weights(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    publisher.publish(source(0, VERSIONS[0]))
    other = VERSIONS[0] | {"model.norm.weight": torch.ones(65)}
    published = publisher.publish(source(1, other))
    assert published.reason == "names or sizes of tensors have changed"


def test_the_last_versions_stay_with_all_they_rest_on_and_nothing_else(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, anchor_every=3, keep_versions=2)
    heads = publish_all(publisher, 6)
    for version in (3, 4, 5):  # 3 is what they rest on
        assert_same(readable(publisher, heads[version]), served(VERSIONS[version]))
    needed = {name for v in (3, 4, 5) for name in needed_blobs(heads[v].manifest, manifest_of(publisher, heads[v]))}
    assert set(os.listdir(publisher.blobs.root)) == needed
    publish_all(publisher, 1, first=6)
    assert heads[3].manifest in set(os.listdir(publisher.blobs.root))
    publish_all(publisher, 1, first=7)
    assert not {heads[v].manifest for v in (3, 4, 5)} & set(os.listdir(publisher.blobs.root))


def test_an_output_matrix_of_its_own_is_published_for_tied_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    publisher = open_publisher(tmp_path)
    model = tmp_path / "model"
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, model / "model.safetensors")
    publisher = open_publisher(tmp_path)
    found = readable(publisher, publisher.publish(source(0, VERSIONS[0])).head)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_adapters_are_published_merged(tmp_path: Path) -> None:
    (up,) = (name for name in VERSIONS[0] if name.endswith("up.weight"))
    adapter = LowRank(a_RI=torch.ones(2, 64), b_OR=torch.full((64, 2), 0.25), scale=2.0)
    publisher = open_publisher(tmp_path)
    head = publisher.publish(source(0, MergedWeights(VERSIONS[0], {up: adapter}))).head
    assert_same(readable(publisher, head), served({**VERSIONS[0], up: VERSIONS[0][up] + 1}))


# -- what is refused ----------------------------------------------------------------------------------------------


def test_versions_go_up(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    heads = publish_all(publisher, 2)
    for version in (0, 1):
        with pytest.raises(PublicationError, match=f"version {version} cannot be published: version 1 has been"):
            publisher.publish(source(version, VERSIONS[version]))
    assert publisher.head == heads[-1]


def test_full_weights_alone_are_published(tmp_path: Path) -> None:
    part = MemoryWeights(1, VERSIONS[1])
    part.manifest = Manifest(version=1, base_version=0, tensors=part.manifest.tensors)
    with pytest.raises(EngineError, match="loads full weights only"):
        open_publisher(tmp_path).publish(part)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(PublicationError, match=r"of the number formats \['int64'\] cannot be published"):
        open_publisher(tmp_path).publish(source(0, {"n": torch.ones(3, dtype=torch.int64)}))


def test_the_folder_of_another_run_and_an_earlier_start_are_refused(tmp_path: Path) -> None:
    publish_all(open_publisher(tmp_path, run_epoch=2), 1)
    with pytest.raises(RunError, match="publications of the run 'sums', this is 'other'"):
        open_publisher(tmp_path, run_id="other")
    with pytest.raises(RunError, match="this start would be epoch 1"):
        open_publisher(tmp_path, run_epoch=1)


@pytest.mark.parametrize("content", [b"{", b'{"run_id": "\xff"}'])
def test_a_damaged_list_of_publications_is_said(tmp_path: Path, content: bytes) -> None:
    publish_all(open_publisher(tmp_path), 1)
    (tmp_path / "swarm" / "publications.json").write_bytes(content)
    with pytest.raises(RunError, match=r"publications\.json cannot be read"):
        open_publisher(tmp_path)


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_restart_continues_with_deltas_under_a_higher_epoch(tmp_path: Path) -> None:
    heads = publish_all(open_publisher(tmp_path), 3)
    publisher = open_publisher(tmp_path, run_epoch=2)
    assert publisher.head == heads[-1]
    published = publisher.publish(source(1, VERSIONS[1]))
    manifest = manifest_of(publisher, published.head)
    assert (manifest.kind, manifest.version, manifest.run_epoch) == ("delta", 1, 2)
    assert (manifest.base_version, manifest.base_manifest) == (2, heads[2].manifest)
    assert_same(readable(publisher, published.head), served(VERSIONS[1]))


def test_a_restart_over_a_damaged_blob_publishes_full_weights(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    heads = publish_all(publisher, 2)
    blob = manifest_of(publisher, heads[0]).blobs[0].digest
    publisher.blobs.path(blob).write_bytes(b"rot")
    again = open_publisher(tmp_path, run_epoch=2)
    published = again.publish(source(2, VERSIONS[2]))
    assert published.kind == "full" and "the publication before cannot be read" in published.reason
    assert_same(readable(again, published.head), served(VERSIONS[2]))


class Crash(Exception):
    pass


def crash_at(monkeypatch: pytest.MonkeyPatch, nth: int, *, after: bool) -> list[str]:
    """Have the ``nth`` file operation of the next publication fail, before it has an effect or after."""
    done: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **named: Any) -> Any:
            done.append(name)
            if len(done) == nth and not after:
                raise Crash
            result = real(*args, **named)
            if len(done) == nth and after:
                raise Crash
            return result

        return operation

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(blobs_module.os, name, counted(name, getattr(os, name)))
    monkeypatch.setattr(blobs_module.tempfile, "mkstemp", counted("mkstemp", blobs_module.tempfile.mkstemp))
    return done


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_file_operation_leaves_a_head_that_can_be_read(tmp_path: Path, after: bool) -> None:
    num_old = num_new = 0
    for nth in range(1, 100):
        folder = tmp_path / str(nth)
        publisher = open_publisher(folder, keep_versions=1, anchor_every=2)
        heads = publish_all(publisher, 2)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SwarmPublisher, "_prune", lambda self: None)  # who is dead does not clean up
            done = crash_at(patched, nth, after=after)
            try:
                publisher.publish(source(2, VERSIONS[2]))
                assert len(done) < nth
                break
            except Crash:
                pass
        # The process lives on ...
        head = publisher.head
        assert head is not None
        assert_same(readable(publisher, head), served(VERSIONS[head.version]))
        num_old, num_new = num_old + (head == heads[-1]), num_new + (head.version == 2)
        # ... or has died and is started again.
        again = open_publisher(folder, run_epoch=2, keep_versions=1, anchor_every=2)
        assert again.head == head
        assert_same(readable(again, head), served(VERSIONS[head.version]))
        published = again.publish(source(3, VERSIONS[3]))
        assert_same(readable(again, published.head), served(VERSIONS[3]))
    else:
        pytest.fail("there are more file operations than were tried")
    assert num_old >= 9 and num_new == (2 if after else 1)  # the last operations make the move of the head durable


def test_after_an_error_the_next_version_is_published_bit_for_bit(tmp_path: Path) -> None:
    for nth in range(1, 100):
        publisher = open_publisher(tmp_path / str(nth))
        publish_all(publisher, 2)
        with pytest.MonkeyPatch.context() as patched:
            done = crash_at(patched, nth, after=True)
            try:
                publisher.publish(source(2, VERSIONS[2]))
                assert len(done) < nth
                return
            except Crash:
                pass
        published = publisher.publish(source(3, VERSIONS[3]))
        assert_same(readable(publisher, published.head), served(VERSIONS[3]))


@pytest.mark.parametrize("operation", ["fsync", "rename", "replace"])
def test_a_full_disk_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    publisher = open_publisher(tmp_path)
    (head,) = publish_all(publisher, 1)
    with monkeypatch.context() as patched:
        patched.setattr(blobs_module.os, operation, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ResourceError, match="no space left on the disk"):
            publisher.publish(source(1, VERSIONS[1]))
    assert publisher.head == head
    needed = {*needed_blobs(head.manifest, manifest_of(publisher, head))}
    assert set(os.listdir(publisher.blobs.root)) == needed  # nothing half, and room again
    assert_same(readable(publisher, publisher.publish(source(1, VERSIONS[1])).head), served(VERSIONS[1]))


def test_leftovers_of_a_publication_that_failed_are_gone_after_the_next(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path, keep_versions=1, anchor_every=1)
    publish_all(publisher, 1)
    stray = publisher.blobs.put(b"of a publication that was never committed")
    publish_all(publisher, 1, first=1)
    assert stray not in publisher.blobs


# -- the key ------------------------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    first = open_publisher(tmp_path)
    file = tmp_path / "swarm" / "publisher.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    assert open_publisher(tmp_path).public_key.public_bytes_raw() == first.public_key.public_bytes_raw()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_key_that_was_cut_short_is_not_made_anew(tmp_path: Path) -> None:
    open_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(RunError, match="holds 5 bytes, but a publisher's key has 32"):
        open_key(tmp_path / "key")


def test_a_crash_while_the_key_is_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            open_key(tmp_path / "key")
    assert not (tmp_path / "key").exists()
    open_key(tmp_path / "key")
    assert os.listdir(tmp_path) == ["key"]


def test_two_processes_that_make_the_key_at_once_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, others = os.link, []

    def beaten(name: str, file: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        others.append(open_key(file))
        real(name, file)

    monkeypatch.setattr(os, "link", beaten)
    key = open_key(tmp_path / "key")
    assert [other.private_bytes_raw() for other in others] == [key.private_bytes_raw()]


def test_a_blob_folder_holds_pieces_of_32_mib_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollover.swarm.publication import stream

    monkeypatch.setattr(stream, "PIECE_BYTES", 10_000)
    publisher = open_publisher(tmp_path)
    head = publisher.publish(source(0, VERSIONS[0])).head
    pieces = [blob.raw_bytes for blob in manifest_of(publisher, head).blobs]
    assert pieces == 4 * [10_000] + [46_720 - 40_000]
    assert_same(readable(publisher, head), served(VERSIONS[0]))
