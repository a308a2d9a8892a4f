"""The decoder of the Llama, Qwen2 and Qwen3 families: embeddings, layers, logits.

Weights live in fused buffers (queries, keys and values in one matrix; gate and up in another).
``Decoder.named`` maps every Hugging Face parameter name to its part of a buffer, so loading is a copy in
place and the addresses of the buffers never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollover.engine.embedded.architecture import Architecture


class Attention(Protocol):
    """One iteration's attention: where each token stands and what it attends to."""

    positions: Tensor

    def __call__(self, layer: int, q_THD: Tensor, keys_TKD: Tensor, values_TKD: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Layer:
    """Weights of one layer, ``[out, in]``."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """Weights are undefined until every tensor of ``named`` has been filled."""

    def __init__(
        self, arch: Architecture, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self.named: dict[str, Tensor] = {}
        self.embedding = self._empty("model.embed_tokens.weight", arch.vocab_size, arch.hidden_size)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(arch.num_layers)]
        self.norm = self._empty("model.norm.weight", arch.hidden_size)
        self.lm_head = self.embedding
        if not arch.tied_embeddings:
            self.lm_head = self._empty("lm_head.weight", arch.vocab_size, arch.hidden_size)
        angles = torch.outer(torch.arange(max_positions).float(), torch.tensor(arch.inv_freq))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], -1).to(device, dtype).unsqueeze(1)
        self._sin = torch.cat([-sin, sin], -1).to(device, dtype).unsqueeze(1)

    def logits(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        """``[T, vocab]``; writes the tokens' keys and values to the cache."""
        hidden_TH = self._hidden(token_ids_T, attention)
        return F.linear(self._normed(hidden_TH, self.norm), self.lm_head)

    def prefill(self, token_ids_T: Tensor, attention: Attention) -> None:
        """Only writes the cache."""
        self._hidden(token_ids_T, attention)

    def _hidden(self, token_ids_T: Tensor, attention: Attention) -> Tensor:
        arch = self.arch
        x_TH = F.embedding(token_ids_T, self.embedding)
        cos, sin = self._cos[attention.positions], self._sin[attention.positions]
        num_qk = arch.num_heads + arch.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv = F.linear(self._normed(x_TH, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv_TED = qkv.view(len(token_ids_T), -1, arch.head_dim)
            qk_TED, values_TKD = qkv_TED[:, :num_qk], qkv_TED[:, num_qk:]
            if layer.q_norm is not None and layer.k_norm is not None:
                q_THD = self._normed(qk_TED[:, : arch.num_heads], layer.q_norm)
                qk_TED = torch.cat([q_THD, self._normed(qk_TED[:, arch.num_heads :], layer.k_norm)], 1)
            qk_TED = qk_TED * cos + qk_TED.roll(arch.head_dim // 2, -1) * sin
            q_THD, keys_TKD = qk_TED[:, : arch.num_heads], qk_TED[:, arch.num_heads :]
            attended = attention(index, q_THD, keys_TKD, values_TKD)
            x_TH = x_TH + F.linear(attended, layer.output, layer.output_bias)
            gate, up = F.linear(self._normed(x_TH, layer.post_norm), layer.gate_up).chunk(2, -1)
            x_TH = x_TH + F.linear(F.silu(gate) * up, layer.down)
        return x_TH

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)

    def _empty(self, name: str, *shape: int) -> Tensor:
        """An uninitialised weight, known under its Hugging Face name."""
        self.named[name] = tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor

    def _fused(self, prefix: str, suffix: str, rows: dict[str, int], *columns: int) -> Tensor:
        """One buffer for several parameters, one below the other."""
        buffer = torch.empty((sum(rows.values()), *columns), dtype=self.dtype, device=self.device)
        for name, part in zip(rows, buffer.split(list(rows.values())), strict=True):
            self.named[f"{prefix}{name}.{suffix}"] = part
        return buffer

    def _layer(self, prefix: str) -> Layer:
        arch, attn = self.arch, f"{prefix}self_attn."
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        gate_up = {"gate_proj": arch.intermediate_size, "up_proj": arch.intermediate_size}
        return Layer(
            input_norm=self._empty(f"{prefix}input_layernorm.weight", arch.hidden_size),
            qkv=self._fused(attn, "weight", qkv, arch.hidden_size),
            qkv_bias=self._fused(attn, "bias", qkv) if arch.qkv_bias else None,
            q_norm=self._empty(f"{attn}q_norm.weight", arch.head_dim) if arch.qk_norm else None,
            k_norm=self._empty(f"{attn}k_norm.weight", arch.head_dim) if arch.qk_norm else None,
            output=self._empty(f"{attn}o_proj.weight", arch.hidden_size, q_size),
            output_bias=self._empty(f"{attn}o_proj.bias", arch.hidden_size) if arch.output_bias else None,
            post_norm=self._empty(f"{prefix}post_attention_layernorm.weight", arch.hidden_size),
            gate_up=self._fused(f"{prefix}mlp.", "weight", gate_up, arch.hidden_size),
            down=self._empty(f"{prefix}mlp.down_proj.weight", arch.hidden_size, arch.intermediate_size),
        )
