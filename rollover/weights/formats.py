"""The number formats in which weights are served: the formats of the model that the run began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.hf.weights import EMBEDDING, HEAD, read_weight_infos

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ServedFormats:
    """The number format of each tensor of the model in the folder ``like``.

    A model that came in bfloat16 is served in bfloat16, whatever it is trained in. If ``like`` has an output matrix of
    its own and the weights are tied, the input matrix stands for both.

    Example: ``dict(ServedFormats(Path("models/qwen")).cast(trainer_weights))`` are tensors of this process's memory in
    bfloat16.
    """

    def __init__(self, like: Path) -> None:
        self._dtypes = {name: info.dtype for name, info in read_weight_infos(like).items()}

    def cast(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, on the CPU and contiguous, one at a time."""
        for name, tensor in weights.items():
            yield name, tensor.detach().to("cpu", self._dtype(name, tensor)).contiguous()
        if HEAD in self._dtypes and HEAD not in weights:
            tied = weights[EMBEDDING]
            yield HEAD, tied.detach().clone().to("cpu", self._dtype(HEAD, tied)).contiguous()

    def _dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        import torch

        known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return known.get(self._dtypes.get(name, ""), tensor.dtype)
