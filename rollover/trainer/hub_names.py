"""Weights under the names that files on the hub have, if transformers holds them under others.

transformers joins the experts of a layer in one tensor and renames some tensors when it loads a model. Engines know the
names of the hub, so weights leave under those, by the conversion with which transformers itself writes models.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from rollover.weights.base import unmade

Parts = Mapping[str, Mapping[str, Tensor]]
_PARTS: WeakKeyDictionary[Any, Parts] = WeakKeyDictionary()
"""The parts of each model that is in memory."""


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters and the buffers that belong to a model's weights, by their names in the model, without
    gradient; a tied matrix appears once."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.state_dict().items() if name not in tied}


def hub_parts(model: Any, own: Mapping[str, Tensor]) -> Parts:
    """Return the tensors of the hub that make up each tensor of a model: their shapes by name, as empty tensors.

    Args:
        own: the model's tensors by their names without adapters.
    """
    if model not in _PARTS:
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in unmade(own).items()}
        if revert_weight_conversion(model, dict(empty)).keys() == empty.keys():
            _PARTS[model] = {name: {name: tensor} for name, tensor in empty.items()}
        else:
            _PARTS[model] = {name: revert_weight_conversion(model, {name: t}) for name, t in empty.items()}
    return _PARTS[model]


def hub_weights(model: Any, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of a model, given by their names in it, by their names on the hub: those themselves if the
    names are the same."""
    parts = hub_parts(model, own)
    return own if all(found.keys() == {name} for name, found in parts.items()) else HubWeights(model, own, parts)


def joined(model: Any, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor of the model from its parts on the hub; of experts, from the parts of some of them."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    converter: WeightConverter | None = None
    for part, tensor in parts.items():
        key, pattern = rename_source_key(part, renamings, converters)
        assert key == name and pattern is not None, f"{part} is no part of {name}"
        if converter is None:
            converter = copy.deepcopy(next(one for one in converters if pattern in one.source_patterns))
        converter.add_tensor(key, part, pattern, tensor)  # type: ignore[arg-type]  # loading passes futures of tensors
    assert converter is not None, f"{name} has no parts"
    whole: Tensor = converter.convert(name, model=model, config=model.config)[name]
    return whole


class HubWeights(Mapping[str, Tensor]):
    """Weights that are converted when they are asked for. Those that have the same name in the model are its own."""

    def __init__(self, model: Any, own: Mapping[str, Tensor], parts: Parts) -> None:
        self._model = model
        self._own = own
        self._names = {part: name for name, found in parts.items() for part in found}
        self.base = {part: tensor for found in parts.values() for part, tensor in found.items()}
        """Empty tensors of the same names, shapes and number formats."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})

    def __getitem__(self, part: str) -> Tensor:
        name = self._names[part]
        if name == part:
            return self._own[name]
        last, found = self._last
        if last != name:
            tensor = self._own[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found = revert_weight_conversion(self._model, {name: whole})
            self._last = name, found
        return found[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)
