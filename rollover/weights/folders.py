"""Versions of the weights as model folders, for servers that read them from disk.

A folder is complete, or it is not there. The version before the newest stays, since an engine may still be reading it;
older ones are deleted.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.hf.companions import read_companions, write_companions
from rollover.hf.folder import PARTIAL, write_folder
from rollover.hf.weights import EMBEDDING, read_weight_infos
from rollover.weights.adapters import AdapterSource
from rollover.weights.base import WeightSource
from rollover.weights.buckets import as_served
from rollover.weights.sources import FolderWeights

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = 2
_OURS = re.compile(rf"v\d+|{re.escape(PARTIAL)}.*")


class ServedFormats:
    """The number format of each tensor of the model in the folder ``like``.

    A model that came in bfloat16 is served in bfloat16, whatever it is trained in. If ``like`` has an output matrix of
    its own and the weights are tied, the input matrix stands for both."""

    def __init__(self, like: Path) -> None:
        self.dtypes = {name: info.dtype for name, info in read_weight_infos(like).items()}

    def cast(self, source: WeightSource) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, on the CPU and contiguous, one at a time."""
        import torch

        held, specs = source.manifest.tensors, as_served(source.manifest.tensors, self.dtypes)
        names = [*(spec.name for spec in held), *[EMBEDDING] * (len(specs) - len(held))]
        for spec, name, (_, tensor) in zip(specs, names, source.tensors(names), strict=True):
            dtype = getattr(torch, spec.dtype, tensor.dtype)
            yield spec.name, tensor.detach().to("cpu", dtype, copy=spec.name != name).contiguous()


class WeightFolders:
    """``root/v<version>``, each with ``model.safetensors``, in ``ServedFormats``, and the config and tokenizer of the
    model it is ``like``."""

    def __init__(self, root: Path, *, like: Path) -> None:
        self._root = root
        self._companions = read_companions(like)
        self.formats = ServedFormats(like)
        self._written: list[Path] = []

    def write(self, source: WeightSource) -> WeightSource:
        """Write the folder of a version, adapters alone in peft's format. Returns the weights in it, which hold no
        tensors. Blocks until it is written.

        Raises ``ResourceError`` when the disk is full; earlier folders are then intact.
        """
        version = source.manifest.version
        if isinstance(source, AdapterSource):
            return AdapterSource(version, source.adapters, folder=self._place(version, source.write))
        return FolderWeights(version, self._place(version, lambda partial: self._fill(partial, source)))

    def _place(self, version: int, fill: Callable[[Path], None]) -> Path:
        folder = self._root / f"v{version}"
        remedy = "make room, or set engine.weights_dir to a place on another disk"
        write_folder(folder, fill, remedy=remedy, durable=False)
        self._written = [*(f for f in self._written if f != folder), folder][-_KEPT:]
        for path in self._root.iterdir():
            if _OURS.fullmatch(path.name) and path not in self._written:
                with suppress(OSError):  # a server may keep a file in it open on a network file system
                    shutil.rmtree(path)
        return folder

    def _fill(self, folder: Path, source: WeightSource) -> None:
        from safetensors.torch import save_file

        write_companions(self._companions, folder)
        tensors = dict(self.formats.cast(source))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
