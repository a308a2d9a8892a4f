"""Fills a decoder from a folder of safetensors or from tensors in memory, all or nothing.

Names and shapes are compared before the first byte is copied: a source that does not fit leaves the weights
as they were.

It is for the weights to say whether the input and the output matrix are one, as in transformers, through which the
trainer reads them: a config that ties them is not followed where they are two and differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollover.engine.base import WeightSource
from rollover.engine.embedded.model import Slot
from rollover.errors import ModelError

Shapes = dict[str, tuple[int, ...]]
Fetch = Callable[[str], Tensor]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def are_tied(source: WeightSource, *, asked: bool) -> bool:
    """Decide whether input and output matrix of ``source`` are one: only if its config asks for it and they do not
    differ."""
    if not asked:
        return False
    with open_weights(source) as (shapes, fetch):
        return not {_EMBEDDING, _HEAD} <= shapes.keys() or _same(fetch)


def load_weights(slots: Mapping[str, Slot], source: WeightSource, *, tied_embeddings: bool) -> None:
    """Fill ``slots`` from ``source``. Raises ``ModelError`` naming the first parameter that does not fit."""
    with open_weights(source) as (shapes, fetch):
        expected = {name: slot.shape for name, slot in slots.items()}
        given = {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")}
        if tied_embeddings and _HEAD in given:
            fetch = _as_one(given, fetch)
        _compare(expected, given)
        with torch.inference_mode():
            for name, slot in slots.items():
                slot.fill(fetch(name))


def _as_one(given: Shapes, fetch: Fetch) -> Fetch:
    """Take a matrix that the source holds under the name of the output side for the input side, too."""
    if _EMBEDDING in given and not _same(fetch):
        raise ModelError(f"weight {_HEAD!r} differs from {_EMBEDDING!r}, but the model has one matrix for both")
    given[_EMBEDDING] = given.pop(_HEAD)
    return lambda name: fetch(_HEAD if name == _EMBEDDING else name)


def _same(fetch: Fetch) -> bool:
    """Compare the two matrices as the trainer holds them, in float32."""
    return torch.equal(fetch(_EMBEDDING).float(), fetch(_HEAD).float())


@contextmanager
def open_weights(source: WeightSource) -> Iterator[tuple[Shapes, Fetch]]:
    """Give shapes by name, and a function that reads the tensor of a name."""
    if isinstance(source, Mapping):
        yield {name: tuple(tensor.shape) for name, tensor in source.items()}, source.__getitem__
        return
    with ExitStack() as stack:
        try:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                for path in _shards(Path(source))
            }
            where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}
        except (SafetensorError, OSError) as e:
            raise ModelError(f"the weights in {source} cannot be read: {e}") from e
        yield shapes, lambda name: where[name].get_tensor(name)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as e:
            raise ModelError(f"{index} is not a safetensors index: {e}") from e
        return [folder / name for name in names]
    if paths := sorted(folder.glob("*.safetensors")):
        return paths
    raise ModelError(f"{folder} holds no *.safetensors files")


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
