"""The policy sharded over ranks with FSDP2 (``torch.distributed.fsdp.fully_shard``): each holds its rows of every
tensor.

The model is built without storage, tied, sharded layer by layer and as a whole, and only then given memory, into which
each rank reads its own rows. Three settings differ from FSDP2's defaults, and training would be wrong without them:

* The root frees its weights after a forward pass too. By default embedding, output matrix and last norm stay whole
after a forward pass without a backward one, and an optimizer that is created then trains tensors that are never used.
* Gradients are summed over ranks rather than averaged, since every denominator counts the whole batch. gloo has no
scaled sum, so a plain sum has to be requested explicitly.
* Modules with buffers that no checkpoint has, such as the rotary one, compute them again.

With ``offload`` the rows are in the memory of the machine. Gradients arrive there, and the optimizer steps there.

Master weights are float32. With ``dtype = "bfloat16"`` they are gathered in bfloat16 for the passes, and gradients are
summed in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rollover.errors import ModelError
from rollover.hf.companions import Companions, without_own_files, write_companions
from rollover.hf.config import read_model_config
from rollover.hf.weights import COMPUTED, EMBEDDING, HEAD, TensorInfo, read_weight_infos
from rollover.trainer.config import StepConfig
from rollover.trainer.experts import prepare_experts, routers
from rollover.trainer.hub_names import hub_parts, hub_weights, named_tensors
from rollover.trainer.logprobs import OneForward
from rollover.trainer.models import recompute_layers
from rollover.trainer.shares import fill_joined, fill_rows, take_rows, write_weights
from rollover.trainer.world import World


class ShardedPolicy:
    """Trains all weights in float32, with a part of each tensor on each rank. Implements ``Policy``.

    Args:
        folder: the model or checkpoint to begin from.
        initial: the model that the run began with; a frozen copy is kept, sharded too, when ``needs_ref``.
        world: the ranks that share the model, with their devices.
    """

    autocast = False  # the weights are gathered in the number format of the passes

    def __init__(self, config: StepConfig, folder: Path, *, initial: Path, needs_ref: bool, world: World) -> None:
        self._world = world
        precision = None
        if config.dtype == "bfloat16":
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        opened = partial(open_sharded, config=config, world=world, precision=precision)
        self.model = opened(folder)
        self._ref_model = opened(initial).requires_grad_(False) if needs_ref else None

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights by their names on the hub, sharded if they have the same name in the model."""
        return hub_weights(self.model.hf, sharded_tensors(self.model))

    def reference(self) -> AbstractContextManager[Any]:
        assert self._ref_model is not None, "the algorithm said that it needs one"
        return nullcontext(self._ref_model)

    def write(self, folder: Path, *, companions: Companions) -> None:
        """Write this rank's share; the first rank adds config and tokenizer."""
        hf = self.model.hf
        if self._world.rank == 0:
            write_companions(without_own_files(companions), folder)
            hf.config.architectures = [type(hf).__name__]
            hf.config.save_pretrained(folder)
        self.write_weights(folder)

    def write_weights(self, folder: Path) -> None:
        write_weights(self._world, self.weights(), folder)


