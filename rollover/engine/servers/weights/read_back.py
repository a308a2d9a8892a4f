"""The digests of what a server holds are compared with what it was given.

A label says what a server was told to hold. A server that computes digests of its tensors says what it does hold, and
loads that have left a tensor as it was are found out. A server may join tensors (queries, keys and values; gate and
up) and pad a vocabulary with rows of zeros: a tensor that has once had such a digest must have it after each later
load. Of the others (cut over workers, packed, quantised, or digests of another kind) it is known that some of them must
change where the weights did, and none where they did not.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

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

HeldTensor = tuple[str, str]
"""A tensor of a server: the worker that holds it, and its name there."""


class FolderDigests:
    """Digests of the tensors of the folder that was loaded last. One for all servers of a pool; used by several
    threads.

    Example: ``FolderDigests().of(folder, "model.norm.weight")`` is the SHA-256 of the bytes of that tensor in
    hexadecimal, the only one in the tuple.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._tensors: Mapping[str, RawTensor] = {}
        self._digests: dict[str, tuple[str, ...]] = {}

    def of(self, folder: Path, name: str) -> tuple[str, ...]:
        """Return the digests that a server's tensor of this name may have, the one without padding first; none if the
        folder holds no such tensor. Raises ``ModelError`` when the folder cannot be read."""
        with self._lock:
            if folder != self._folder:
                self._tensors, self._digests, self._folder = read_raw_tensors(folder), {}, folder
            if name not in self._digests:
                self._digests[name] = _digests(_sources(name, self._tensors))
            return self._digests[name]


class ReadBack:
    """Compares one server's digests with the folders that it was given, load by load. Synchronous; hashing takes about
    a second per gigabyte.
    """

    def __init__(self, folders: FolderDigests) -> None:
        self._folders = folders
        self.exact: set[HeldTensor] = set()
        """The tensors that have been a folder's to the bit."""
        self._before: dict[HeldTensor, tuple[str, str]] = {}
        """Digests of the last confirmed load, for the other tensors: the folder's and the server's."""

    def check(self, folder: Path, found: Mapping[HeldTensor, str], *, server: str) -> int:
        """Return the number of tensors of which the digests say something. Raises ``EngineError`` when the server holds
        something else than ``folder`` does."""
        wrong, followed, num_exact = list[str](), dict[HeldTensor, tuple[str, str]](), 0
        for place, digest in found.items():
            given = self._folders.of(folder, place[1])
            if not given or _NO_BYTES.startswith(digest):
                continue
            if len(digest) >= _MIN_DIGITS and any(each.startswith(digest) for each in given):
                self.exact.add(place)
                num_exact += 1
            elif place in self.exact:
                wrong.append(place[1])
            else:
                followed[place] = given[0], digest
        num_told = num_exact + len(wrong) + len(followed)
        if different := wrong or self._out_of_step(followed):
            raise EngineError(
                f"{server} was given {folder} and holds other weights: {len(different)} of {num_told} tensors that it"
                f" reports a digest of are not those of the folder, the first is {min(different)[:120]!r}"
            )
        self._before |= followed
        return num_told

    def _out_of_step(self, followed: Mapping[HeldTensor, tuple[str, str]]) -> list[str]:
        """Return the tensors that have changed where the folder's have not; or all that have not where the folder's
        have, when none has. (Of single ones that is not known: coarser formats round small changes away.)"""
        known = [(place[1], self._before[place], now) for place, now in followed.items() if place in self._before]
        if moved := [name for name, before, now in known if before[0] == now[0] and before[1] != now[1]]:
            return moved
        changed = [(name, before[1] == now[1]) for name, before, now in known if before[0] != now[0]]
        return [name for name, _ in changed] if all(is_same for _, is_same in changed) else []


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


def _digests(sources: list[RawTensor]) -> tuple[str, ...]:
    if not sources:
        return ()
    digest, (shape, *_) = hashlib.sha256(), [tensor.shape for tensor in sources]
    for tensor in sources:
        digest.update(tensor.content.data)
    whole = digest.hexdigest()
    if len(sources) > 1 or len(shape) != 2 or not shape[0] % _PADDED_TO:
        return (whole,)
    digest.update(bytes(-shape[0] % _PADDED_TO * (sources[0].content.size // shape[0])))
    return whole, digest.hexdigest()


AskDigests = Callable[[Path], Awaitable[Mapping[HeldTensor, str]]]
"""Asks a server that has loaded a folder for its digests. Raises ``EngineError`` when it gives none."""


class LoadConfirmation:
    """Confirms the loads of one server.

    Args:
        server: its name in messages.
        folders: shared by the servers of a pool.
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
            num_told = self._compare(folder, found)
        else:
            num_told = await asyncio.to_thread(self._compare, folder, found)
        if not num_told and not self._was_confirmed:
            self._say("it reports digests of none of the folder's tensors")
        self._was_confirmed = True

    def _compare(self, folder: Path, found: Mapping[HeldTensor, str]) -> int:
        try:
            return self._read_back.check(folder, found, server=self._server)
        except ModelError as e:
            raise EngineError(f"{self._server}: its weights cannot be compared with those it was given: {e}") from e

    def _say(self, why: str) -> None:
        logger.warning("%s cannot show which weights it holds: %s; only the log-prob check can tell", self._server, why)


class NoDigests(EngineError):
    """A server that computes no digests of its weights."""
