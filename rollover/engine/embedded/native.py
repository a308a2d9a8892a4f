"""Fused kernels for decoding on a CPU, compiled when they are first needed.

PyTorch's operations read and write every intermediate and cost some microseconds each; here attention over the paged
cache is one pass over it, and products with few rows run at the speed of memory. Arithmetic is in float32, also over
bfloat16 weights. The results are those of ``ops``, ``decode`` and ``sampler`` up to rounding, and do not depend on who
else is in the batch. The library is built in a directory of its own and loaded at once: nothing stays
on disk, and nothing built elsewhere is ever loaded.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.engine.embedded.model import Layer
from rollover.engine.embedded.pages import Ints, PagedKV
from rollover.engine.embedded.rotary import Rotary
from rollover.errors import EngineError

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # what lets sums and maxima use vectors; infinities and not-a-numbers keep their meaning
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class Kernels:
    """The functions of the compiled library. The last argument of each is the number of threads: PyTorch's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, *arguments: type) -> Callable[..., None]:
            found = library[name]
            found.argtypes, found.restype = [*arguments, _INT], None
            return lambda *values: found(*values, torch.get_num_threads())

        p, n, f, i = _POINTER, _SIZE, _FLOAT, _INT
        self.rms_norm = function("rms_norm", p, p, f, p, n, n)
        self.silu_product = function("silu_product", p, p, n, n)
        self.draw_tokens = function("draw_tokens", p, p, p, p, p, n, n)
        self.decode_attention = function("decode_attention", p, p, p, f, p, p, p, p, p, n, p, p, n, n)
        self.pack = {dtype: function(f"pack_{name}", p, n, n, n, p) for dtype, name in _NAMES.items()}
        self.matmul = {dtype: function(f"matmul_{name}", p, p, p, n, n, n, i) for dtype, name in _NAMES.items()}
        self.panel_width = int(library.panel_width())


class PackedMatrix:
    """Weights in panels of some outputs, each read once, from its beginning to its end, per product."""

    def __init__(self, kernels: Kernels, in_size: int, out_size: int, dtype: torch.dtype) -> None:
        self._pack, self._matmul = kernels.pack[dtype], kernels.matmul[dtype]
        self._in_size, self._out_size, self._dtype = in_size, out_size, dtype
        padded = -(-out_size // kernels.panel_width) * kernels.panel_width
        self._packed = torch.zeros(padded * in_size, dtype=dtype)

    def fill(self, first_row: int, weights_OI: Tensor) -> None:
        weights_OI = weights_OI.to("cpu", self._dtype).contiguous()
        self._pack(weights_OI.data_ptr(), len(weights_OI), self._in_size, first_row, self._packed.data_ptr())

    def times(self, x_TI: Tensor) -> Tensor:
        out = x_TI.new_empty(x_TI.shape[0], self._out_size)
        self._multiply(x_TI, out, add=False)
        return out

    def add_times(self, x_TI: Tensor, sum_TO: Tensor) -> None:
        self._multiply(x_TI, sum_TO, add=True)

    def _multiply(self, x_TI: Tensor, out_TO: Tensor, *, add: bool) -> None:
        assert x_TI.is_contiguous() and out_TO.is_contiguous() and x_TI.dtype == torch.float32
        self._matmul(
            *(x_TI.data_ptr(), self._packed.data_ptr(), out_TO.data_ptr()),
            *(x_TI.shape[0], self._in_size, self._out_size, add),
        )


class NativeOps:
    """Implements ``Ops`` in float32, over weights of either type."""

    dtype = torch.float32

    def __init__(self, kernels: Kernels, weight_dtype: torch.dtype) -> None:
        self.kernels, self.weight_dtype = kernels, weight_dtype

    def matrix(self, in_size: int, out_size: int) -> PackedMatrix:
        return PackedMatrix(self.kernels, in_size, out_size, self.weight_dtype)

    def tied_matrix(self, embedding_OI: Tensor) -> PackedMatrix:
        return self.matrix(embedding_OI.shape[1], len(embedding_OI))

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x_TH)
        self.kernels.rms_norm(x_TH.data_ptr(), weight_H.data_ptr(), eps, out.data_ptr(), *x_TH.shape)
        return out

    def silu_product(self, gate_up_TF: Tensor) -> Tensor:
        num_tokens, width = gate_up_TF.shape
        out = gate_up_TF.new_empty(num_tokens, width // 2)
        self.kernels.silu_product(gate_up_TF.data_ptr(), out.data_ptr(), num_tokens, width // 2)
        return out

    def draw_tokens(
        self, logits_BV: Tensor, temperatures_B: NDArray[np.float32], uniforms_B: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        logits_BV = logits_BV.contiguous()
        rows, size = logits_BV.shape
        greedy_B = temperatures_B == 0
        scales_B = np.float32(1 / math.log(2)) / np.where(greedy_B, np.float32(1), temperatures_B)
        noise_B = np.where(greedy_B, -1.0, uniforms_B)
        tokens_B, logprobs_B = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self.kernels.draw_tokens(
            *(logits_BV.data_ptr(), scales_B.ctypes.data, noise_B.ctypes.data),
            *(tokens_B.data_ptr(), logprobs_B.data_ptr(), rows, size),
        )
        return tokens_B, logprobs_B


@lru_cache
def compiled(head_dim: int, block_size: int, group: int) -> Kernels:
    """For these sizes. Raises ``EngineError`` where there is no compiler or it refuses."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise EngineError(
            f"cpu_kernels = 'compiled' needs a C compiler: none of {', '.join(_COMPILERS)} is on the PATH"
        )
    sizes = (f"-DHEAD_DIM={head_dim}", f"-DBLOCK={block_size}", f"-DGROUP={group}")
    with tempfile.TemporaryDirectory(prefix="rollover-kernels-") as folder:
        library = Path(folder) / "kernels.so"
        source = Path(__file__).with_name("kernels.c")
        command = [compiler, *_FLAGS, *sizes, "-o", str(library), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise EngineError(f"{compiler} could not compile the CPU kernels: {done.stderr.strip()[:1000]}")
        return Kernels(ctypes.CDLL(str(library)))


class NativeDecodeAttention:
    """One new token of each sequence. ``tables_BN`` are the block tables, ``lengths_B`` the tokens cached before it."""

    def __init__(self, kernels: Kernels, kv: PagedKV, rotary: Rotary, tables_BN: Ints, lengths_B: Ints) -> None:
        self._kernels, self._kv, self._rotary = kernels, kv, rotary
        self._tables_BN, self._lengths_B = np.ascontiguousarray(tables_BN), np.ascontiguousarray(lengths_B)

    def __call__(self, index: int, layer: Layer, qkv_BF: Tensor) -> Tensor:
        """``[B, H * D]``"""
        kv, rotary = self._kv, self._rotary
        out_BF = qkv_BF.new_empty(len(qkv_BF), rotary.num_heads * rotary.head_dim)
        q_norm, k_norm = (None if norm is None else norm.data_ptr() for norm in (layer.q_norm, layer.k_norm))
        self._kernels.decode_attention(
            *(qkv_BF.data_ptr(), q_norm, k_norm, rotary.norm_eps),
            *(rotary.cosines.data_ptr(), rotary.sines.data_ptr()),
            *(kv.keys[index].data_ptr(), kv.values[index].data_ptr()),
            *(self._tables_BN.ctypes.data, self._tables_BN.shape[1], self._lengths_B.ctypes.data),
            *(out_BF.data_ptr(), len(qkv_BF), kv.num_kv_heads),
        )
        return out_BF
