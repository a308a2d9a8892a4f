"""A server is asked for the digests of what it holds, after each load or after the first one.

What it keeps true: a load counts only once the server's own digests agree with it, where it computes any; one that can
show nothing is named once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.read_back import Confirmation, FolderDigests, HeldTensor, ReadBack
from rollover.errors import EngineError, EngineTimeout, ModelError

logger = logging.getLogger(__name__)

_MAX_CHECKED_BYTES = 1 << 30
"""Models up to this size are confirmed at every load, larger ones at the first alone, unless the config says
otherwise: a server hashes a gigabyte in about a second, in which it decodes nothing."""
_HASHED_AT_ONCE = 1 << 20
"""Bytes that take less than a millisecond, for which no thread is needed."""

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
