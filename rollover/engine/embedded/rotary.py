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
        self.norm_eps, self.layers = arch.norm_eps, arch.layers
        self.norms_heads = arch.family.qk_norm == "head"
        self.attention_scale = arch.attention_scale
        self.scale = arch.attention_scale / math.log(2)
        """The factor that makes products of queries and keys exponents of 2."""
        frequencies = torch.tensor(arch.rope.inv_freq)
        angles = torch.outer(torch.arange(max_positions).float(), frequencies)
        scales = torch.where(frequencies > 0, arch.rope.scale, 1.0)
        self.cosines, self.sines = ((scales * part).to(device, dtype) for part in (angles.cos(), angles.sin()))


class Heads:
    """Rotates tokens at some positions."""

    def __init__(self, rotary: Rotary, positions_T: Tensor) -> None:
        self._rotary = rotary
        cosines, sines = rotary.cosines.index_select(0, positions_T), rotary.sines.index_select(0, positions_T)
        self._cosines_T1D = torch.cat([cosines, cosines], -1).unsqueeze(1)
        self._sines_T1D = torch.cat([-sines, sines], -1).unsqueeze(1)

    def __call__(self, index: int, layer: Layer[TorchMatrix], qkv_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, H, D]``, keys and values ``[T, K, D]`` of ``[T, (H + 2 K) D]``."""
        r = self._rotary
        if not r.norms_heads:
            norm_all_heads(r, layer, qkv_TF)
        heads = qkv_TF.view(len(qkv_TF), -1, r.head_dim)
        qk_TED, values_TKD = heads.split([r.num_heads + r.num_kv_heads, r.num_kv_heads], 1)
        if r.norms_heads and layer.q_norm is not None and layer.k_norm is not None:
            qk_TED = unit_rms(qk_TED, r.norm_eps)
            qk_TED[:, : r.num_heads].mul_(layer.q_norm)
            qk_TED[:, r.num_heads :].mul_(layer.k_norm)
        if r.layers[index].rotates:
            swapped_TED = qk_TED.roll(r.head_dim // 2, -1)
            qk_TED = qk_TED.mul_(self._cosines_T1D).addcmul_(swapped_TED, self._sines_T1D)
        q_THD, keys_TKD = qk_TED.split([r.num_heads, r.num_kv_heads], 1)
        return q_THD, keys_TKD, values_TKD


def norm_all_heads(rotary: Rotary, layer: Layer[TorchMatrix], qkv_TF: Tensor) -> None:
    """Normalise all queries together and all keys together, in place, if the layer has norms of their widths."""
    first = 0
    for norm, num in ((layer.q_norm, rotary.num_heads), (layer.k_norm, rotary.num_kv_heads)):
        if norm is not None:
            part_TF = qkv_TF[:, first : first + num * rotary.head_dim]
            part_TF.copy_(unit_rms(part_TF, rotary.norm_eps).mul_(norm))
        first += num * rotary.head_dim
