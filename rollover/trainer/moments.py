"""The optimizer's state of a sharded model in a checkpoint: split by owner, as the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim import AdamW

from rollover.hf.weights import TensorInfo, read_header
from rollover.trainer.checkpoint import (
    MOMENTS,
    OPTIMIZER,
    DamagedCheckpoint,
    check_moments,
    generator_states,
    is_generator,
    optimizer_files,
    with_moments,
)
from rollover.trainer.shares import fill_rows, owners_of, part_name, write_share
from rollover.trainer.world import World


def write_moments(world: World, folder: Path, hf: Any, optimizer: AdamW) -> None:
    """Write this rank's share of the moments of all trained parameters; the first rank adds the generators."""
    parameters = trained_parameters(hf)
    moments, owned_by = {}, {}
    for name, owner in owners_of(parameters, world).items():
        for moment, value in optimizer.state.get(parameters[name], {}).items():
            moments[f"{moment}/{name}"], owned_by[f"{moment}/{name}"] = value, owner
    path = folder / OPTIMIZER
    path = path.with_name(part_name(path.stem, world.rank, world.size))
    path.parent.mkdir(exist_ok=True)
    write_share(world, moments, path, owned_by, extra=generator_states() if world.rank == 0 else None)


def read_moments(world: World, folder: Path, hf: Any, optimizer: AdamW) -> None:
    """Read this rank's rows of the moments into ``optimizer``. Raises ``ModelError`` naming the first tensor that does
    not fit the model, ``DamagedCheckpoint`` for files that cannot be read."""
    infos: dict[str, TensorInfo] = {}
    for path in optimizer_files(folder):
        try:
            infos |= read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(folder, f"{path} cannot be read ({error})") from error
    infos = {name: info for name, info in infos.items() if not is_generator(name)}
    if not infos:
        return  # no step has been trained yet
    parameters = with_moments(infos, trained_parameters(hf))
    check_moments(path, {name: info.shape for name, info in infos.items()}, parameters)
    wanted: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS if moment != "step"}
        wanted |= {f"{moment}/{name}": value for moment, value in state.items()}
        with safe_open(infos[f"step/{name}"].file, framework="pt") as file:
            optimizer.state[parameter] = {**state, "step": file.get_tensor(f"step/{name}").to(parameter.device)}
    fill_rows(world, wanted, {name: info.file for name, info in infos.items()}, {})


def trained_parameters(hf: Any) -> dict[str, Tensor]:
    """Return the parameters with a gradient, by name."""
    return {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}
