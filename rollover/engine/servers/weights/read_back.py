"""The digests of what a server holds are compared with what it was given.

A label says what a server was told to hold. A server that computes digests of its tensors says what it does hold, and
loads that have left a tensor as it was are found out. How a server lays its tensors out is found by trying: joined
(queries, keys and values; gate and up), with rows of zeros after them, or cut over workers. A tensor whose digest has
once been that of a layout must have it after each later load. Of the others (packed, quantised, or digests of another
kind) it is known that some of them must change where the weights did, and none where they did not.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.errors import EngineError, EngineTimeout, ModelError
from rollover.hf.raw_tensors import RawTensor, read_raw_tensors
from rollover.hf.weights import EMBEDDING, HEAD

logger = logging.getLogger(__name__)
_MAX_CHECKED_BYTES = 1 << 30
"""Models up to this size are confirmed at every load, larger ones at the first alone, unless the config says
otherwise: a server hashes a gigabyte in about a second, in which it decodes nothing."""
_HASHED_AT_ONCE = 1 << 20
"""Bytes that take less than a millisecond, for which no thread is needed."""
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters of a checkpoint by the part of a name that stands for them all in a server."""
_NO_BYTES = hashlib.sha256(b"").hexdigest()
"""Digest of a tensor whose content the server has packed away elsewhere."""
_PADDED_TO = 64
"""Servers pad a vocabulary to a multiple of this."""
_MIN_DIGITS = 16
"""Digests are compared with the first hexadecimal digits of a SHA-256: some servers send no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor of a server: its name there, and which part of it, if it is cut over ``num_parts`` workers.

    Example: ``HeldTensor(name="model.layers.0.self_attn.qkv_proj.weight", part=1, num_parts=2)``
    """

    name: str
    part: int = 0
    num_parts: int = 1
    replica: str = ""
    """Tells workers apart that hold the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Counts how much of a server's weights its digests speak for.

    Example: ``Confirmation(num_exact=12, num_followed=0, num_silent=1)``: twelve tensors are those of the folder to the
    bit, and one cannot be compared.
    """

    num_exact: int
    """Tensors that equal the folder's, bit for bit."""
    num_followed: int
    """Tensors of which it is known whether they have changed."""
    num_silent: int
    """Tensors of which nothing is known."""

    @property
    def says_nothing(self) -> bool:
        return not self.num_exact and not self.num_followed


Parts = Iterable[NDArray[np.uint8]]
_Layout = Callable[[list[RawTensor], HeldTensor], Parts | None]


class FolderDigests:
    """Digests of the tensors of the folder that was loaded last, in the layouts that servers have been found to use.
    One for all servers of a pool; used by several threads.

    Example: ``FolderDigests().of(folder, HeldTensor(name="model.norm.weight"), "whole")`` is the SHA-256 of the bytes
    of that tensor in hexadecimal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._tensors: Mapping[str, RawTensor] = {}
        self._digests: dict[tuple[str, int, int, str], str | None] = {}

    def of(self, folder: Path, place: HeldTensor, layout: str) -> str | None:
        """Return the digest of what stands at ``place`` in a layout; ``None`` if the folder holds no such tensor or
        it cannot be laid out so. Raises ``ModelError`` when the folder cannot be read."""
        with self._lock:
            if folder != self._folder:
                self._tensors, self._digests, self._folder = read_raw_tensors(folder), {}, folder
            key = place.name, place.part, place.num_parts, layout
            if key not in self._digests:
                self._digests[key] = self._compute(place, layout)
            return self._digests[key]

    def _compute(self, place: HeldTensor, layout: str) -> str | None:
        sources = _sources(place.name, self._tensors)
        parts = LAYOUTS[layout](sources, place) if sources else None
        if parts is None:
            return None
        digest = hashlib.sha256()
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class ReadBack:
    """Compares one server's digests with the folders that it was given, load by load. Synchronous; hashing takes about
    a second per gigabyte.

    Example: ``read_back.check(folder, {HeldTensor(name="model.norm.weight"): "9c1e..."}, server="http://one")``
    """

    def __init__(self, folders: FolderDigests) -> None:
        self._folders = folders
        self._layouts: dict[HeldTensor, list[str]] = {}
        """The layouts that a tensor has had at every load: mostly one; zeros look alike in several."""
        self._before: dict[HeldTensor, tuple[str, str]] = {}
        """Digests of the last confirmed load, for tensors of unknown layout: the folder's and the server's."""

    def check(self, folder: Path, found: Mapping[HeldTensor, str], *, server: str) -> Confirmation:
        """Return how much is confirmed. Raises ``EngineError`` when the server holds something else than ``folder``
        does."""
        wrong, followed, num_exact, num_silent = list[str](), dict[HeldTensor, tuple[str, str]](), 0, 0
        for place, digest in found.items():
            given = self._folders.of(folder, place, "whole")
            if given is None or _is_begin(digest, _NO_BYTES):
                num_silent += 1
            elif layouts := self._matching(folder, place, digest):
                self._layouts[place] = layouts
                num_exact += 1
            elif place in self._layouts:
                wrong.append(place.name)
            else:
                followed[place] = given, digest
        if different := wrong or self._out_of_step(followed):
            raise EngineError(
                f"{server} was given {folder} and holds other weights: {len(different)} of"
                f" {num_exact + len(wrong) + len(followed)} tensors that it reports a digest of are not those of the"
                f" folder, the first is {min(different)[:120]!r}"
            )
        self._before |= followed
        return Confirmation(num_exact=num_exact, num_followed=len(followed), num_silent=num_silent)

    def _out_of_step(self, followed: Mapping[HeldTensor, tuple[str, str]]) -> list[str]:
        """Return the tensors that have changed where the folder's have not; or all that have not where the folder's
        have, when none has. (Of single ones that is not known: coarser formats round small changes away.)"""
        known = [(place, self._before[place], now) for place, now in followed.items() if place in self._before]
        if moved := [p.name for p, before, now in known if before[0] == now[0] and before[1] != now[1]]:
            return moved
        changed = [(p.name, before[1] == now[1]) for p, before, now in known if before[0] != now[0]]
        return [name for name, _ in changed] if all(is_same for _, is_same in changed) else []

    def _matching(self, folder: Path, place: HeldTensor, digest: str) -> list[str]:
        """Return the possible layouts in which the folder's tensor has this digest."""
        possible = self._layouts.get(place) or (_OF_ONE if place.num_parts == 1 else LAYOUTS)
        return [layout for layout in possible if _is_begin(digest, self._folders.of(folder, place, layout))]


