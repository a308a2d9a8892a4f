"""Weights split by owner: every rank writes the whole tensors that it owns, and no rank ever holds the whole model.

A sharded tensor is gathered by all ranks, one after another, and kept only by its owner. The files are those of a
Hugging Face folder in parts, ``model-00001-of-00002.safetensors`` and so on with an index, so any code that opens model
folders opens these; the files of the optimizer's state are split in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollover.hf.weights import INDEX_FILE, read_weight_infos, weight_files
from rollover.trainer.balancing import by_longest_first
from rollover.trainer.hub_names import Parts, joined
from rollover.trainer.world import World
from rollover.weights.base import unmade

CHECK_S = 5.0
"""Time between two looks at whether what a rank writes has grown."""


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Assign an owner to each tensor, given their sizes, so that each rank has about the same number of bytes."""
    names = list(sizes)
    assigned = by_longest_first(list(sizes.values()), num_ranks)
    return {names[i]: rank for rank, own in enumerate(assigned) for i in own}


def owners_of(tensors: Mapping[str, Tensor], world: World) -> dict[str, int]:
    """Return which rank owns each of the tensors."""
    return owners({name: tensor.numel() for name, tensor in unmade(tensors).items()}, world.size)


def part_name(stem: str, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file: ``model-00001-of-00002.safetensors`` for rank 0 of 2, ``model.safetensors`` for
    a rank alone."""
    if num_ranks == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{rank + 1:05}-of-{num_ranks:05}.safetensors"


def write_share(
    world: World,
    tensors: Mapping[str, Tensor],
    path: Path,
    owned_by: Mapping[str, int],
    *,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the tensors of ``owned_by`` that this rank owns into the file ``path``, along with ``extra``. All ranks
    call it with the same names in the same order.

    Args:
        tensors: by name; DTensors are gathered.
    """
    own = {**(extra or {}), **own_tensors(world, tensors, owned_by)}
    with ThreadPoolExecutor(1) as writer:
        writing, before = writer.submit(save_file, own, path, metadata={"format": "pt"}), -1
        while not wait([writing], CHECK_S).done:
            if (blocks := _blocks(path.parent)) != before:
                before = blocks
                world.tick()
        writing.result()


def _blocks(folder: Path) -> int:
    """Return how much space the files of a folder take, some of which may be renamed meanwhile."""
    blocks = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            blocks += path.stat().st_blocks
    return blocks


def own_tensors(world: World, tensors: Mapping[str, Tensor], owned_by: Mapping[str, int]) -> dict[str, Tensor]:
    """Gather the tensors of ``owned_by`` one after another, and return the tensors that this rank owns, on the CPU. All
    ranks call it with the same names in the same order."""
    own: dict[str, Tensor] = {}
    for name, owner in owned_by.items():
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if owner == world.rank:
            own[name] = whole.to("cpu", copy=whole is tensor).contiguous()
        world.tick()
    return own


def write_weights(world: World, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write this rank's part of a model folder."""
    path = folder / part_name("model", world.rank, world.size)
    write_share(world, weights, path, owners_of(weights, world))


def write_index(folder: Path) -> None:
    """Write the index of a model folder in parts, from the headers of its files. A folder with a single file needs
    none."""
    if len(weight_files(folder)) == 1:
        return
    infos = read_weight_infos(folder)
    index = {
        "metadata": {"total_size": sum(info.num_bytes for info in infos.values())},
        "weight_map": {name: info.file.name for name, info in sorted(infos.items())},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def local_rows(parameter: Tensor, world: World) -> slice:
    """Return the rows of the whole tensor that this rank holds, as FSDP2 assigns them: ``ceil(rows / size)`` for each,
    and the remainder for the last.
    """
    rows = parameter.shape[0]
    each = -(-rows // world.size)
    return slice(min(world.rank * each, rows), min((world.rank + 1) * each, rows))


def take_rows(world: World, wanted: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows of whole tensors into sharded ones of the same names."""
    for name, target in wanted.items():
        assert isinstance(target, DTensor), f"{name} is not sharded"
        with torch.no_grad():
            target.to_local().copy_(whole[name][local_rows(target, world)])


def fill_rows(world: World, wanted: Mapping[str, Tensor], stored: Mapping[str, Path], names: Mapping[str, str]) -> None:
    """Read only this rank's rows of tensors in safetensors files into sharded tensors.

    Args:
        wanted: sharded tensors, by name.
        stored: the file of each tensor by its name there.
        names: the name of a tensor there, if it has another one.
    """
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name in wanted:
        own_name = names.get(name, name)
        by_file.setdefault(stored[own_name], []).append((name, own_name))
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name, own_name in inside:
                target = wanted[name]
                whole = slice(0, len(target))  # a buffer is not sharded
                rows = local_rows(target, world) if isinstance(target, DTensor) else whole
                local = target.to_local() if isinstance(target, DTensor) else target
                assert local.shape[0] == rows.stop - rows.start, f"{name} is sharded in another way"
                if rows.stop > rows.start:
                    with torch.no_grad():
                        local.copy_(opened.get_slice(own_name)[rows])
                world.tick()


def fill_joined(world: World, hf: Any, wanted: Mapping[str, Tensor], parts: Parts, stored: Mapping[str, Path]) -> None:
    """Read only this rank's rows of tensors that files hold in parts, such as one for each expert.

    Args:
        wanted: sharded tensors by their names in the model ``hf``, each with several ``parts``.
        stored: the file of each part by its name there.
    """
    for name, target in wanted.items():
        assert isinstance(target, DTensor), f"{name} is not sharded"
        rows, num, names = local_rows(target, world), len(target), list(parts[name])
        own = [part for start in range(0, len(names), num) for part in names[start : start + num][rows]]
        if own:
            whole = joined(hf, name, {part: _read(stored[part], part) for part in own})
            with torch.no_grad():
                target.to_local().copy_(whole)
        world.tick()


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
