"""The decoder compiled for this machine: a whole iteration is one call.

PyTorch's operations read and write every intermediate, cost some microseconds each, and leave threads behind that look
for more work in the way of others. Here the threads go through an iteration together (``kernels.c``), from token ids to
logits. Arithmetic and cache are in float32, even over bfloat16 weights. Results equal ``TorchModelRunner``'s up to
rounding, and do not depend on the rest of the batch. The library is built in a directory of its own and loaded at once:
nothing stays on disk, and nothing built elsewhere is ever loaded.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollover.engine.embedded.experts import Experts
from rollover.engine.embedded.kv_cache import Ints, KVCache, zeros
from rollover.engine.embedded.model import Mlp, Weights
from rollover.engine.embedded.model_runner import InputBatch, RunnerSizes, wanted_routes
from rollover.engine.embedded.ops import ExpertMatrices
from rollover.engine.embedded.rotary import Rotary
from rollover.engine.embedded.sampler import Drawn, sample
from rollover.errors import EngineError
from rollover.hf.architecture import Architecture
from rollover.types import SamplingParams

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    # what lets sums and maxima use vectors; infinities and not-a-numbers keep their meaning
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
_TIMEOUT_S = 600
"""The deadline of a compilation, which takes seconds on an idle machine."""
_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("packed", _POINTER),
        ("in_size", _SIZE),
        ("out_size", _SIZE),
        ("bfloat16", _SIZE),
        ("gated", _SIZE),
        ("bias", _POINTER),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down", "router")),
        *((name, ctypes.POINTER(_Matrix)) for name in ("gate_ups", "downs")),
        *((name, _SIZE) for name in ("window", "rotates", "norms_all")),
        *(
            (name, _POINTER)
            for name in ("input_norm", "output_norm", "mlp_norm", "mlp_output_norm", "q_norm", "k_norm")
        ),
        *((name, _POINTER) for name in ("keys", "values")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _SIZE) for name in ("hidden", "num_kv", "num_layers", "bfloat16")),
        *((name, _SIZE) for name in ("num_experts", "per_token", "normalises")),
        *((name, _FLOAT) for name in ("eps", "embedding_scale", "attention_scale", "residual_scale", "logit_scale")),
        *((name, _POINTER) for name in ("embedding", "norm", "cosines", "sines")),
        ("lm_head", _Matrix),
        ("layers", ctypes.POINTER(_Layer)),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, _SIZE) for name in ("num_tokens", "num_runs", "width")),
        *((name, _POINTER) for name in ("token_ids", "positions", "rows", "run_starts", "run_lengths", "tables")),
        *((name, _POINTER) for name in ("x", "normed", "qkv", "mixed", "logits")),
        *(
            (name, _POINTER)
            for name in ("scores", "weights", "chosen", "places", "starts", "used", "gathered", "inner")
        ),
        *((name, _POINTER) for name in ("scales", "uniforms", "drawn", "logprobs")),
    )


class Kernels:
    """Calls the functions of the compiled library. The last argument of each is the number of threads: PyTorch's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, n = _POINTER, _SIZE
        library.pack.argtypes = [ctypes.POINTER(_Matrix), p, n, n, _INT]
        library.forward.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Batch), _INT]
        library.draw_tokens.argtypes = [p, p, p, p, p, n, n, _INT]
        self.pack, self.forward, self._draw_tokens = library.pack, library.forward, library.draw_tokens
        self.panel_width, self.longest_run = int(library.panel_width()), int(library.longest_run())
        self.apart = int(library.apart())

    def draw_tokens(
        self, logits_BV: Tensor, temperatures_B: NDArray[np.float32], uniforms_B: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Draw tokens as ``sampler.draw_tokens``."""
        logits_BV, drawing = logits_BV.contiguous(), Drawing(temperatures_B, uniforms_B)
        self._draw_tokens(logits_BV.data_ptr(), *drawing.addresses, *logits_BV.shape, torch.get_num_threads())
        return torch.from_numpy(drawing.tokens_B), torch.from_numpy(drawing.logprobs_B)


class Drawing:
    """Holds what the kernels need to draw a token from each row of logits, and the tokens drawn."""

    def __init__(self, temperatures_B: NDArray[np.float32], uniforms_B: NDArray[np.float64]) -> None:
        greedy_B = temperatures_B == 0
        self._scales_B = np.float32(1 / math.log(2)) / np.where(greedy_B, np.float32(1), temperatures_B)
        self._noise_B = np.where(greedy_B, -1.0, uniforms_B)
        self.tokens_B = np.empty(len(uniforms_B), dtype=np.int64)
        self.logprobs_B = np.empty(len(uniforms_B), dtype=np.float32)

    @property
    def addresses(self) -> tuple[int, ...]:
        arrays = (self._scales_B, self._noise_B, self.tokens_B, self.logprobs_B)
        return tuple(array.ctypes.data for array in arrays)


@lru_cache
def compiled(head_dim: int, block_size: int, group: int) -> Kernels:
    """Compile the kernels for these sizes. Raises ``EngineError`` where there is no compiler or it refuses."""
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
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{compiler} did not compile the CPU kernels within {_TIMEOUT_S} s") from None
        except OSError as error:
            raise EngineError(f"{compiler} cannot be started: {error}") from error
        if done.returncode:
            raise EngineError(f"{compiler} could not compile the CPU kernels: {done.stderr.strip()[:1000]}")
        try:
            return Kernels(ctypes.CDLL(str(library)))
        except OSError as error:
            raise EngineError(
                f"the compiled CPU kernels cannot be loaded: {error}; set TMPDIR to a folder whose programs may run, or"
                " engine.cpu_kernels = 'torch'"
            ) from error


class PackedMatrix:
    """Weights in panels of some outputs, each read once, from its beginning to its end, per product."""

    def __init__(self, kernels: Kernels, in_size: int, out_size: int, dtype: torch.dtype, *, gated: bool) -> None:
        self._kernels, self._dtype = kernels, dtype
        columns = kernels.panel_width // (2 if gated else 1)
        num_panels = -(-out_size // columns)
        self._packed = zeros(num_panels * in_size * kernels.panel_width, dtype=dtype, device=torch.device("cpu"))
        self._record = _Matrix(self._packed.data_ptr(), in_size, out_size, dtype == torch.bfloat16, gated, None)

    def fill(self, first_row: int, weights_OI: Tensor) -> None:
        weights_OI = weights_OI.to("cpu", self._dtype).contiguous()
        self._kernels.pack(
            ctypes.byref(self._record), weights_OI.data_ptr(), first_row, len(weights_OI), torch.get_num_threads()
        )

    def read(self, first_row: int, num_rows: int) -> Tensor:
        return self._unpacked()[first_row : first_row + num_rows]

    def _unpacked(self) -> Tensor:
        """Return ``[out, in]``, the gates of a gated matrix first; see ``pack`` in ``kernels.c``."""
        m, width = self._record, self._kernels.panel_width
        panels = self._packed.view(-1, m.in_size, width)
        if m.bfloat16:  # two columns share a word
            panels = panels.view(-1, m.in_size, width // 2, 2).transpose(2, 3).reshape(-1, m.in_size, width)
        if not m.gated:
            return panels.transpose(1, 2).reshape(-1, m.in_size)[: m.out_size]
        halves = panels.view(-1, m.in_size, 2, width // 2).permute(2, 0, 3, 1).reshape(2, -1, m.in_size)
        return halves[:, : m.out_size].reshape(-1, m.in_size)

    def record(self, bias: Tensor | None = None) -> _Matrix:
        m = self._record
        return _Matrix(m.packed, m.in_size, m.out_size, m.bfloat16, m.gated, _address(bias))


class PackedLayout:
    """Implements ``Layout``: activations in float32, weights of either type."""

    dtype = torch.float32

    def __init__(self, kernels: Kernels, weight_dtype: torch.dtype) -> None:
        self._kernels, self.weight_dtype = kernels, weight_dtype

    def matrix(self, in_size: int, out_size: int) -> PackedMatrix:
        return PackedMatrix(self._kernels, in_size, out_size, self.weight_dtype, gated=False)

    def gated_matrix(self, in_size: int, out_size: int) -> PackedMatrix:
        return PackedMatrix(self._kernels, in_size, out_size, self.weight_dtype, gated=True)

    def tied_matrix(self, embedding_OI: Tensor) -> PackedMatrix:
        return self.matrix(embedding_OI.shape[1], len(embedding_OI))

    def expert_matrices(self, num: int, in_size: int, out_size: int, *, gated: bool) -> ExpertMatrices[PackedMatrix]:
        make = self.gated_matrix if gated else self.matrix
        return ExpertMatrices([make(in_size, out_size) for _ in range(num)], (1 + gated) * out_size)


class NativeModelRunner:
    """Implements ``ModelRunner`` by compiled kernels."""

    dtype = torch.float32
    """The type of the cache."""

    def __init__(
        self, kernels: Kernels, arch: Architecture, sizes: RunnerSizes, weight_dtype: torch.dtype, cpu: torch.device
    ) -> None:
        self._kernels, self._arch = kernels, arch
        self._weights = Weights(arch, cpu, PackedLayout(kernels, weight_dtype))
        self.slots = self._weights.slots
        self._rotary = Rotary(arch, sizes.max_context, torch.float32, cpu)
        self.kv = KVCache(arch, sizes.num_blocks, sizes.block_size, torch.float32, cpu)
        self._layers = (_Layer * arch.num_layers)(*map(self._layer, range(arch.num_layers)))
        self._model = self._record()
        rows, heads = max(sizes.max_decoded, sizes.max_prefilled), arch.num_heads * arch.head_dim
        widths = (
            *(arch.hidden_size, arch.hidden_size + kernels.apart),
            *(heads + 2 * arch.num_kv_heads * arch.head_dim, max(heads, arch.intermediate_size) + kernels.apart),
        )
        self._workspace = [torch.empty(rows, width) for width in widths]
        self._logits = torch.empty(sizes.max_decoded, arch.vocab_size)
        self._routing = _Routing(arch, rows, kernels.apart)

    def prefill(self, tokens: InputBatch) -> None:
        self._forward(tokens, None, None)

    def decode(self, tokens: InputBatch, params: Sequence[SamplingParams], uniforms_B: NDArray[np.float64]) -> Drawn:
        logits_BV = self._logits[: len(params)]
        if any(p.is_cut for p in params):
            self._forward(tokens, logits_BV, None)
            tokens_B, logprobs_B, kept = sample(logits_BV, params, uniforms_B, self._kernels.draw_tokens)
            return Drawn(tokens_B.tolist(), logprobs_B.tolist(), kept, self._routes(params))
        drawing = Drawing(np.array([p.temperature for p in params], dtype=np.float32), uniforms_B)
        self._forward(tokens, logits_BV, drawing)
        return Drawn(drawing.tokens_B.tolist(), drawing.logprobs_B.tolist(), routes=self._routes(params))

    def _routes(self, params: Sequence[SamplingParams]) -> Sequence[bytes]:
        return wanted_routes(self._routing.chosen(len(params)), params, self._arch)

    def _forward(self, tokens: InputBatch, logits: Tensor | None, drawing: Drawing | None) -> None:
        starts_B, counts_B = tokens.starts_B, tokens.counts_B
        rows_T = np.repeat(np.arange(len(counts_B)), counts_B)
        firsts_B = np.cumsum(counts_B) - counts_B
        positions_T = np.arange(len(rows_T)) + (starts_B - firsts_B)[rows_T]
        run_starts, run_lengths = _runs(firsts_B, counts_B, self._kernels.longest_run)
        arrays = (tokens.token_ids_T, positions_T, rows_T, run_starts, run_lengths, tokens.tables_BN)
        batch = _Batch(
            *(len(rows_T), len(run_starts), tokens.tables_BN.shape[1]),
            *(array.ctypes.data for array in arrays),
            *(buffer.data_ptr() for buffer in self._workspace),
            _address(logits),
            *self._routing.addresses,
            *(drawing.addresses if drawing else (None,) * 4),
        )
        self._kernels.forward(ctypes.byref(self._model), ctypes.byref(batch), torch.get_num_threads())

    def _layer(self, index: int) -> _Layer:
        layer, shape = self._weights.layers[index], self._arch.layers[index]
        norms = (layer.input_norm, layer.output_norm, layer.mlp_norm, layer.mlp_output_norm, layer.q_norm, layer.k_norm)
        return _Layer(
            *(layer.qkv.record(layer.qkv_bias), layer.output.record(layer.output_bias)),
            *_mlp_records(layer.mlp),
            *(shape.window or 0, shape.rotates, self._arch.family.qk_norm == "all"),
            *(_address(tensor) for tensor in (*norms, self.kv.keys[index], self.kv.values[index])),
        )

    def _record(self) -> _Model:
        arch, weights = self._arch, self._weights
        tensors = (weights.embedding, weights.norm, self._rotary.cosines, self._rotary.sines)
        return _Model(
            *(arch.hidden_size, arch.num_kv_heads, arch.num_layers, weights.embedding.dtype == torch.bfloat16),
            *((e.num, e.per_token, e.is_normalised) if (e := arch.experts) else (0, 0, 0)),
            *(arch.norm_eps, arch.embedding_scale, arch.attention_scale, arch.residual_scale, arch.logit_scale),
            *(_address(tensor) for tensor in tensors),
            weights.lm_head.record(),
            self._layers,
        )


class _Routing:
    """Holds the choices of experts of an iteration, and the rows that are computed for them."""

    def __init__(self, arch: Architecture, rows: int, apart: int) -> None:
        self._arrays: list[Tensor] = []
        self._num_layers = sum(layer.has_experts for layer in arch.layers)
        if (shape := arch.experts) is None:
            return
        choices = rows * shape.per_token
        self._per_token = shape.per_token
        self._chosen = torch.empty(self._num_layers * choices, dtype=torch.int32)
        self._arrays = [
            *(torch.empty(rows, shape.num), torch.empty(choices), self._chosen),
            *(torch.empty(n, dtype=torch.int64) for n in (choices, shape.num + 1, shape.num + 1)),
            *(torch.empty(choices, width + apart) for width in (arch.hidden_size, shape.intermediate_size)),
        ]

    @property
    def addresses(self) -> tuple[int | None, ...]:
        return tuple(array.data_ptr() for array in self._arrays) or (None,) * 8

    def chosen(self, num_tokens: int) -> NDArray[np.int32] | None:
        """Return the experts chosen in an iteration over so many tokens, ``[T, layers with experts, k]``."""
        if not self._arrays:
            return None
        ids: NDArray[np.int32] = self._chosen.numpy()[: self._num_layers * num_tokens * self._per_token]
        return ids.reshape(self._num_layers, num_tokens, self._per_token).swapaxes(0, 1)


def _mlp_records(mlp: Mlp[PackedMatrix] | Experts[PackedMatrix]) -> tuple[Any, ...]:
    """Return what a layer's record has of its MLP: two matrices or, of experts, a router and two arrays of them."""
    if isinstance(mlp, Mlp):
        return mlp.gate_up.record(), mlp.down.record(), _Matrix(), None, None
    arrays = [[matrix.record() for matrix in each.matrices] for each in (mlp.gate_up, mlp.down)]
    return _Matrix(), _Matrix(), mlp.router.record(), *((_Matrix * len(records))(*records) for records in arrays)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _runs(firsts_B: Ints, counts_B: Ints, longest: int) -> tuple[Ints, Ints]:
    """Cut the tokens of each sequence into runs of at most ``longest``: first token and length of each run."""
    runs_B = -(-counts_B // longest)
    sequence_R = np.repeat(np.arange(len(counts_B)), runs_B)
    offset_R = (np.arange(len(sequence_R)) - (np.cumsum(runs_B) - runs_B)[sequence_R]) * longest
    return firsts_B[sequence_R] + offset_R, np.minimum(longest, counts_B[sequence_R] - offset_R)
