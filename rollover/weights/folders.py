"""Versions of the weights as model folders, for engines in other processes; and folders with their ends untied.

What it keeps true: a folder of this name is complete, or is not there; the version before the newest stays, since an
engine may still be reading it; older ones are gone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.errors import ResourceError, is_full, system_error
from rollover.hf.companions import read_companions, write_companions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_KEPT = 2
_OURS = re.compile(r"v\d+|\.partial-.*")


class WeightFolders:
    """``root/v<version>``, each with ``model.safetensors`` and the config and tokenizer of the model it is ``like``.

    Number formats are those of the weights in ``like``: a model that came in bfloat16 is served in bfloat16. Where
    ``like`` has an output matrix of its own and the weights are tied, the input matrix is written twice.
    """

    def __init__(self, root: Path, *, like: Path) -> None:
        self._root = root
        self._companions = read_companions(like)
        self._formats = _formats(like)
        self._written: list[Path] = []

    def write(self, version: int, weights: Mapping[str, Tensor]) -> Path:
        """The folder of a version. Blocks while it is written.

        Raises ``ResourceError`` when the disk is full; earlier folders are then intact.
        """
        from safetensors import SafetensorError

        try:
            self._root.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._root))
            partial.chmod(0o755)
            try:
                self._fill(partial, weights)
                folder = self._root / f"v{version}"
                if folder.exists():
                    shutil.rmtree(folder)
                os.rename(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except (OSError, SafetensorError) as e:
            if not is_full(e):
                raise system_error(e) or e from None
            raise ResourceError(
                f"no space left for weights version {version} in {self._root}: make room, or set"
                " engine.weights_dir to a place on another disk"
            ) from e
        self._written = [*(f for f in self._written if f != folder), folder][-_KEPT:]
        self._prune()
        return folder

    def _fill(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        write_companions(self._companions, folder)
        formats = self._formats
        if _HEAD in formats and _HEAD not in weights:
            weights = {**weights, _HEAD: weights[_EMBEDDING].clone()}
        tensors = {
            name: tensor.detach().to("cpu", formats.get(name, tensor.dtype)).contiguous()
            for name, tensor in weights.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _prune(self) -> None:
        for path in self._root.iterdir():
            if _OURS.fullmatch(path.name) and path not in self._written:
                with suppress(OSError):  # a server may hold a file of it open on a network file system
                    shutil.rmtree(path)


def _formats(model: Path) -> Mapping[str, torch.dtype]:
    """Number formats by weight."""
    import torch
    from safetensors import safe_open

    known = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    formats = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                if (dtype := known.get(file.get_slice(name).get_dtype())) is not None:
                    formats[name] = dtype
    return formats


def untied(model: Path, target: Path) -> Path:
    """A folder with the model of ``model`` and an output matrix of its own: ``model`` itself when its config says so,
    else a copy in ``target``, with one matrix twice where there is one."""
    config_file = model / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return model
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))
    tensors = {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    for name, twin in ((_HEAD, _EMBEDDING), (_EMBEDDING, _HEAD)):
        if name not in tensors:
            tensors[name] = tensors[twin].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
