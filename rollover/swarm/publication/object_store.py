"""Copies of the blobs in an object store, from which workers fetch without a word to the trainer.

consumes:  the blobs that the publisher has written and still needs
produces:  objects ``{url}/{digest}`` in S3, Google Cloud Storage, Azure or a folder, by `obstore`
waits for: the store, up to a minute for each object

What it keeps true: an object is put only after its blob is whole on disk, and is never changed; only objects that this
run has put are deleted; a login comes from the environment alone and is in no message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from rollover.errors import ConfigError, EngineError, ResourceError, RolloverError, RunError, require
from rollover.privacy import redacted_text
from rollover.swarm.publication.blobs import BlobFolder, replace_file

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOGIN = "the login is taken from the environment: "
_REMEDIES = {
    "s3": f"{_LOGIN}AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT where it is not Amazon's)",
    "gs": f"{_LOGIN}GOOGLE_APPLICATION_CREDENTIALS",
    "az": f"{_LOGIN}AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "name a folder that this user can create, or write into",
}
"""Remedies for a store that cannot be used, by scheme."""
_PROBE = "rollover-was-here"
_MAX_PARALLEL, _RETRIES = 4, 4
_HEADERS = {"Content-Type": "application/octet-stream", "Cache-Control": "public, max-age=31536000, immutable"}
_MAX_SAID = 300


class _Uploaded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The objects of this run: ``whole`` are there, ``begun`` may be."""

    url: str
    whole: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()


class ObjectStore:
    """The objects below ``url``.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix`` or ``file:///folder``.

    Example: ``ObjectStore("s3://weights/run-7").put("9c1e...", file)``
    """

    def __init__(self, url: str) -> None:
        require("obstore", purpose=f"engine.blob_store = {url!r}")
        self.url = url
        self._scheme = urlsplit(url).scheme
        self._store: Any = self._asked(lambda: _open(url))

    def check(self, *, writes: bool) -> None:
        """Find out whether the store can be used; an object is put and deleted where it ``writes``, else one listed.

        Raises ``ConfigError`` with what the store says.
        """
        import obstore

        def ask() -> None:
            if writes:
                obstore.put(self._store, _PROBE, b"")
                obstore.delete(self._store, _PROBE)
            else:
                next(iter(obstore.list(self._store, chunk_size=1)), None)

        self._asked(ask)

    def put(self, name: str, file: Path) -> None:
        """Store a file as an object; it is there as a whole or not at all. Raises ``ConfigError``."""
        import obstore

        headers = None if self._scheme == "file" else _HEADERS
        self._asked(lambda: obstore.put(self._store, name, file, attributes=headers, use_multipart=False))

    def delete(self, name: str) -> None:
        """Delete an object, if it is there. Raises ``ConfigError``."""
        import obstore

        def ask() -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        self._asked(ask)

    def _asked(self, ask: Callable[[], T]) -> T:
        from obstore.exceptions import BaseError

        try:
            return ask()
        except (BaseError, OSError, NotImplementedError) as e:
            raise self._refusal(e) from None

    def _refusal(self, error: Exception) -> ConfigError:
        said = redacted_text(" ".join(str(error).partition("Debug source:")[0].split()))[:_MAX_SAID]
        return ConfigError(f"engine.blob_store = {self.url!r} cannot be used: {said}; {_REMEDIES[self._scheme]}")


class BlobMirror:
    """Keeps an object store at the blobs that workers may ask for.

    Args:
        file: where the names of this run's objects are kept.

    Example: ``mirror.hold(needed)`` before the head moves, ``mirror.keep(needed)`` after old blobs were deleted.
    """

    def __init__(self, store: ObjectStore, blobs: BlobFolder, file: Path) -> None:
        self._store, self._blobs, self._file = store, blobs, file
        self._uploaded = self._read()

    def hold(self, digests: Collection[str]) -> None:
        """Put the blobs that are not there yet. Raises ``EngineError`` when one could not be put; others may have
        been."""
        wanted = [name for name in sorted(digests) if name not in self._uploaded.whole and name in self._blobs]
        if not wanted:
            return
        self._note(begun={*self._uploaded.begun, *wanted})
        done: list[str] = []

        def put(name: str) -> None:
            self._store.put(name, self._blobs.path(name))
            done.append(name)

        try:
            self._each(put, wanted)
        finally:
            self._note(
                whole={*self._uploaded.whole, *done}, begun={name for name in self._uploaded.begun if name not in done}
            )

    def keep(self, digests: Collection[str]) -> None:
        """Delete this run's objects but these. What cannot be deleted now is deleted after the next publication."""
        old = [n for n in (*self._uploaded.whole, *self._uploaded.begun) if n not in digests]
        if not old:
            return
        gone: set[str] = set()

        def delete(name: str) -> None:
            self._store.delete(name)
            gone.add(name)

        try:
            self._each(delete, old)
        except RolloverError as e:
            logger.warning("old weights could not be deleted: %s", e)
        finally:
            with suppress(ResourceError):  # what is noted and gone is deleted once more
                self._note(
                    whole={n for n in self._uploaded.whole if n not in gone},
                    begun={n for n in self._uploaded.begun if n not in gone},
                )

    def _each(self, work: Callable[[str], None], names: Collection[str]) -> None:
        """Do the work for a few names at a time, and stop at the first failure."""
        with ThreadPoolExecutor(_MAX_PARALLEL) as pool:
            under_way = [pool.submit(work, name) for name in names]
            try:
                for one in under_way:
                    one.result()
            except RolloverError as e:
                raise EngineError(str(e)) from None
            finally:
                for one in under_way:
                    one.cancel()

    def _read(self) -> _Uploaded:
        try:
            uploaded = msgspec.json.decode(self._file.read_bytes(), type=_Uploaded)
        except FileNotFoundError:
            return _Uploaded(url=self._store.url)
        except msgspec.DecodeError as e:
            raise RunError(f"{self._file} cannot be read: {e}; delete it: its run's objects then stay") from None
        if uploaded.url != self._store.url:
            return _Uploaded(url=self._store.url)
        return uploaded

    def _note(self, *, whole: Collection[str] | None = None, begun: Collection[str] | None = None) -> None:
        self._uploaded = _Uploaded(
            url=self._store.url,
            whole=self._uploaded.whole if whole is None else tuple(sorted(whole)),
            begun=self._uploaded.begun if begun is None else tuple(sorted(begun)),
        )
        replace_file(self._file, msgspec.json.encode(self._uploaded))


def _open(url: str) -> Any:
    from obstore.store import LocalStore, from_url

    parts = urlsplit(url)
    if parts.scheme == "file":
        return LocalStore(unquote(parts.path), mkdir=True)
    return from_url(
        url,
        client_options={"timeout": "60s", "connect_timeout": "10s", "allow_http": True},
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=60)},
    )
