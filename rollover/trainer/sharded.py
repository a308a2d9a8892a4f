"""The policy sharded over ranks by FSDP2 (``torch.distributed.fsdp.fully_shard``): each holds its rows of every tensor.

The model is made without storage, tied, sharded layer by layer and as a whole, and only then given memory, into which
each rank reads its own rows. Three settings are not FSDP2's defaults, and training would be wrong without them:

* The root too frees its weights after a forward pass. By default embedding, output matrix and last norm stay whole
  after a pass without a backward one, and an optimizer that is made then trains tensors that nobody uses.
* Gradients are summed over ranks and not averaged, for every denominator counts the whole batch. gloo has no scaled
  sum, so the sum has to be asked for by name.
* The rotary module is made anew: its buffers are in no checkpoint.

Master weights are float32. With ``dtype = "bfloat16"`` they are gathered in bfloat16 for the passes, and gradients are
summed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from rollover.errors import ModelError
from rollover.hf.companions import Companions, without_own_files, write_companions
from rollover.hf.config import read_model_config
from rollover.hf.weights import EMBEDDING, HEAD, TensorInfo, read_header, read_weight_infos
from rollover.trainer.checkpoint import (
    MOMENTS,
    OPTIMIZER,
    DamagedCheckpoint,
    check_moments,
    generator_states,
    is_generator,
    optimizer_files,
)
from rollover.trainer.config import TrainerConfig
from rollover.trainer.logprobs import OneForward
from rollover.trainer.shares import fill_rows, owners, part_name, write_share
from rollover.trainer.world import World
from rollover.weights.base import WeightSource


class ShardedPolicy:
    """All weights are trained, in float32, a part of each tensor on each rank. Implements ``Policy``.

    Args:
        folder: the model or checkpoint to begin from.
        initial: the model that the run began with, of which a frozen copy is kept, sharded too, when ``needs_ref``.
        world: the ranks that share the model, with their devices.

    Example: of a model of 4 B parameters on 8 ranks each holds 2 GB of weights, and 8 GB with gradients and moments.
    """

    autocast = False  # the weights are gathered in the number format of the passes

    def __init__(
        self,
        config: TrainerConfig,
        folder: Path,
        *,
        initial: Path,
        needs_ref: bool,
        world: World,
    ) -> None:
        self._world = world
        self.model = load_sharded(folder, config, world)
        self._ref_model = load_sharded(initial, config, world).requires_grad_(False) if needs_ref else None

    def weights(self) -> Mapping[str, Tensor]:
        """Return the sharded weights by Hugging Face name."""
        return sharded_weights(self.model)

    def source(self, version: int) -> WeightSource:
        raise AssertionError("no rank has all weights to publish: each writes its share")

    def reference(self) -> AbstractContextManager[Any]:
        assert self._ref_model is not None, "the algorithm said that it needs one"
        return nullcontext(self._ref_model)

    def write(self, folder: Path, *, companions: Companions) -> None:
        """Write this rank's share; the first one adds config and tokenizer."""
        hf = self.model.hf
        if self._world.rank == 0:
            write_companions(without_own_files(companions), folder)
            hf.config.architectures = [type(hf).__name__]
            hf.config.save_pretrained(folder)
        weights = self.weights()
        path = folder / part_name("model", self._world.rank, self._world.size)
        write_share(self._world, weights, path, weight_owners(weights, self._world))

    def write_state(self, folder: Path, optimizer: AdamW) -> None:
        """Write the moments of the tensors whose weights this rank writes; the first one adds the generators."""
        world = self._world
        moments, owned_by = {}, {}
        for name, owner in weight_owners(self.weights(), world).items():
            for moment, value in optimizer.state.get(self.model.hf.get_parameter(name), {}).items():
                moments[f"{moment}/{name}"], owned_by[f"{moment}/{name}"] = value, owner
        path = folder / OPTIMIZER
        path = path.with_name(part_name(path.stem, world.rank, world.size))
        path.parent.mkdir(exist_ok=True)
        write_share(world, moments, path, owned_by, extra=generator_states() if world.rank == 0 else None)

    def read_state(self, folder: Path, optimizer: AdamW) -> None:
        """Read this rank's rows of the moments."""
        infos: dict[str, TensorInfo] = {}
        for path in optimizer_files(folder):
            try:
                infos |= read_header(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DamagedCheckpoint(folder, f"{path} cannot be read ({error})") from error
        infos = {name: info for name, info in infos.items() if not is_generator(name)}
        if not infos:
            return  # no step has been trained
        parameters = {name: p for name, p in self.model.hf.named_parameters() if p.requires_grad}
        check_moments(path, {name: info.shape for name, info in infos.items()}, parameters)
        wanted: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            state = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS if moment != "step"}
            wanted |= {f"{moment}/{name}": value for moment, value in state.items()}
            with safe_open(infos[f"step/{name}"].file, framework="pt") as file:
                optimizer.state[parameter] = {**state, "step": file.get_tensor(f"step/{name}").to(parameter.device)}
        fill_rows(self._world, wanted, {name: info.file for name, info in infos.items()}, {})


