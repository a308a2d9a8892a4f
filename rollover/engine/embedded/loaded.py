"""The weights of a decoder: full ones as they come, or the model that the engine began with and adapters beside it.

Adapters are merged within the engine, from the model's folder, which holds the base that they were trained beside: so
no second copy of it takes memory, and what is filled is to the bit what the trainer would have merged. Only matrices
that have an adapter, or have had one, are filled again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from rollover.engine.embedded.model import Slot
from rollover.engine.embedded.weights import differing, fill, load_weights
from rollover.errors import ModelError
from rollover.weights.adapters import AdapterSource, AppliedAdapters
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights

_ENGINE = "the embedded engine"


class LoadedWeights:
    """Fills the slots of a decoder, which stay the same until ``forget``.

    Args:
        slots: filled with ``initial`` at once.
        initial: full weights, the base of adapters.

    Example: ``load(slots, 7, AdapterSource(7, adapters))`` and ``load(slots, 7, AdapterWeights(7, merged))`` leave the
    same bits in the slots; the first reads the adapted matrices from the folder of ``initial``.

    Raises ``ModelError`` naming the first parameter that does not fit.
    """

    def __init__(self, slots: Mapping[str, Slot], initial: FolderWeights, *, tied_embeddings: bool) -> None:
        self._initial, self._tied = initial, tied_embeddings
        self._adapted: Collection[str] | None = ()
        """The weights that are not those of ``initial`` since they have an adapter; ``None`` when all may be others."""
        self._filled: set[str] = set()
        """The slots that have been filled since ``begin``."""
        load_weights(slots, initial, tied_embeddings=tied_embeddings)

    def forget(self) -> None:
        """Switch to new, empty slots."""
        self._adapted = None

    def load(self, slots: Mapping[str, Slot], version: int, source: WeightSource) -> None:
        """Take full weights, or adapters of the initial ones. Raises ``EngineError`` for others, ``ModelError`` when
        they do not fit; nothing has changed then."""
        full = self._full(version, source)
        names: Collection[str] | None = None
        adapted = source.adapters.keys() if isinstance(source, AdapterSource) else None
        if adapted is not None and self._adapted is not None:
            names = {*self._adapted, *adapted}
        load_weights(slots, full, tied_embeddings=self._tied, names=names)
        self._adapted = adapted

    def begin(self) -> None:
        """Begin to take full weights in parts (``fill``); until all have come, the slots hold some of each."""
        self._adapted, self._filled = None, set()

    def fill(self, slots: Mapping[str, Slot], tensors: Mapping[str, Tensor]) -> None:
        """Take a part of full weights. Raises ``ModelError`` when it does not fit; nothing has changed then."""
        self._filled |= fill(slots, tensors, tied_embeddings=self._tied, filled=self._filled)

    def require_all(self, slots: Mapping[str, Slot]) -> None:
        """Raise ``ModelError`` unless all parts have come since ``begin``."""
        if missing := slots.keys() - self._filled:
            raise ModelError(f"{len(missing)} weights are missing, first {min(missing)!r}")

    def differing(self, slots: Mapping[str, Slot], source: WeightSource) -> list[str]:
        """Return the names of the weights of ``source`` that are not those in use, bit for bit."""
        full = self._full(source.manifest.version, source)
        return differing(slots, full, tied_embeddings=self._tied)

    def _full(self, version: int, source: WeightSource) -> WeightSource:
        if source.manifest.kind != "adapter" or not isinstance(source, AdapterSource):
            source.manifest.require_full(version, _ENGINE)
            return source
        source.manifest.require_adapter(version, _ENGINE, base_version=self._initial.manifest.version)
        return AppliedAdapters(self._initial, source)
