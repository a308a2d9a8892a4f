"""The synchronous engine: requests in, chunks out, one iteration per ``step``.

An iteration admits what fits, prefills one chunk, then decodes one token of every sequence that is ready.
All that an iteration or a command produces is returned as ``Output`` records; the core never calls out.

Invariants: each chunk has one policy version (a weight load flushes what was sampled before it); a finished, aborted or
failed call leaves nothing behind but cached blocks that can be evicted; the host waits for the device once per
iteration.

Numerics: a token and its log-prob depend on its prefix, seed and weights, up to rounding: matrix products of another
batch size, or a cache computed by prefill instead of decode, may differ in the last bits (1e-6 in float32), which
changes a sampled token only when its random number falls that close to the border between two tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollover.engine.base import GPU_PREFILL_TOKENS, Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.devices import device_here
from rollover.engine.embedded import sizing
from rollover.engine.embedded.block_manager import BlockCopy, BlockManager
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.kv_cache import Ints
from rollover.engine.embedded.model_runner import InputBatch, MakeModelRunner, ModelRunner, RunnerSizes
from rollover.engine.embedded.sampler import Drawn, uniforms
from rollover.engine.embedded.scheduler import PrefillSlice, SequenceScheduler
from rollover.engine.embedded.sequence import Sequence
from rollover.engine.embedded.weights import LoadedWeights, are_tied
from rollover.engine.ends import check_limits
from rollover.engine.stop_strings import StopStrings
from rollover.engine.used_ids import UsedIds
from rollover.errors import EngineError, ModelError
from rollover.hf.architecture import Architecture
from rollover.types import FinishReason
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights

CPU_PREFILL_TOKENS = 20.0
"""Tokens prefilled in the time of a decode iteration, 17 with a model of 28 M parameters: ``benchmarks/rollout.py``."""


class Output(NamedTuple):
    """A chunk for the call that asked for it."""

    request_id: str
    chunk: Chunk


class EngineCore:
    """Decodes the open calls of one model, one iteration at a time. Not thread-safe: one owner calls it. Raises
    ``ModelError`` for a folder it cannot run and ``ConfigError`` for sizes that cannot work.

    Args:
        make_model_runner: how to compute, if not as the config and the device suggest.
        isolate_prompts: share cache among samples of one prompt alone (``SequenceScheduler``).
    """

    def __init__(
        self,
        folder: Path,
        config: EmbeddedConfig,
        *,
        make_model_runner: MakeModelRunner | None = None,
        isolate_prompts: bool = False,
    ) -> None:
        arch = Architecture.from_folder(folder)
        weights = FolderWeights(0, folder)
        arch = replace(arch, tied_embeddings=are_tied(weights, asked=arch.tied_embeddings))
        self._folder, self._config, self._arch = folder, config, arch
        self.device, dtype = device_here(config.device), sizing.dtype_of(config)
        self._max_context = sizing.max_context_of(config, arch)
        make, cache_dtype = sizing.choose_model_runner(config, arch, dtype, self.device, make_model_runner)
        self._block_bytes = sizing.block_bytes(config, arch, cache_dtype)
        size, num_blocks = config.block_size_tokens, sizing.num_blocks(config, self._max_context, self._block_bytes)
        sizes = RunnerSizes(num_blocks, size, self._max_context, config.max_running, config.prefill_chunk_tokens)
        self._make_model_runner = partial(make, arch, sizes, dtype, self.device)
        self._awake: ModelRunner | None = self._make_model_runner()
        self._weights = LoadedWeights(self._model_runner.slots, weights, tied_embeddings=arch.tied_embeddings)
        self.scheduler = SequenceScheduler(
            BlockManager(num_blocks, size),
            max_running=config.max_running,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            isolate_prompts=isolate_prompts,
        )
        self._open: dict[str, Sequence] = {}
        self._used_ids = UsedIds(self._open)
        self._arrivals = count()
        self._stop_strings: StopStrings | None = None
        self._decoded_tokens = self._decode_iterations = 0
        self._busy_s = 0.0
        self._is_dirty = False

    @property
    def policy_version(self) -> int:
        return self.scheduler.policy_version

    @property
    def has_work(self) -> bool:
        return bool(self._open) and self._awake is not None

    @property
    def _model_runner(self) -> ModelRunner:
        if self._awake is None:
            raise EngineError("the embedded engine sleeps: it has given its weights and its cache back")
        return self._awake

    @property
    def capabilities(self) -> Capabilities:
        prefill_tokens = CPU_PREFILL_TOKENS if self.device.type == "cpu" else GPU_PREFILL_TOKENS
        return Capabilities(
            max_running=self._config.max_running,
            max_context_tokens=self._max_context,
            keeps_kv_on_abort=True,
            in_flight_update=True,
            seeded=True,
            number_format=str(sizing.dtype_of(self._config)).removeprefix("torch."),
            prefill_tokens_per_iteration=math.inf if self._config.kv_on_update == "keep" else prefill_tokens,
        )

    def add(self, request: GenerateRequest) -> None:
        """Open a call. Raises ``EngineError`` for a request that cannot run; it then leaves no trace."""
        self._validate(request)
        if request.params.stop_strings and self._stop_strings is None:
            self._stop_strings = StopStrings(self._folder)
        self._used_ids.claim(request.request_id)
        sequence = Sequence(request, arrival=next(self._arrivals))
        self._open[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_ids: Collection[str]) -> list[Output]:
        """End these calls, as far as they are open, and give their final chunks; their cache stays while there is
        room."""
        return [
            self._finish(self._open[request_id], FinishReason.ABORT)
            for request_id in dict.fromkeys(request_ids)
            if request_id in self._open
        ]

    def abort_all(self) -> list[Output]:
        return self.abort(list(self._open))

    def reset(self) -> list[str]:
        """Forget all calls and caches after a failed step, and give the ids of the calls that were open."""
        ids = list(self._open)
        self._open.clear()
        self.scheduler.reset()
        self._is_dirty = True
        return ids

    def sleep(self) -> None:
        """Give back the memory of weights and cache, until the next ``load``. Raises ``EngineError``, and changes
        nothing, when a call is open."""
        if self._open:
            raise EngineError(f"the embedded engine cannot sleep: {len(self._open)} calls are open")
        self.scheduler.reset()
        self._awake = None
        self._weights.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self, policy_version: int, source: WeightSource, *, keeps_kv: bool | None = None) -> list[Output]:
        """Take new weights, and wake. Returns the chunks that end at this boundary. Raises ``EngineError``
        and changes nothing when the version goes back or the weights do not fit.

        Args:
            keeps_kv: open and parked calls keep their cache; as ``kv_on_update`` has it when left out.
        """
        if policy_version < self.policy_version:
            raise EngineError(
                f"the embedded engine has weights of version {self.policy_version} and takes no earlier ones, got"
                f" version {policy_version}"
            )
        runner = self._awake or self._make_model_runner()
        try:
            self._weights.load(runner.slots, policy_version, source)
        except ModelError as e:
            raise EngineError(f"weights of version {policy_version} do not fit: {e}") from e
        self._awake = runner
        return self._adopt(policy_version, keeps_kv=keeps_kv)

    def begin_fill(self) -> None:
        """Begin to take full weights in parts. Tokens sampled before ``end_fill`` have no version."""
        self._awake = self._awake or self._make_model_runner()
        self._weights.begin()

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a part of full weights. Raises ``EngineError``, and changes nothing, when it does not fit."""
        try:
            self._weights.fill(self._model_runner.slots, tensors)
        except ModelError as e:
            raise EngineError(f"weights do not fit: {e}") from e

    def end_fill(self, policy_version: int, *, keeps_kv: bool, is_whole: bool = True) -> list[Output]:
        """Give the weights that have come a version. Returns the chunks that end at this boundary.

        Args:
            is_whole: raise ``EngineError``, and change nothing, unless all parts have come.
        """
        if is_whole:
            try:
                self._weights.require_all(self._model_runner.slots)
            except ModelError as e:
                raise EngineError(f"weights of version {policy_version} do not fit: {e}") from e
        return self._adopt(policy_version, keeps_kv=keeps_kv)

    def _adopt(self, policy_version: int, *, keeps_kv: bool | None) -> list[Output]:
        """Give the weights in use a version. Returns the chunks that end at this boundary."""
        outputs = [
            Output(request_id, sequence.flush(self.policy_version))
            for request_id, sequence in self._open.items()
            if sequence.num_pending
        ]
        recompute = self._config.kv_on_update == "recompute" if keeps_kv is None else not keeps_kv
        self.scheduler.update(policy_version, recompute=recompute)
        return outputs

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            policy_version=scheduler.policy_version,
            decoded_tokens=self._decoded_tokens,
            prefilled_tokens=scheduler.prefilled_tokens,
            reprefilled_tokens=scheduler.reprefilled_tokens,
            cached_tokens=scheduler.cached_tokens,
            decode_iterations=self._decode_iterations,
            busy_s=self._busy_s,
            kv_bytes=scheduler.blocks.num_used * self._block_bytes,
        )

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one iteration. On an exception nothing is certain any more: call ``reset``."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:  # graphs and Triton take the current one
            return self._step()

    def _step(self) -> list[Output]:
        start_s = time.perf_counter()
        if self._is_dirty:  # not in ``reset``: on a device that has failed this raises too
            self._model_runner.kv.zero_()
            self._is_dirty = False
        self._copy(self.scheduler.admit())
        if slices := self.scheduler.next_prefill():
            self._prefill(slices)
            self.scheduler.prefilled(slices)
            self._copy(self.scheduler.admit())  # siblings of the prompts just prefilled
        outputs: list[Output] = []
        if sequences := self.scheduler.next_decode():
            token_ids, logprobs, kept, routes = self._decode(sequences)
            for sequence, kept_set in zip(sequences, kept, strict=False):  # there are none unless some are wanted
                if sequence.request.params.returns_kept:
                    sequence.keep(kept_set)
            for sequence, route in zip(sequences, routes, strict=False):
                if sequence.request.params.returns_routes:
                    sequence.keep_route(route)
            ends = list(map(self._take, sequences, token_ids, logprobs))  # may raise: all calls are still open then
            self._decode_iterations += 1
            for sequence, reason in zip(sequences, ends, strict=True):
                if reason is not None:
                    outputs.append(self._finish(sequence, reason))
                elif sequence.num_pending >= self._config.stream_interval_tokens:
                    outputs.append(Output(sequence.request.request_id, sequence.flush(self.policy_version)))
        self._busy_s += time.perf_counter() - start_s
        return outputs

    def _validate(self, request: GenerateRequest) -> None:
        name = request.request_id
        self._used_ids.check(name)
        if not request.prompt_ids:
            raise EngineError(f"request {name!r} has an empty prompt")
        check_limits(request, self._max_context, "the embedded engine")
        if request.params.returns_routes and self._arch.experts is None:
            raise EngineError(f"request {name!r} wants the experts of each token, but the model has none")
        ids = request.prompt_ids + request.response_ids
        if min(ids) < 0 or max(ids) >= self._arch.vocab_size:
            raise EngineError(
                f"request {name!r} has token ids from {min(ids)} to {max(ids)}, but the vocabulary ends at "
                f"{self._arch.vocab_size - 1}"
            )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Output:
        self.scheduler.remove(sequence, park=reason is FinishReason.ABORT)
        del self._open[sequence.request.request_id]
        return Output(sequence.request.request_id, sequence.flush(self.policy_version, reason))

    def _copy(self, copies: list[BlockCopy]) -> None:
        if copies:
            self._model_runner.kv.copy_blocks(copies)

    def _prefill(self, slices: list[PrefillSlice]) -> None:
        starts_B = np.array([piece.start for piece in slices])
        counts_B = np.array([piece.num_tokens for piece in slices])
        tables_BN = self._tables([piece.sequence for piece in slices], starts_B + counts_B)
        ids = [t for p in slices for t in p.sequence.token_ids[p.start : p.start + p.num_tokens]]
        self._model_runner.prefill(InputBatch(np.array(ids), tables_BN, starts_B, counts_B))

    def _decode(self, sequences: list[Sequence]) -> Drawn:
        """Draw the token that follows the last one of each sequence."""
        lengths_B = np.array([s.num_cached_tokens for s in sequences])
        noise_B = uniforms([s.request.seed for s in sequences], [s.num_tokens - s.num_prompt for s in sequences])
        last_B = np.array([s.token_ids[-1] for s in sequences])
        tokens = InputBatch(last_B, self._tables(sequences, lengths_B + 1), lengths_B, np.ones_like(lengths_B))
        return self._model_runner.decode(tokens, [s.request.params for s in sequences], noise_B)

    def _tables(self, sequences: AbstractSequence[Sequence], lengths_B: Ints) -> Ints:
        """Give ``[B, N]``: the blocks of each sequence, padded with the null block to the length of the longest."""
        width = self.scheduler.blocks.num_for(int(lengths_B.max()))
        tables_BN = np.zeros((len(sequences), width), dtype=np.int64)
        for row, sequence in zip(tables_BN, sequences, strict=True):
            table = sequence.block_table_array[:width]
            row[: len(table)] = table
        return tables_BN

    def _take(self, sequence: Sequence, token: int, logprob: float) -> FinishReason | None:
        """Append a token, and say why it ends the call, if it does."""
        if not math.isfinite(logprob):
            raise EngineError(
                f"the model of version {self.policy_version} gave logits that are not finite for request "
                f"{sequence.request.request_id!r}"
            )
        sequence.append(token, logprob)
        self._decoded_tokens += 1
        if sequence.token_ids[-1] in sequence.stop_token_ids:
            return FinishReason.STOP
        strings = sequence.request.params.stop_strings
        if (
            strings
            and self._stop_strings
            and self._stop_strings.complete(sequence.token_ids, strings, start=sequence.num_prompt)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_tokens == sequence.max_tokens else None
