"""Turns the joint projection of a layer into its rotated queries and keys (Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollover.engine.embedded.model import Layer
from rollover.engine.embedded.ops import TorchMatrix, unit_rms
from rollover.hf.architecture import Architecture


class Rotary:
    """Holds the angles of every position: ``cosines`` and ``sines`` are ``[positions, D / 2]``."""

    def __init__(self, arch: Architecture, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.norm_eps = arch.norm_eps
        self.scale = arch.head_dim**-0.5 / math.log(2)
        """The factor that makes products of queries and keys exponents of 2."""
        angles = torch.outer(torch.arange(max_positions).float(), torch.tensor(arch.inv_freq))
        self.cosines, self.sines = angles.cos().to(device, dtype), angles.sin().to(device, dtype)


class Heads:
    """Rotates tokens at some positions."""

    def __init__(self, rotary: Rotary, positions_T: Tensor) -> None:
        self._rotary = rotary
        cosines, sines = rotary.cosines.index_select(0, positions_T), rotary.sines.index_select(0, positions_T)
        self._cosines_T1D = torch.cat([cosines, cosines], -1).unsqueeze(1)
        self._sines_T1D = torch.cat([-sines, sines], -1).unsqueeze(1)

    def __call__(self, layer: Layer[TorchMatrix], qkv_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, H, D]``, keys and values ``[T, K, D]`` of ``[T, (H + 2 K) D]``."""
        r = self._rotary
        heads = qkv_TF.view(len(qkv_TF), -1, r.head_dim)
        qk_TED, values_TKD = heads.split([r.num_heads + r.num_kv_heads, r.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_TED = unit_rms(qk_TED, r.norm_eps)
            qk_TED[:, : r.num_heads].mul_(layer.q_norm)
            qk_TED[:, r.num_heads :].mul_(layer.k_norm)
        swapped_TED = qk_TED.roll(r.head_dim // 2, -1)
        q_THD, keys_TKD = (
            qk_TED.mul_(self._cosines_T1D)
            .addcmul_(swapped_TED, self._sines_T1D)
            .split([r.num_heads, r.num_kv_heads], 1)
        )
        return q_THD, keys_TKD, values_TKD
