"""Weights that a worker has fetched: a source for an engine in this process, and a model folder for any other."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.hf.companions import write_companions
from rollover.hf.folder import PARTIAL, write_folder
from rollover.hf.raw_tensors import RawTensor, write_raw_tensors
from rollover.swarm.publication.manifest import PublicationManifest
from rollover.swarm.publication.materialise import TensorBytes
from rollover.weights.base import Manifest

if TYPE_CHECKING:
    from torch import Tensor

_KEPT = 2
_OURS = re.compile(rf"e\d+v\d+-[0-9a-f]{{16}}|{re.escape(PARTIAL)}.*")


class FetchedWeights:
    """One version of the weights, verified tensor by tensor; a ``WeightSource``.

    Tensors that have not changed are shared with the version before: they are never written to.
    """

    def __init__(
        self,
        digest: str,
        publication: PublicationManifest,
        contents: TensorBytes,
        files: Mapping[str, bytes],
        *,
        wire_bytes: int,
        prepare_s: float,
    ) -> None:
        self.digest = digest
        """The name of the manifest's blob."""
        self.publication = publication
        self.contents = contents
        self.files = files
        """Config and tokenizer by file name."""
        self.wire_bytes = wire_bytes
        """Received to make them."""
        self.prepare_s = prepare_s
        self.folder: Path | None = None

    @property
    def version(self) -> int:
        return self.publication.version

    @cached_property
    def manifest(self) -> Manifest:
        return self.publication.weights

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensors[name]) for name in (self._tensors if names is None else names))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        import torch

        return {
            tensor.name: torch.from_numpy(self.contents[tensor.name])
            .view(getattr(torch, tensor.dtype))
            .reshape(tensor.shape)
            for tensor in self.publication.tensors
        }

    def write_folder(self, root: Path) -> Path:
        """Write the folder ``root/e<epoch>v<version>-<digest>`` and return it; ``folder`` is then this one.

        Of the older ones in ``root`` one stays, since an engine may still be reading it. Raises ``ResourceError`` when
        the disk is full; older folders are then intact.
        """
        folder = root / f"e{self.publication.run_epoch}v{self.version}-{self.digest[:16]}"
        if not folder.exists():
            write_folder(folder, self._fill, remedy="make room on the worker's disk", durable=False)
        self.folder = folder
        ours = [path for path in root.iterdir() if _OURS.fullmatch(path.name) and path != folder]
        for path in sorted(ours, key=lambda path: path.stat().st_mtime)[: -(_KEPT - 1)]:
            with suppress(OSError):  # an engine may hold a file of it open on a network file system
                shutil.rmtree(path)
        return folder

    def _fill(self, folder: Path) -> None:
        write_companions(self.files, folder)
        raw = {
            t.name: RawTensor(shape=t.shape, dtype=t.dtype, content=self.contents[t.name])
            for t in self.publication.tensors
        }
        write_raw_tensors(folder / "model.safetensors", raw)
