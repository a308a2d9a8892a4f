"""The two weight sources: tensors in this process's memory, and a Hugging Face folder whose tensors are read lazily."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.errors import ModelError
from rollover.hf.weights import read_weight_infos
from rollover.weights.base import Manifest, TensorSpec, specs_of

if TYPE_CHECKING:
    from torch import Tensor


class MemoryWeights:
    """Full weights of ``version`` in this process, by parameter name. The tensors are passed on, not copied.

    Example: ``MemoryWeights(7, model.state_dict())`` lets the embedded engine copy straight out of the trainer.
    """

    folder: Path | None = None

    def __init__(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.manifest = Manifest(version=version, tensors=specs_of(tensors))

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._tensors[name]) for name in (self._tensors if names is None else names))


class FolderWeights:
    """Full weights of ``version`` in a Hugging Face folder. A tensor is read when it is requested.

    Example: ``FolderWeights(0, Path("models/qwen")).manifest`` reads only the headers of the safetensors files.
    """

    def __init__(self, version: int, folder: Path) -> None:
        self._version = version
        self.folder: Path | None = folder
        self._path = folder

    @cached_property
    def manifest(self) -> Manifest:
        """Read the names, shapes and number formats of the tensors. Raises ``ModelError`` when they cannot be read."""
        specs = (
            TensorSpec(name=name, shape=info.shape, dtype=info.dtype)
            for name, info in read_weight_infos(self._path).items()
        )
        return Manifest(version=self._version, tensors=tuple(specs))

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        infos = read_weight_infos(self._path)
        wanted = list(infos if names is None else names)
        with ExitStack() as stack:
            try:
                files = {
                    file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                    for file in dict.fromkeys(infos[name].file for name in wanted)
                }
            except (SafetensorError, OSError) as e:
                raise ModelError(f"the weights in {self._path} cannot be read: {e}") from e
            for name in wanted:
                yield name, files[infos[name].file].get_tensor(name)
