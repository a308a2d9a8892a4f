"""Fill a decoder from a weight source, all or nothing.

Names and shapes are compared before the first byte is copied: a source that does not fit leaves the weights
as they were.

The weights say whether the input and the output matrix are one, as in transformers, through which the trainer reads
them: a config that ties them is not followed where they are two and differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rollover.engine.embedded.model import Slot
from rollover.errors import ModelError
from rollover.hf.weights import EMBEDDING, HEAD
from rollover.weights.base import WeightSource

Shapes = dict[str, tuple[int, ...]]


def are_tied(source: WeightSource, *, asked: bool) -> bool:
    """Say whether input and output matrix of ``source`` are one, given that its config asks for it or not."""
    return asked and (not {EMBEDDING, HEAD} <= _shapes(source).keys() or _same(source))


def load_weights(
    slots: Mapping[str, Slot], source: WeightSource, *, tied_embeddings: bool, names: Collection[str] | None = None
) -> None:
    """Fill ``slots`` from ``source``; those of ``names`` alone, where others have what they need. Raises ``ModelError``
    naming the first parameter that does not fit."""
    stored = _stored(slots, source, tied_embeddings=tied_embeddings)
    chosen = [(slot, name) for slot, name in zip(slots.values(), stored, strict=True) if names is None or name in names]
    with torch.inference_mode():
        for (slot, _), (_, tensor) in zip(chosen, source.tensors([name for _, name in chosen]), strict=True):
            slot.fill(tensor)


def fill(
    slots: Mapping[str, Slot], tensors: Mapping[str, Tensor], *, tied_embeddings: bool, filled: Collection[str]
) -> set[str]:
    """Fill the slots of ``tensors``, a part of full weights. Returns their names.

    Args:
        filled: slots that other parts of the same weights have filled before; a tied matrix that comes twice must be
            the same.

    Raises ``ModelError`` naming the first parameter that does not fit, before any is copied.
    """
    chosen = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    places = {name: EMBEDDING if tied_embeddings and name == HEAD else name for name in chosen}
    _compare(
        {place: slots[place].shape for place in places.values() if place in slots},
        {places[name]: tuple(tensor.shape) for name, tensor in chosen.items()},
    )
    done = {*filled}
    with torch.inference_mode():
        for name, tensor in chosen.items():
            slot = slots[places[name]]
            if places[name] not in done:
                slot.fill(tensor)
                done.add(places[name])
            elif not slot.holds(tensor):
                raise ModelError(f"weight {name!r} came twice, and differs from what came before")
    return done


def differing(slots: Mapping[str, Slot], source: WeightSource, *, tied_embeddings: bool) -> list[str]:
    """Return the names of the parameters of ``source`` that are not in their slots, bit for bit. It takes about as long
    as filling them."""
    stored = _stored(slots, source, tied_embeddings=tied_embeddings)
    with torch.inference_mode():
        pairs = zip(slots.values(), source.tensors(stored), strict=True)
        return [name for slot, (name, tensor) in pairs if not slot.holds(tensor)]


def digests(slots: Mapping[str, Slot]) -> dict[str, str]:
    """Return the SHA-256, in hexadecimal, of the bytes of each parameter, row by row and in the number format that it
    is held in: for weights of that format those of the checkpoint's own bytes."""
    with torch.inference_mode():
        return {name: _digest(slot.read()) for name, slot in slots.items()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _stored(slots: Mapping[str, Slot], source: WeightSource, *, tied_embeddings: bool) -> list[str]:
    """Return the name in ``source`` of what belongs into each slot. Raises ``ModelError`` when they do not fit."""
    given = _shapes(source)
    stored = {name: name for name in given}  # the name in the source, by the name of the slot
    if tied_embeddings and HEAD in given:
        if EMBEDDING in given and not _same(source):
            raise ModelError(f"weight {HEAD!r} differs from {EMBEDDING!r}, but the model has one matrix for both")
        given[EMBEDDING] = given.pop(HEAD)
        stored[EMBEDDING] = HEAD
    _compare({name: slot.shape for name, slot in slots.items()}, given)
    return [stored[name] for name in slots]


def _shapes(source: WeightSource) -> Shapes:
    return {spec.name: spec.shape for spec in source.manifest.tensors if not spec.name.endswith("rotary_emb.inv_freq")}


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
