"""Computes the memory that training takes on one device, before any weights are loaded.

A pass over the largest row that a run can have is traced through the training functions with tensors that have shapes
but no memory (PyTorch's fake tensors). Every layer adds the same amount, so models of two and three layers are traced
and deeper ones extrapolated. Caches of the allocator, workspaces of libraries and the process itself are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import moe

from rollover.trainer.config import TrainerConfig
from rollover.trainer.eight_bits import moment_bytes, quantised
from rollover.trainer.experts import prepare_experts
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.lora import adapter_settings, with_adapters
from rollover.trainer.models import recompute_layers
from rollover.trainer.packing import PackedRow, TrainingSample, pack
from rollover.trainer.proof import attention_of, prove

_TRACED_LAYERS = (2, 3)
_FLOAT32_BYTES = 4
_ALIKE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
"""Settings that let all layers of a mixture of experts have experts, which dense ones then count as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on one device at the peak of a training step.

    Example: full training of 1e9 parameters takes 4e9 bytes for ``weights``, the same for ``gradients`` and twice that
    for ``optimizer``.
    """

    num_parameters: int
    """Number of parameters of the model itself, without adapters."""
    weights: int
    reference: int
    """A frozen copy, if the algorithm needs a copy beside the model with its adapters off."""
    gradients: int
    optimizer: int
    activations: int
    """Bytes of a pass over the largest row, or over this device's share of it, log-probs over the vocabulary included:
    everything the forward pass keeps for the backward pass, plus its peak."""
    gathered: int
    """Weights and gradients that are briefly whole, if each device keeps only its part of them."""
    offloaded: int = 0
    """Bytes in the memory of the machine instead: of weights, gradients and optimizer with ``offload``."""

    @property
    def parts(self) -> Mapping[str, int]:
        """Return the bytes by purpose, as a user reads them."""
        return {
            "weights": self.weights,
            "reference policy": self.reference,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "gathered weights": self.gathered,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training_memory(
    config: TrainerConfig,
    model: Mapping[str, Any],
    *,
    max_prompt_tokens: int,
    max_response_tokens: int,
    batch_samples: int,
    group_size: int = 1,
    temperature: float = 1.0,
    needs_ref: bool = False,
    base_dtype: torch.dtype = torch.bfloat16,
) -> TrainingMemory:
    """Compute the memory of a step over rows that are full of responses of the greatest length, whose prompts are as
    short or as long as they can be.

    Args:
        model: the content of its ``config.json``.
        batch_samples: samples in a batch; a few short ones may not fill a row.
        group_size: responses to a prompt, which a row holds once.
        needs_ref: the algorithm compares with the policy that training began with.
        base_dtype: of the frozen weights, if adapters are trained.

    Raises ``ConfigError`` when adapters are requested beside matrices that the model does not have.

    Example: Qwen3-0.6B in float32 with rows of 4,096 tokens takes 9.5 GB for weights, gradients and optimizer, and
    15.5 GB for activations, or 1.2 GB with ``gradient_checkpointing``.
    """
    share = config.context_parallel  # devices that share a row divide its positions evenly
    budget, longest, response = (
        -(-count // share) for count in (config.micro_batch_tokens, max_prompt_tokens, max_response_tokens)
    )
    rows = [
        (budget, prompt, response, batch_samples, group_size)
        for prompt in ({1, longest} if longest + response <= budget else {longest})
    ]
    trace = partial(_trace, config, temperature=temperature, base_dtype=base_dtype)
    traced = [[trace(_of_depth(model, n), row) for n in _TRACED_LAYERS] for row in rows]
    depth = _depth_of(model)
    shallow, deeper = max(traced, key=lambda traces: traces[0].at(depth, traces[1]).peak)
    size, whole = config.num_devices, shallow.at(depth, deeper)
    kept = {
        "weights": whole.weights // size,
        "reference": whole.weights // size if needs_ref and config.lora is None else 0,
        "gradients": _FLOAT32_BYTES * whole.num_trained // size,
        "optimizer": whole.moments // size,
    }
    return TrainingMemory(
        num_parameters=whole.num_parameters,
        **(dict.fromkeys(kept, 0) if config.offload else kept),
        activations=whole.peak,
        gathered=_gathered(config, shallow.at(0, deeper), shallow.at(1, deeper)) if config.is_sharded else 0,
        offloaded=sum(kept.values()) if config.offload else 0,
    )


def _depth_of(model: Mapping[str, Any]) -> int:
    """Return the number of layers, for which families have names of their own."""
    from transformers import AutoConfig

    with unset_fake_temporarily():
        return int(AutoConfig.for_model(**model).num_hidden_layers)


def _of_depth(model: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the config of a model with this many layers. Lists of one entry per layer, such as ``layer_types``, are
    cut or repeated."""
    num_layers = _depth_of(model)
    cut = {
        name: [value[i % num_layers] for i in range(depth)]
        for name, value in model.items()
        if isinstance(value, list) and len(value) == num_layers and name.startswith(("layer", "no_rope"))
    }
    return {**model, **cut, "num_hidden_layers": depth}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """Measurements of a model of some depth; ``peak`` is the height of a pass."""

    num_parameters: int
    weights: int
    num_trained: int
    moments: int
    peak: int

    def at(self, num_layers: int, deeper: _Trace) -> _Trace:
        """Extrapolate linearly from this trace and the next deeper one to ``num_layers``."""
        steps = num_layers - _TRACED_LAYERS[0]
        first, second = ({f.name: getattr(t, f.name) for f in fields(t)} for t in (self, deeper))
        return _Trace(**{name: first[name] + steps * (second[name] - first[name]) for name in first})


