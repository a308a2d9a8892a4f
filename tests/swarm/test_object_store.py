"""An object store has what workers are told of before they are told, and nothing of the run that is no longer needed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollover.cli import main
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.blob_places import blob_urls, check_blobs
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.fetch import WeightFetcher
from rollover.swarm.publication.manifest import needed_blobs, open_manifest
from rollover.swarm.publication.object_store import BlobMirror, ObjectStore
from rollover.swarm.publication.publisher import SwarmPublisher
from tests.swarm.nginx_kit import Nginx, free_port, needs_nginx, running
from tests.swarm.s3_kit import BUCKET, SECRET, Bucket, s3
from tests.swarm.weights_kit import assert_same, open_publisher, served, source, versions

VERSIONS = versions(9)
URL = f"s3://{BUCKET}/runs/7"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with s3() as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("rollover.swarm.publication.object_store._RETRIES", 0)
        yield made


def publisher(folder: Path, url: str = URL, **options: Any) -> SwarmPublisher:
    (folder / "swarm").mkdir(exist_ok=True)
    mirror = BlobMirror(ObjectStore(url), BlobFolder(folder / "swarm" / "blobs"), folder / "swarm" / "uploaded.json")
    return open_publisher(folder, mirror=mirror, **options)


def local(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "swarm" / "blobs").iterdir()}


def stored(bucket: Bucket) -> dict[str, bytes]:
    return {key.removeprefix("runs/7/"): content for key, content in bucket.objects.items()}


def publish(publisher: SwarmPublisher, *numbers: int) -> None:
    for n in numbers:
        publisher.publish(source(n, VERSIONS[n]))


def assert_complete(publisher: SwarmPublisher, there: dict[str, bytes]) -> None:
    """The head and all that it rests on is there."""
    for kept in publisher._log.kept:
        manifest = open_manifest(there[kept.manifest], publisher.public_key)
        assert {*needed_blobs(kept.manifest, manifest)} <= there.keys()


def test_what_is_published_is_there_before_the_head_moves_and_goes_when_nobody_needs_it(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publisher(tmp_path, anchor_every=3, keep_versions=2)
    move, seen = made._log.move_head, []

    def watched(manifest: Any, digest: str) -> Any:
        assert {*needed_blobs(digest, manifest)} <= stored(bucket).keys()
        seen.append(manifest.version)
        return move(manifest, digest)

    monkeypatch.setattr(made._log, "move_head", watched)
    for n in range(9):
        publish(made, n)
        assert stored(bucket) == local(tmp_path)
        assert_complete(made, stored(bucket))
    assert seen == [*range(9)]
    kinds = {(h["Content-Type"], h["Cache-Control"]) for h in bucket.headers.values()}
    assert kinds == {("application/octet-stream", "public, max-age=31536000, immutable")}


def test_each_blob_is_put_once(tmp_path: Path, bucket: Bucket) -> None:
    publish(publisher(tmp_path), 0, 1, 2)
    publish(publisher(tmp_path, run_epoch=2), 3)
    puts = [key for method, key in bucket.asked if method == "PUT"]
    assert len(puts) == len({*puts}) == len(bucket.objects)


def test_what_others_have_put_there_stays(tmp_path: Path, bucket: Bucket) -> None:
    bucket.objects |= {"runs/7/notes.txt": b"mine", f"runs/7/{'0' * 64}": b"another run's", "x": b""}
    publish(publisher(tmp_path, anchor_every=1, keep_versions=1), 0, 1, 2)
    assert {"runs/7/notes.txt", f"runs/7/{'0' * 64}", "x"} <= bucket.objects.keys()


def failing(status: int, code: str, *, after: int, method: str = "PUT") -> Callable[[str, str], Any]:
    left = [after]

    def fault(asked: str, key: str) -> tuple[int, str] | None:
        if asked == method:
            left[0] -= 1
        return (status, code) if asked == method and left[0] < 0 else None

    return fault


@pytest.mark.parametrize("after", [0, 1])
def test_a_store_that_fails_stops_no_run_and_gets_later_what_it_lacks(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    made = publisher(tmp_path)
    publish(made, 0)
    bucket.fault = failing(503, "SlowDown", after=after)
    with caplog.at_level(logging.WARNING):
        publish(made, 1)
    (said,) = caplog.messages
    assert said.startswith("version 1 was not copied; workers fetch it from the trainer: engine.blob_store = 's3://")
    assert made.head is not None and made.head.version == 1
    bucket.fault = None
    publish(made, 2)
    assert stored(bucket) == local(tmp_path)


@pytest.mark.parametrize("after", range(5))
def test_a_trainer_that_is_killed_while_it_copies_leaves_nothing_behind(
    tmp_path: Path, bucket: Bucket, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    made = publisher(tmp_path, anchor_every=1, keep_versions=1)
    publish(made, 0)
    put, left = ObjectStore.put, [after]

    def until(self: ObjectStore, name: str, file: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        put(self, name, file)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", until)
        patched.setattr(BlobMirror, "_note", only_first(BlobMirror._note))
        try:
            publish(made, 1)
        except Killed:
            assert made.head is not None and made.head.version == 0
    again = publisher(tmp_path, anchor_every=1, keep_versions=1, run_epoch=2)
    publish(again, 2)
    assert stored(bucket) == local(tmp_path)
    assert_complete(again, stored(bucket))


def only_first(note: Any) -> Any:
    """A killed process writes down what it is about to do, and no more."""
    called: list[int] = []

    def noted(self: BlobMirror, **changes: Any) -> None:
        if not called:
            note(self, **changes)
        called.append(1)

    return noted


def test_a_deletion_that_fails_is_made_good_later(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    made = publisher(tmp_path, anchor_every=1, keep_versions=1)
    bucket.fault = failing(500, "InternalError", after=0, method="DELETE")
    with caplog.at_level(logging.WARNING):
        publish(made, 0, 1)
    assert caplog.messages[0].startswith("old weights could not be deleted")
    assert len(stored(bucket)) > len(local(tmp_path))
    bucket.fault = None
    publish(made, 2)
    assert stored(bucket) == local(tmp_path)


def test_a_store_that_is_named_later_gets_what_there_is(tmp_path: Path, bucket: Bucket) -> None:
    publish(open_publisher(tmp_path), 0, 1)
    publish(publisher(tmp_path, run_epoch=2), 2)
    assert stored(bucket) == local(tmp_path)
    other = f"file://{tmp_path}/elsewhere"
    publish(publisher(tmp_path, other, run_epoch=3), 3)
    assert {p.name: p.read_bytes() for p in (tmp_path / "elsewhere").iterdir()} == local(tmp_path)


# -- what a user may have wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("changes", "url", "says"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong" * 8}, URL, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "AKIANOBODY"}, URL, "InvalidAccessKeyId"),
        ({}, "s3://nobodys/runs", "NoSuchBucket"),
        ({"AWS_ENDPOINT": "http://127.0.0.1:9"}, URL, "error sending request"),
    ],
)
def test_a_store_that_refuses_is_one_message_at_the_start(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, writes: bool, changes: dict[str, str], url: str, says: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        check_blobs(SwarmConfig(blob_store=url), writes=writes)
    said = str(refused.value)
    assert said.startswith(f"engine.blob_store = '{url}' cannot be used: ") and says in said
    assert "AWS_SECRET_ACCESS_KEY" in said and "\n" not in said
    assert SECRET not in said and "wrongwrong" not in said


def test_a_store_that_may_only_be_read_is_found_out_when_the_run_begins(bucket: Bucket) -> None:
    bucket.fault = lambda method, key: (403, "AccessDenied") if method == "PUT" else None
    assert check_blobs(SwarmConfig(blob_store=URL), writes=False)
    with pytest.raises(ConfigError, match="AccessDenied"):
        check_blobs(SwarmConfig(blob_store=URL), writes=True)


def test_a_good_store_is_left_as_it_was_and_described(bucket: Bucket) -> None:
    lines = check_blobs(SwarmConfig(blob_store=URL), writes=True)
    assert lines[0] == f"weights are copied to {URL}" and "name its URL in engine.blob_urls" in lines[1]
    assert len(check_blobs(SwarmConfig(blob_store=URL, blob_urls=("https://x/y",)), writes=False)) == 1
    assert not bucket.objects


def test_the_command_line_says_it_too(bucket: Bucket, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["train", "--engine.kind", "swarm", "--engine.listen", "127.0.0.1:0", "--engine.blob_store"]
    for more in (["--dry-run"], ["--run-dir", str(tmp_path / "run")]):
        assert main([*argv, "s3://nobodys/runs", *more]) == 2
        assert "error: engine.blob_store = 's3://nobodys/runs' cannot be used" in capsys.readouterr().err
    assert main([*argv, URL, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert f"# swarm: weights are copied to {URL}" in shown.out and SECRET not in shown.out + shown.err


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"engine\.blob_store = 'file:///.*/file/blobs' cannot be used: .*; name a folder"
    ):
        check_blobs(SwarmConfig(blob_store=f"file://{tmp_path}/file/blobs"), writes=True)


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/x", "https://bucket/x", "s3://bucket/x?sig=1", "file://x", "s3:"]
)
def test_what_is_no_store_is_refused_and_a_login_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="blob_store must look like 's3://bucket/prefix'"):
        SwarmConfig(blob_store=url)


def test_a_query_for_the_urls_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SwarmConfig(blob_urls=("https://a/b", "https://c"), blob_query_env="SAS")
    assert blob_urls(config, {"SAS": "?sv=1&sig=x"}) == ("https://a/b?sv=1&sig=x", "https://c?sv=1&sig=x")
    for environ in ({}, {"SAS": ""}, {"SAS": "a b"}):
        with pytest.raises(ConfigError, match="blob_query_env = 'SAS': that environment variable holds no query"):
            blob_urls(config, environ)
    with pytest.raises(ValueError, match="name of an environment variable, not the query itself"):
        SwarmConfig(blob_query_env="sv=1&sig=x")


# -- what workers find there ------------------------------------------------------------------------------------------

STATIC = """
daemon off; pid nginx.pid; error_log logs/error.log warn;
events {}
http {
    access_log off; sendfile on; default_type application/octet-stream;
    client_body_temp_path tmp/a; proxy_temp_path tmp/b; fastcgi_temp_path tmp/c; uwsgi_temp_path tmp/d; scgi_temp_path tmp/e;
    server { listen 127.0.0.1:PORT; location /weights/ { alias STORE/; } }
}
"""


@needs_nginx
def test_workers_fetch_from_a_folder_behind_a_static_server_and_the_trainer_is_asked_for_nothing(
    tmp_path: Path,
) -> None:
    store, folder, port = tmp_path / "store", tmp_path / "nginx", free_port()
    made = publisher(tmp_path, f"file://{store}", anchor_every=3)
    for name in ("logs", "tmp"):
        (folder / name).mkdir(parents=True)
    (folder / "nginx.conf").write_text(STATIC.replace("PORT", str(port)).replace("STORE", str(store)))

    async def law(url: str) -> None:
        downloads = partial(BlobDownloads, backoff_s=0.01)
        fetcher = WeightFetcher(tmp_path / "worker", made.public_key, run_id="sums", downloads=downloads)
        try:
            for n in range(6):
                head = made.publish(source(n, VERSIONS[n])).head
                fetched = await fetcher.fetch(head, [url, "http://127.0.0.1:9"], run_epoch=1, deadline_s=30)
                assert_same(dict(fetched.tensors()), served(VERSIONS[n]))
            assert fetcher._downloads.sources.estimate(url).success == 1
        finally:
            await fetcher.close()

    with running(Nginx(folder, port, f"http://127.0.0.1:{port}/weights")) as nginx:
        asyncio.run(law(nginx.url))
    noted = json.loads((tmp_path / "swarm" / "uploaded.json").read_text())
    assert {*noted["whole"]} == {path.name for path in store.iterdir()} == local(tmp_path).keys()
    assert not noted["begun"]