def _is_begin(digest: str, of: str | None) -> bool:
    return of is not None and len(digest) >= _MIN_DIGITS and of.startswith(digest)


def _sources(name: str, tensors: Mapping[str, RawTensor]) -> list[RawTensor]:
    """Return the tensors of a checkpoint of which a server makes the one of that name; none when they are unknown."""
    if name in tensors:
        return [tensors[name]]
    if name == HEAD and EMBEDDING in tensors:
        return [tensors[EMBEDDING]]
    for joined, parts in _JOINED.items():
        names = [name.replace(f".{joined}.", f".{part}.") for part in parts]
        if name not in names and all(part in tensors for part in names):
            return [tensors[part] for part in names]
    return []


def _whole(sources: list[RawTensor], place: HeldTensor) -> Parts | None:
    return [tensor.content for tensor in sources]


def _padded(sources: list[RawTensor], place: HeldTensor) -> Parts | None:
    (tensor, *others) = sources
    missing = -tensor.shape[0] % _PADDED_TO if len(tensor.shape) == 2 and tensor.content.size else 0
    if others or not missing or (tensor.shape[0] + missing) % place.num_parts:
        return None
    rows = _rows(tensor)
    return [np.split(np.pad(rows, ((0, missing), (0, 0))), place.num_parts)[place.part]]


def _cut_by_rows(sources: list[RawTensor], place: HeldTensor) -> Parts | None:
    if any(not tensor.content.size or not tensor.shape or tensor.shape[0] % place.num_parts for tensor in sources):
        return None
    return [np.split(_rows(tensor), place.num_parts)[place.part] for tensor in sources]


def _cut_by_columns(sources: list[RawTensor], place: HeldTensor) -> Parts | None:
    if any(
        not tensor.content.size or len(tensor.shape) != 2 or tensor.shape[1] % place.num_parts for tensor in sources
    ):
        return None
    return [np.split(_rows(tensor), place.num_parts, axis=1)[place.part] for tensor in sources]


def _rows(tensor: RawTensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor that has some, by its first dimension."""
    return tensor.content.reshape(tensor.shape[0], -1)


LAYOUTS: Mapping[str, _Layout] = {
    "whole": _whole,
    "padded": _padded,
    "cut by rows": _cut_by_rows,
    "cut by columns": _cut_by_columns,
}
_OF_ONE = ("whole", "padded")


AskDigests = Callable[[Path], Awaitable[Mapping[HeldTensor, str]]]
"""Asks a server that has loaded a folder for its digests. Raises ``EngineError`` when it gives none."""


class LoadConfirmation:
    """Confirms the loads of one server.

    Args:
        server: its name in messages.
        folders: shared by the servers of a pool.

    Example: ``await confirmation.of(folder)`` returns when the server holds what ``folder`` does, as far as it tells.
    """

    def __init__(
        self, server: str, config: ServerConfig, model: ModelFolder, folders: FolderDigests, ask: AskDigests
    ) -> None:
        self._server, self._ask, self._read_back = server, ask, ReadBack(folders)
        self._num_bytes = sum(info.num_bytes for info in model.weights.values())
        self._is_once = config.read_back == "auto" and self._num_bytes > _MAX_CHECKED_BYTES
        self._has_digests = config.read_back != "never"
        """Until the server says that it has none."""
        self._was_confirmed = False

    async def of(self, folder: Path) -> None:
        """Raise ``EngineError`` when the server holds other weights than ``folder``."""
        if not self._has_digests or (self._is_once and self._was_confirmed):
            return
        try:
            found = await self._ask(folder)
        except EngineTimeout:
            raise
        except NoDigests as e:  # an older release, or weights that it cannot hash
            self._has_digests = False
            self._say(f"it computes no digests of them ({e})")
            return
        if self._num_bytes <= _HASHED_AT_ONCE:
            confirmed = self._compare(folder, found)
        else:
            confirmed = await asyncio.to_thread(self._compare, folder, found)
        if confirmed.says_nothing and not self._was_confirmed:
            self._say("it reports digests of none of the folder's tensors")
        self._was_confirmed = True

    def _compare(self, folder: Path, found: Mapping[HeldTensor, str]) -> Confirmation:
        try:
            return self._read_back.check(folder, found, server=self._server)
        except ModelError as e:
            raise EngineError(f"{self._server}: its weights cannot be compared with those it was given: {e}") from e

    def _say(self, why: str) -> None:
        logger.warning("%s cannot show which weights it holds: %s; only the log-prob check can tell", self._server, why)


class NoDigests(EngineError):
    """A server that computes no digests of its weights."""