def _trace(
    config: TrainerConfig,
    model: Mapping[str, Any],
    row_of: tuple[int, ...],
    temperature: float,
    base_dtype: torch.dtype,
) -> _Trace:
    # PyTorch's own grouped product has no fake form in float32; the one of transformers takes the same memory.
    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(moe, "_can_use_grouped_mm", lambda *_: False):
        network = _without_values(config, model, base_dtype)
        row = _largest_row(*row_of, shares_prompts=not network.is_padded)
        parameters = list(network.parameters())
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:  # gradients exist from the first row of a mini-batch on
            parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        autocast = config.dtype == "bfloat16" and not _gathers_halves(config)
        with _Allocations(known=(*parameters, *gradients)) as allocations:
            response_logprobs(network, row, temperature, autocast=autocast).sum().backward()
        num_trained = sum(p.numel() for p in trained)
        frozen = [p for p in parameters if not p.requires_grad]
        return _Trace(
            num_parameters=sum(p.numel() for p in (parameters if config.lora is None else frozen)),
            weights=_FLOAT32_BYTES * num_trained + sum(p.numel() * p.element_size() for p in frozen),
            num_trained=num_trained,
            moments=moment_bytes(trained, quantised(network, trained) if config.optimizer == "adamw_8bit" else ()),
            peak=allocations.peak,
        )


def _largest_row(
    budget: int, prompt: int, response: int, batch_samples: int, group_size: int, *, shares_prompts: bool
) -> PackedRow:
    """Return the row with the longest lines in all, of samples with such prompts and responses; of a single one if it
    is longer than ``budget``."""
    count = max(1, min(budget // response, batch_samples)) if prompt + response <= budget else 1
    samples = [
        TrainingSample(prompt_ids=(i // group_size,) * prompt, response_ids=(0,) * response) for i in range(count)
    ]
    rows = pack(samples, max(budget, prompt + response), shares_prompts=shares_prompts)
    return max(rows, key=lambda row: sum(block_SL.numel() for block_SL in row.buckets))


def _without_values(config: TrainerConfig, model: Mapping[str, Any], base_dtype: torch.dtype) -> Any:
    """Build the model as training does, with tensors of the present fake mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.float32 if config.lora is None else base_dtype
    if _gathers_halves(config):
        dtype = torch.bfloat16
    with unset_fake_temporarily():
        layout = prove(AutoConfig.for_model(**model))
    with unset_fake_temporarily(), torch.device("meta"):
        shape = AutoConfig.for_model(
            **{**model, "layer_types": None, **{k: _ALIKE[k] for k in _ALIKE.keys() & model.keys()}}
        )
        network: Any = AutoModelForCausalLM.from_config(shape, attn_implementation=attention_of(layout), dtype=dtype)
        network.is_padded = layout == "padded"
        if config.lora is not None:
            with_adapters(network, adapter_settings(network, config.lora, base=Path()), seed=0)
        prepare_experts(network)
    network.to_empty(device="cpu").tie_weights()
    if config.gradient_checkpointing:
        recompute_layers(network)
    return network


def _gathers_halves(config: TrainerConfig) -> bool:
    """Return whether float32 weights are gathered in bfloat16 for the passes, which then need no autocast."""
    return config.dtype == "bfloat16" and config.is_sharded and config.lora is None


def _gathered(config: TrainerConfig, rest: _Trace, one: _Trace) -> int:
    """Compute the bytes of whole tensors at the peak of a pass over sharded weights: everything outside the layers,
    with its gradient; the layer that computes and the next one; and a gradient, either as computed or in float32 for
    the sum over devices. On GPUs, where transfers overlap with computation, also the buffer in which the next layer
    arrives, and a gradient in both forms. Frozen weights have no gradients. Offloaded ones arrive in float32, and
    everything outside the layers is the largest part that does.

    Args:
        rest: a model without layers.
        one: a model with one layer.
    """
    width = 2 if _gathers_halves(config) else _FLOAT32_BYTES

    def weights(trace: _Trace) -> int:
        return trace.weights - (_FLOAT32_BYTES - width) * trace.num_trained

    layer, num_trained = weights(one) - weights(rest), one.num_trained - rest.num_trained
    computed, summed = width * num_trained, _FLOAT32_BYTES * num_trained
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    of_layers = 2 * layer + max(computed, summed) if on_cpu else 3 * layer + computed + summed
    arriving = max(rest.num_trained, num_trained) * _FLOAT32_BYTES // config.num_devices if config.offload else 0
    return weights(rest) + width * rest.num_trained + of_layers + arriving


class _Allocations(TorchDispatchMode):
    """Adds up the storages that operations allocate within its context, until nothing refers to them any more."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, num_bytes).atexit = False

    def _release(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes
