"""The optimizer's state in a checkpoint: Adam's moments by parameter name, and the states of PyTorch's generators.

One process writes one file. Ranks that share a model write one each, split by owner as the weights are. Any number of
ranks reads both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW

from rollover.errors import ModelError
from rollover.hf.weights import TensorInfo, read_header
from rollover.trainer.checkpoint import OPTIMIZER, DamagedCheckpoint, optimizer_files
from rollover.trainer.eight_bits import SCALES, AdamW8bit, scales_shape
from rollover.trainer.logprobs import OneForward
from rollover.trainer.shares import fill_rows, owners_of, part_name, write_share
from rollover.trainer.world import World

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The moments that AdamW keeps for each parameter."""


def write_moments(world: World, folder: Path, model: Any, optimizer: AdamW) -> None:
    """Write this rank's share of the moments of all trained parameters; the first rank adds the generators."""
    parameters, moments, owned_by = trained_parameters(model), {}, {}
    for name, owner in owners_of(parameters, world).items():
        for moment, value in optimizer.state.get(parameters[name], {}).items():
            moments[f"{moment}/{name}"], owned_by[f"{moment}/{name}"] = value, owner
    path = folder / OPTIMIZER
    path.parent.mkdir(exist_ok=True)
    if world.mesh is None:
        save_file({**_generator_states(), **{name: value.contiguous() for name, value in moments.items()}}, path)
        return
    path = path.with_name(part_name(path.stem, world.rank, world.size))
    write_share(world, moments, path, owned_by, extra=_generator_states() if world.rank == 0 else None)


def read_moments(world: World, folder: Path, model: Any, optimizer: AdamW) -> None:
    """Read this rank's rows of the moments into ``optimizer``; a process alone sets PyTorch's generators too.

    Raises:
        ModelError: names the first tensor that does not fit the model.
        DamagedCheckpoint: a file cannot be read.
    """
    read = _read_whole if world.mesh is None else _read_rows
    read(world, folder, trained_parameters(model), optimizer)


def trained_parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters with a gradient, by name."""
    named = (model.hf if isinstance(model, OneForward) else model).named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _read_whole(world: World, folder: Path, trained: Mapping[str, Tensor], optimizer: AdamW) -> None:
    tensors: dict[str, Tensor] = {}
    for path in optimizer_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DamagedCheckpoint(folder, f"{path} cannot be read ({error})") from error
    generators = {n: tensors.pop(n) for n in list(tensors) if _is_generator(n)}
    if tensors:
        parameters = _with_moments(tensors, trained)
        in_8_bits = optimizer.in_8_bits if isinstance(optimizer, AdamW8bit) else set()
        _check(path, {name: tuple(t.shape) for name, t in tensors.items()}, parameters, in_8_bits)
        for name, parameter in parameters.items():
            moments = (*MOMENTS, *SCALES) if parameter in in_8_bits else MOMENTS
            optimizer.state[parameter] = {m: tensors[f"{m}/{name}"].to(parameter.device) for m in moments}
    for name, state in generators.items():
        device, index = name.split("_generator/")
        if device == "cpu":
            torch.set_rng_state(state)
        elif int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(index))


def _read_rows(world: World, folder: Path, trained: Mapping[str, Tensor], optimizer: AdamW) -> None:
    infos: dict[str, TensorInfo] = {}
    for path in optimizer_files(folder):
        try:
            infos |= read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(folder, f"{path} cannot be read ({error})") from error
    infos = {name: info for name, info in infos.items() if not _is_generator(name)}
    if not infos:
        return  # no step has been trained yet
    parameters = _with_moments(infos, trained)
    _check(path, {name: info.shape for name, info in infos.items()}, parameters)
    wanted: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS if moment != "step"}
        wanted |= {f"{moment}/{name}": value for moment, value in state.items()}
        with safe_open(infos[f"step/{name}"].file, framework="pt") as file:
            optimizer.state[parameter] = {**state, "step": file.get_tensor(f"step/{name}").to(parameter.device)}
    fill_rows(world, wanted, {name: info.file for name, info in infos.items()}, {})


def _generator_states() -> dict[str, Tensor]:
    """Return the states of PyTorch's generators by the names that they have in a checkpoint."""
    tensors = {"cpu_generator/0": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_generator/{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def _is_generator(name: str) -> bool:
    return name.split("/")[0].endswith("_generator")


def _with_moments(moments: Collection[str], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of which a checkpoint has any moments. One without a gradient has none, such as a bias that
    only chooses experts."""
    return {name: p for name, p in parameters.items() if any(f"{moment}/{name}" in moments for moment in MOMENTS)}


def _check(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Tensor],
    in_8_bits: Collection[Tensor] = (),
) -> None:
    """Raise ``ModelError`` unless the moments in a checkpoint, which have these shapes, belong to the model's
    parameters."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters.items():
        expected |= {f"{m}/{name}": () if m == "step" else tuple(parameter.shape) for m in MOMENTS}
        if parameter in in_8_bits:
            expected |= {f"{scale}/{name}": scales_shape(parameter) for scale in SCALES}
    for name in sorted(expected.keys() | shapes.keys()):
        if name not in shapes:
            found = f"it lacks {name}"
        elif name not in expected:
            found = f"it has {name}, which the model does not have"
        elif shapes[name] != expected[name]:
            found = f"{name} has the shape {shapes[name]}, but the model needs {expected[name]}"
        else:
            continue
        raise ModelError(
            f"{path} does not match the model: {found}; resume with the model and the [trainer] settings that wrote it"
        )
