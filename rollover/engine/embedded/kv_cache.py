"""The tensors of the paged key-value cache; which sequence holds which block is decided in ``block_manager``.

Shapes: K key-value heads, D head dimension, S tokens of a block, T new tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.hf.architecture import Architecture

Ints = NDArray[np.int64]


class SlotMapping(NamedTuple):
    """The places where the keys and values of new tokens go: block and offset in it of each.

    Example:
        With blocks of 4 tokens and block table ``[6, 2]``, tokens 3 and 4 go to ``blocks_T = [6, 2]`` and
        ``offsets_T = [3, 0]``.
    """

    blocks_T: Tensor
    offsets_T: Tensor


class KVCache:
    """Keys ``[layers, num_blocks, K, D, S]`` and values ``[layers, num_blocks, K, S, D]``, zero at first.

    Keys lie transposed: products of a few queries with a block run at memory speed only if the tokens are
    adjacent, four times slower otherwise.
    """

    def __init__(
        self, arch: Architecture, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (arch.num_layers, num_blocks, arch.num_kv_heads, arch.head_dim, block_size)
        self._keys = zeros(*shape, dtype=dtype, device=device)
        self._values = zeros(*shape[:3], block_size, arch.head_dim, dtype=dtype, device=device)
        self.keys, self.values = self._keys.unbind(), self._values.unbind()  # of each layer
        self.num_kv_heads, self.block_size, self.head_dim = arch.num_kv_heads, block_size, arch.head_dim
        self.device = device

    def write(self, layer: int, slots: SlotMapping, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        self.keys[layer][slots.blocks_T, :, :, slots.offsets_T] = keys_TKD
        self.values[layer][slots.blocks_T, :, slots.offsets_T] = values_TKD

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy all at once: every source is read before any destination is written."""
        source, destination = torch.tensor(copies, device=self.device).unbind(1)
        for pool in (self._keys, self._values):
            pool[:, destination] = pool[:, source]

    def zero_(self) -> None:
        self._keys.zero_()
        self._values.zero_()

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU through numpy, whose huge pages take fewer translations of addresses to read."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