def weight_owners(weights: Mapping[str, Tensor], world: World) -> dict[str, int]:
    """Say which rank writes each of the weights."""
    return owners({name: tensor.numel() for name, tensor in weights.items()}, world.size)


def sharded_weights(model: OneForward) -> dict[str, Tensor]:
    """Return the parameters by their Hugging Face names, as they are held; a tied matrix appears once.

    All are sharded: one that is not was left behind by a pass, and nothing that is done to it lasts.
    """
    found = {name: parameter.detach() for name, parameter in model.hf.named_parameters()}
    whole = [name for name, tensor in found.items() if not isinstance(tensor, DTensor)]
    assert not whole, f"{whole[0]} is not sharded"
    return found


def load_sharded(folder: Path, config: TrainerConfig, world: World) -> OneForward:
    """Load the model in ``folder``, of which each rank reads its own rows; see ``models.load_policy``.

    Raises ``ModelError`` for folders that ``read_model_config`` refuses and for weights that do not fit their config.
    """
    assert world.mesh is not None, "a trainer alone has nothing to shard"
    read_model_config(folder)
    infos = read_weight_infos(folder)
    hf = _without_storage(folder, infos)
    names = _names_in_files(folder, hf, infos)
    if config.gradient_checkpointing:
        for layer in hf.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    model = OneForward(hf)
    _shard(model, config, world.mesh)
    is_tied = HEAD not in dict(hf.named_parameters())
    device = torch.device(world.mesh.device_type)
    model.to_empty(device=device)
    if is_tied:  # giving it memory has made two of one
        hf.lm_head.weight = hf.model.embed_tokens.weight
    with device:
        hf.model.rotary_emb = type(hf.model.rotary_emb)(hf.config)
    try:
        fill_rows(world, sharded_weights(model), {name: info.file for name, info in infos.items()}, names)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error
    return model


def _without_storage(folder: Path, infos: Mapping[str, TensorInfo]) -> Any:
    """Return the model of the folder's config, in float32, with no memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollover.trainer.attention import PACKED_ATTENTION

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        # As the weights have it, which overrule the config where they differ.
        config.tie_word_embeddings = bool(config.tie_word_embeddings) and _may_be_one(infos)
        config.dtype = torch.float32
        make: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            hf = make(config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model folder {str(folder)!r} cannot be loaded: {error}") from error
    if config.tie_word_embeddings:
        hf.lm_head.weight = hf.model.embed_tokens.weight
    return hf.eval()


def _may_be_one(infos: Mapping[str, TensorInfo]) -> bool:
    """Say whether the input and the output matrix in the files can be one tensor: there are not two that differ."""
    if not {EMBEDDING, HEAD} <= infos.keys():
        return True
    with (
        safe_open(infos[EMBEDDING].file, framework="pt") as one,
        safe_open(infos[HEAD].file, framework="pt") as other,
    ):
        embedding, head = one.get_slice(EMBEDDING), other.get_slice(HEAD)
        if embedding.get_shape() != head.get_shape():
            return False
        rows = embedding.get_shape()[0]
        parts = (slice(start, min(start + 4096, rows)) for start in range(0, rows, 4096))
        return all(torch.equal(embedding[part].float(), head[part].float()) for part in parts)


def _names_in_files(folder: Path, hf: Any, infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the names that parameters have in the files where those are others. Raises ``ModelError`` when the files
    do not fit the model."""
    shapes = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    names = {EMBEDDING: HEAD} if HEAD not in shapes and EMBEDDING not in infos and HEAD in infos else {}
    expected = {names.get(name, name): shape for name, shape in shapes.items()}
    for name, shape in expected.items():
        problem = None
        if name not in infos:
            problem = "missing keys"
        elif infos[name].shape != shape:
            problem = "mismatched keys"
        if problem is not None:
            raise ModelError(f"model folder {str(folder)!r}: weights do not fit config.json: {problem}: {name}")
    twin = {EMBEDDING, HEAD} if HEAD not in shapes else set()
    for name in sorted(infos.keys() - expected.keys() - twin):
        if not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"model folder {str(folder)!r}: weights do not fit config.json: unexpected keys: {name}")
    return names


def _shard(model: OneForward, config: TrainerConfig, mesh: DeviceMesh) -> None:
    """Shard each layer, and the rest with the root; all weights are freed after each pass."""
    precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.hf.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
