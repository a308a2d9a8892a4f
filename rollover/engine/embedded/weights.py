"""The weights of a decoder: full ones as they come, or the model that the engine began with and adapters beside it.

Names and shapes are compared before the first byte is copied: a source that does not fit leaves the weights as they
were. Adapters are merged within the engine, from the model's folder, which holds the base that they were trained
beside: so no second copy of it takes memory, and what is filled is to the bit what the trainer would have merged. Only
matrices that have an adapter, or have had one, are filled again.

The weights say whether the input and the output matrix are one, as in transformers, through which the trainer reads
them: a config that ties them is not followed if they are two and differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rollover.engine.embedded.model import Slot
from rollover.engine.embedded.ops import same_bits
from rollover.errors import ModelError
from rollover.hf.weights import COMPUTED, EMBEDDING, HEAD
from rollover.weights.adapters import AdapterSource, AppliedAdapters
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights

Shapes = dict[str, tuple[int, ...]]

_ENGINE = "the embedded engine"


class LoadedWeights:
    """Fills the slots of a decoder, which stay the same until ``forget``.

    Args:
        slots: filled with ``initial`` at once.
        initial: full weights, the base of adapters.

    Example: ``load(slots, 7, AdapterSource(7, adapters))`` and ``load(slots, 7, MemoryWeights(7, merged))`` leave the
    same bits in the slots; the first reads the adapted matrices from the folder of ``initial``.

    Raises ``ModelError`` naming the first parameter that does not fit.
    """

    def __init__(self, slots: Mapping[str, Slot], initial: FolderWeights, *, tied_embeddings: bool) -> None:
        self._initial, self._tied = initial, tied_embeddings
        self._adapted: Collection[str] | None = ()
        """The weights that differ from ``initial`` since they have an adapter; ``None`` when all may be others."""
        self._filled: set[str] = set()
        """The slots that have been filled since ``begin``."""
        self._fill_from(slots, initial, names=None)

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
        self._fill_from(slots, full, names=names)
        self._adapted = adapted

    def begin(self) -> None:
        """Begin to take full weights in parts (``fill``); until all have come, the slots hold some of each."""
        self._adapted, self._filled = None, set()

    def fill(self, slots: Mapping[str, Slot], tensors: Mapping[str, Tensor]) -> None:
        """Take a part of full weights; a tied matrix that comes twice must be the same.

        Raises ``ModelError`` naming the first parameter that does not fit, before any is copied.
        """
        chosen = {name: t for name, t in tensors.items() if not name.endswith(COMPUTED)}
        places = {name: EMBEDDING if self._tied and name == HEAD else name for name in chosen}
        _compare(
            {place: slots[place].shape for place in places.values() if place in slots},
            {places[name]: tuple(tensor.shape) for name, tensor in chosen.items()},
        )
        with torch.inference_mode():
            for name, tensor in chosen.items():
                slot = slots[places[name]]
                if places[name] not in self._filled:
                    slot.fill(tensor)
                    self._filled.add(places[name])
                elif not same_bits(slot.read(), tensor):
                    raise ModelError(f"weight {name!r} came twice, and differs from what came before")

    def require_all(self, slots: Mapping[str, Slot]) -> None:
        """Raise ``ModelError`` unless all parts have come since ``begin``."""
        if missing := slots.keys() - self._filled:
            raise ModelError(f"{len(missing)} weights are missing, first {min(missing)!r}")

    def _full(self, version: int, source: WeightSource) -> WeightSource:
        if source.manifest.kind != "adapter" or not isinstance(source, AdapterSource):
            source.manifest.require_full(version, _ENGINE)
            return source
        source.manifest.require_adapter(version, _ENGINE, base_version=self._initial.manifest.version)
        return AppliedAdapters(self._initial, source)

    def _fill_from(self, slots: Mapping[str, Slot], source: WeightSource, *, names: Collection[str] | None) -> None:
        """Fill ``slots`` from full weights; only the slots of ``names`` if the others have what they need."""
        stored = zip(slots.values(), self._stored(slots, source), strict=True)
        chosen = [(slot, name) for slot, name in stored if names is None or name in names]
        with torch.inference_mode():
            for (slot, _), (_, tensor) in zip(chosen, source.tensors([name for _, name in chosen]), strict=True):
                slot.fill(tensor)

    def _stored(self, slots: Mapping[str, Slot], source: WeightSource) -> list[str]:
        """Return the name in ``source`` of the tensor of each slot. Raises ``ModelError`` when they do not fit."""
        given = _shapes(source)
        stored = {name: name for name in given}  # the name in the source, by the name of the slot
        if self._tied and HEAD in given:
            if EMBEDDING in given and not _same(source):
                raise ModelError(f"weight {HEAD!r} differs from {EMBEDDING!r}, but the model has one matrix for both")
            given[EMBEDDING] = given.pop(HEAD)
            stored[EMBEDDING] = HEAD
        _compare({name: slot.shape for name, slot in slots.items()}, given)
        return [stored[name] for name in slots]


def are_tied(source: WeightSource, *, asked: bool) -> bool:
    """Return whether the input and output matrix of ``source`` are one, given what its config asks for."""
    return asked and (not {EMBEDDING, HEAD} <= _shapes(source).keys() or _same(source))


def _shapes(source: WeightSource) -> Shapes:
    return {spec.name: spec.shape for spec in source.manifest.tensors if not spec.name.endswith(COMPUTED)}


def _same(source: WeightSource) -> bool:
    """Compare the two matrices as the trainer holds them, in float32."""
    (_, embedding), (_, head) = source.tensors([EMBEDDING, HEAD])
    return torch.equal(embedding.float(), head.float())


def _compare(expected: Shapes, given: Shapes) -> None:
    for problem, names in (
        ("are missing", expected.keys() - given.keys()),
        ("are unknown", given.keys() - expected.keys()),
    ):
        if names:
            raise ModelError(f"{len(names)} weights {problem}, first {min(names)!r}")
    for name, shape in expected.items():
        if given[name] != shape:
            raise ModelError(f"weight {name!r} has shape {list(given[name])}, expected {list(shape)}")
