"""The list of publications that can be fetched: one small file, replaced at once; its last entry is the head.

Invariants: of each publication that is kept, all that it rests on is kept too, back to full weights; ages (an
epoch of the run and a version) go up from entry to entry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollover.errors import RunError
from rollover.swarm.publication.blobs import replace_file
from rollover.swarm.publication.manifest import PublicationError, PublicationManifest
from rollover.swarm.wire.messages import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One publication as it was made."""

    version: int
    manifest: str
    kind: str
    """"full" or "delta"."""
    reason: str
    """The reason for this kind."""
    wire_bytes: int
    """Number of bytes fetched by a worker that has the previous version."""
    full_bytes: int
    """The size of all tensors, uncompressed."""
    elapsed_s: float
    """Time that writing it took."""
    time_s: float = field(default_factory=time.time)
    """Seconds since 1970, when it could be fetched."""

    @property
    def head(self) -> Head:
        return Head(version=self.version, manifest=self.manifest)


class KeptPublication(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A publication that can be fetched."""

    run_epoch: int
    version: int
    manifest: str
    kind: str
    wire_bytes: int


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: str
    kept: tuple[KeptPublication, ...]


class PublicationLog:
    """The kept publications of a run, in ``file``."""

    def __init__(self, file: Path, *, run_id: str, keep_versions: int) -> None:
        self._file, self._run_id, self._keep_versions = file, run_id, keep_versions
        self.kept: tuple[KeptPublication, ...] = ()
        self.read()

    @property
    def head(self) -> Head | None:
        return Head(version=self.kept[-1].version, manifest=self.kept[-1].manifest) if self.kept else None

    @property
    def chain(self) -> tuple[KeptPublication, ...]:
        """Return the publications that make the head: full weights, deltas, and the head itself."""
        return self.kept[_anchor(self.kept, len(self.kept) - 1) :]

    def read(self) -> None:
        """Take what is on disk. Raises ``RunError`` when that is damaged or another run's."""
        try:
            state = msgspec.json.decode(self._file.read_bytes(), type=_State)
        except FileNotFoundError:
            self.kept = ()
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RunError(f"{self._file} cannot be read: {error}; delete it to start with full weights") from None
        if state.run_id != self._run_id:
            raise RunError(f"{self._file} lists publications of the run {state.run_id!r}, this is {self._run_id!r}")
        if state.kept and state.kept[0].kind != "full":
            raise RunError(f"{self._file} begins with a delta; delete it to start with full weights")
        self.kept = state.kept

    def move_head(self, manifest: PublicationManifest, digest: str) -> Head:
        """Make a publication the head, durably, and forget publications that are no longer needed."""
        newest = KeptPublication(
            run_epoch=manifest.run_epoch,
            version=manifest.version,
            manifest=digest,
            kind=manifest.kind,
            wire_bytes=manifest.wire_bytes,
        )
        kept = (*self.kept, newest)
        kept = kept[_anchor(kept, max(0, len(kept) - self._keep_versions)) :]
        state = _State(run_id=self._run_id, kept=kept)
        replace_file(self._file, msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        self.kept = kept
        return Head(version=newest.version, manifest=newest.manifest)

    def refuse_regress(self, run_epoch: int, version: int | None = None) -> None:
        """Raise unless a publication of this age would be the newest; ``RunError`` when its epoch alone decides."""
        if not self.kept:
            return
        newest = self.kept[-1]
        if run_epoch < newest.run_epoch:
            raise RunError(
                f"epoch {newest.run_epoch} of the run {self._run_id!r} is listed in {self._file};"
                f" this start would be epoch {run_epoch}, which workers would refuse as outdated"
            )
        if version is not None and (run_epoch, version) <= (newest.run_epoch, newest.version):
            raise PublicationError(
                f"version {version} cannot be published: version {newest.version} has been published,"
                " and versions only increase"
            )


def _anchor(kept: tuple[KeptPublication, ...], index: int) -> int:
    """Return the index of the full weights on which the publication at ``index`` rests."""
    return max(i for i in range(index + 1) if kept[i].kind == "full")