def without_adapter(name: str) -> str:
    """Return the name of a parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def sharded_tensors(model: OneForward) -> dict[str, Tensor]:
    """Return the parameters by their names in the model, in their sharded form, and its buffers; a tied matrix appears
    once. All are sharded: a parameter that is not was left behind by a pass, and changes to it would be lost."""
    whole = [name for name, parameter in model.hf.named_parameters() if not isinstance(parameter, DTensor)]
    assert not whole, f"{whole[0]} is not sharded"
    return named_tensors(model.hf)


def open_sharded(
    folder: Path,
    config: StepConfig,
    world: World,
    *,
    dtype: torch.dtype = torch.float32,
    precision: MixedPrecisionPolicy | None = None,
    adapt: Callable[[Any], Mapping[str, Tensor]] = lambda hf: {},
) -> OneForward:
    """Open the model in ``folder``, with each rank reading its own rows; see ``models.open_model``.

    Args:
        dtype: the number format in which weights are held.
        precision: the precision of the passes, if it differs.
        adapt: puts adapters beside the model's matrices, before there is memory for any, and returns their first
            values by name.

    Raises ``ModelError`` for folders that ``read_model_config`` refuses and for weights that do not fit their config.
    """
    assert world.mesh is not None, "a trainer alone has nothing to shard"
    read_model_config(folder)
    infos = read_weight_infos(folder)
    hf = _without_storage(folder, infos, dtype)
    parts = _parts_in_files(folder, hf, infos)
    is_tied = HEAD not in dict(hf.named_parameters())
    adapters = adapt(hf)
    parts |= {name: parts[without_adapter(name)] for name, _ in hf.named_parameters() if name not in adapters}
    prepare_experts(hf)
    if config.gradient_checkpointing:
        recompute_layers(hf)
    model = OneForward(hf)
    _shard(model, precision or MixedPrecisionPolicy(), world.mesh, offload=config.offload)
    device = torch.device(world.mesh.device_type)
    model.to_empty(device="cpu" if config.offload else device)
    if is_tied:  # giving it memory has split the tied matrix in two
        hf.lm_head.weight = hf.model.embed_tokens.weight
    for module in hf.modules():
        if module._non_persistent_buffers_set:  # they are in no file
            hf._init_weights(module)
    stored = {name: info.file for name, info in infos.items()}
    try:
        weights = sharded_tensors(model)
        base = {name: weights[name] for name in weights if name not in adapters}
        cut = {name: tensor for name, tensor in base.items() if len(parts[name]) > 1}
        plain = {name: tensor for name, tensor in base.items() if name not in cut}
        fill_rows(world, plain, stored, {name: next(iter(parts[name])) for name in plain})
        fill_joined(world, hf, cut, parts, stored)
        take_rows(world, {name: weights[name] for name in adapters}, adapters)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error
    for module in hf.modules():
        for name, buffer in module.named_buffers(recurse=False):  # FSDP2 moves parameters alone
            setattr(module, name, buffer.to(device))
    return model


def _without_storage(folder: Path, infos: Mapping[str, TensorInfo], dtype: torch.dtype) -> Any:
    """Return the model of the folder's config without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollover.trainer.attention import PACKED_ATTENTION

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        # As in the weights, which override the config.
        config.tie_word_embeddings = bool(config.tie_word_embeddings) and _may_be_one(infos)
        config.dtype = dtype
        make: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            hf = make(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error
    hf.is_padded = False
    if config.tie_word_embeddings:
        hf.lm_head.weight = hf.model.embed_tokens.weight
    return hf.eval()


def _may_be_one(infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether the input and the output matrix can be one tensor: the files do not have two that differ."""
    if not {EMBEDDING, HEAD} <= infos.keys():
        return True
    with safe_open(infos[EMBEDDING].file, framework="pt") as one, safe_open(infos[HEAD].file, framework="pt") as other:
        embedding, head = one.get_slice(EMBEDDING), other.get_slice(HEAD)
        if embedding.get_shape() != head.get_shape():
            return False
        rows = embedding.get_shape()[0]
        parts = (slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096))
        return all(torch.equal(embedding[part].float(), head[part].float()) for part in parts)


def _parts_in_files(folder: Path, hf: Any, infos: Mapping[str, TensorInfo]) -> dict[str, Mapping[str, Tensor]]:
    """Return which tensors of the files make up each tensor of the model. Raises ``ModelError`` when the files do not
    fit the model."""
    parts = dict(hub_parts(hf, named_tensors(hf)))
    if HEAD not in parts and EMBEDDING not in infos and HEAD in infos:
        parts[EMBEDDING] = {HEAD: parts[EMBEDDING][EMBEDDING]}
    expected = {name: tuple(tensor.shape) for found in parts.values() for name, tensor in found.items()}
    for name, shape in expected.items():
        problem = None
        if name not in infos:
            problem = "missing keys"
        elif infos[name].shape != shape:
            problem = "mismatched keys"
        if problem is not None:
            raise ModelError(f"model folder {str(folder)!r}: weights do not fit config.json: {problem}: {name}")
    twin = {EMBEDDING, HEAD} if HEAD not in parts else set()
    unused = re.compile("|".join((re.escape(COMPUTED), *(hf._keys_to_ignore_on_load_unexpected or ()))))
    for name in sorted(infos.keys() - expected.keys() - twin):
        if not unused.search(name):
            raise ModelError(f"model folder {str(folder)!r}: weights do not fit config.json: unexpected keys: {name}")
    return parts


def _shard(model: OneForward, precision: MixedPrecisionPolicy, mesh: DeviceMesh, *, offload: bool) -> None:
    """Shard each layer, and the rest with the root; all weights are freed after each pass. Routers are gathered in
    float32."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    for router in routers(model.hf):
        shard(router)
    for layer in model.hf.model.layers:
        shard(layer, mp_policy=precision)
    shard(model, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
