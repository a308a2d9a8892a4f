"""Layers of experts (mixtures of experts): in which precision they compute, and how recorded routes take the place of
their own choice.

A router computes in float32, whatever the format of the pass, since rounding would swap experts of close scores.
Products of experts follow autocast, which does not reach them by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from rollover.errors import ModelError, RolloverError
from rollover.routes import expert_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoutes:
    """The recorded routes of N positions."""

    bytes_NB: Tensor
    """A route (``rollover.routes``) of each position, uint8; 0 if there is none."""
    is_known_N: Tensor
    """False for positions without a route, whose experts the model chooses."""

    def of_positions(self, index_M: Tensor) -> RowRoutes:
        """Return the routes of some of the positions."""
        return RowRoutes(bytes_NB=self.bytes_NB[index_M], is_known_N=self.is_known_N[index_M])


class Routes:
    """The experts that the layers of a model take, of their own choice or given; their scores are computed as ever."""

    def __init__(self, layers: Mapping[int, nn.Module], num_layers: int) -> None:
        self._numbers = tuple(layers)
        self._num_layers = num_layers
        self.num_experts = max(map(_num_experts, layers.values()), default=0)
        self.given: RowRoutes | None = None
        self.taken: dict[int, Tensor] | None = None
        """If set, the experts ``[N, K]`` of each layer in the last pass, by the number of the layer."""

    def choice(self, number: int) -> _Choice | None:
        """Return what answers the choice of a layer within its pass; ``None`` if it is not to be touched."""
        return None if self.given is None and self.taken is None else _Choice(self, number)

    def take(self, number: int, own_NK: Tensor) -> Tensor:
        """Return the experts that a layer takes, given its own choice. Raises ``RolloverError`` for routes that are not
        of this model."""
        if self.taken is not None:
            self.taken[number] = own_NK
        if self.given is None:
            return own_NK
        width, (_, num_chosen) = expert_bytes(self.num_experts), own_NK.shape
        bytes_NB = self.given.bytes_NB
        ids_NS = (bytes_NB if width == 1 else bytes_NB.view(torch.int16)).long()
        of_all, of_these = self._num_layers * num_chosen, len(self._numbers) * num_chosen
        if ids_NS.shape[1] not in (of_all, of_these):
            raise RolloverError(
                f"routes of {bytes_NB.shape[1]} bytes are not of this model, in which {len(self._numbers)} layers"
                f" choose {num_chosen} of {self.num_experts} experts: do engine and trainer have the same model?"
            )
        place = number if ids_NS.shape[1] == of_all else self._numbers.index(number)
        given_NK = ids_NS[:, place * num_chosen : (place + 1) * num_chosen]
        if int(given_NK.max()) >= self.num_experts:
            raise RolloverError(f"a route names expert {int(given_NK.max())} of {self.num_experts}")
        return torch.where(self.given.is_known_N[:, None], given_NK, own_NK)


class _Choice(TorchFunctionMode):
    """Answers the one choice among all experts that a layer makes within this context."""

    def __init__(self, routes: Routes, number: int) -> None:
        super().__init__()
        self._routes = routes
        self._number = number
        self.num_made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._routes.num_experts:
            return result
        self.num_made += 1
        ids_NK = self._routes.take(self._number, result.indices)
        return torch.return_types.topk((args[0].gather(1, ids_NK), ids_NK))


def prepare_experts(model: Any) -> None:
    """Let routers compute in float32, products of experts follow autocast, and choices follow ``model.routes``."""
    layers = {int(re.search(r"\d+", name)[0]): layer for name, layer in _expert_layers(model)}  # type: ignore[index]
    model.routes = Routes(layers, getattr(model.config, "num_hidden_layers", 0))
    for number, layer in layers.items():
        for router in routers(layer):
            router.float().forward = _in_float32(router.forward)
        layer.experts.forward = _under_autocast(layer.experts)
        layer.forward = _routed(layer, model.routes, number)


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that score experts."""
    return [
        child
        for _, layer in _expert_layers(model)
        for child in layer.children()
        if child is not layer.experts
        and any(p.ndim == 2 and p.shape[0] == _num_experts(layer) for p in child.parameters())
    ]


def _expert_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(getattr(m, "experts", None), nn.Module))


def _num_experts(layer: Any) -> int:
    experts = layer.experts
    return len(experts) if isinstance(experts, nn.ModuleList) else int(next(experts.parameters()).shape[0])


def _in_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    def scored(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden.float(), *arguments, **named)

    return scored


def _under_autocast(experts: nn.Module) -> Callable[..., Any]:
    forward = experts.forward

    def computed(hidden: Tensor, *arguments: Any, **named: Any) -> Any:
        kind = hidden.device.type
        if not torch.is_autocast_enabled(kind):
            return forward(hidden, *arguments, **named)
        dtype = torch.get_autocast_dtype(kind)
        weights = {name: parameter.to(dtype) for name, parameter in experts.named_parameters()}
        with torch.autocast(kind, enabled=False):
            return functional_call(experts, weights, (hidden.to(dtype), *arguments), named)

    return computed


def _routed(layer: nn.Module, routes: Routes, number: int) -> Callable[..., Any]:
    forward = layer.forward

    def routed(*arguments: Any, **named: Any) -> Any:
        choice = routes.choice(number)
        if choice is None:
            return forward(*arguments, **named)
        with choice:
            output = forward(*arguments, **named)
        if choice.num_made != 1:
            raise ModelError(f"routes cannot be replayed in {type(layer).__name__}: it chooses in a way of its own")
        return output

    return routed
