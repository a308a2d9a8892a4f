"""Measures training for ``gpu.py``: FSDP2 on one device against none, bfloat16 passes, memory, and the output matrix.

FSDP2 over one rank does all of its work but the sending: what it costs over the plain trainer is its overhead. Its
mixed precision gathers weights in bfloat16; the plain trainer has them cast by autocast at each use. A way for which
memory does not suffice is recorded as that, and the others are measured.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rollover.errors import ResourceError
from rollover.hf.config import read_config
from rollover.trainer.config import TrainerConfig
from rollover.trainer.guards import reporting_out_of_memory
from rollover.trainer.logprobs import head_logprobs, response_logprobs
from rollover.trainer.memory import training_memory
from rollover.trainer.optimizer import apply_gradients, build_optimizer
from rollover.trainer.packing import PackedRow, TrainingSample, pack
from rollover.trainer.policy import FullPolicy
from rollover.trainer.sharded import ShardedPolicy
from rollover.trainer.world import World

WAYS = ("plain float32", "plain bfloat16", "FSDP2 float32", "FSDP2 bfloat16")
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBench:
    """Where training is timed, and over what: ``samples`` responses of ``tokens`` each fill a row.

    Example: ``TrainingBench(device="cpu", folder=folder, samples=2, tokens=16, steps=1).measure(time_of)``
    """

    device: str
    folder: Path
    samples: int
    tokens: int
    steps: int

    @property
    def config(self) -> TrainerConfig:
        return TrainerConfig(
            device=self.device, micro_batch_tokens=self.samples * self.tokens, gradient_checkpointing=True
        )

    def row(self) -> PackedRow:
        ids = torch.randint(2, 500, (self.samples, self.tokens), generator=torch.Generator().manual_seed(0)).tolist()
        samples = [TrainingSample(prompt_ids=(1,), response_ids=tuple(response)) for response in ids]
        (row,) = pack(samples, 1 + self.samples * self.tokens, device=torch.device(self.device))
        return row

    def measure(self, seconds: Callable[[Callable[[], object]], float]) -> Result:
        """``seconds`` says how long a call takes."""
        with one_rank(self.device) as world:
            ways = {way: or_out_of_memory(partial(self.train, way, world, seconds)) for way in WAYS}
        done = {way: found for way, found in ways.items() if "out_of_memory" not in found}
        if exact := done.get("plain float32"):
            for found in done.values():
                found["grad_norm_off_by"] = abs(found["grad_norm"] / exact["grad_norm"] - 1)
        overhead = {
            dtype: done[f"FSDP2 {dtype}"]["step_s"] / done[f"plain {dtype}"]["step_s"] - 1
            for dtype in ("float32", "bfloat16")
            if {f"FSDP2 {dtype}", f"plain {dtype}"} <= done.keys()
        }
        return {"ways": ways, "fsdp2_overhead": overhead, "head": or_out_of_memory(partial(self.head, seconds))}

    def train(self, way: str, world: World, seconds: Callable[[Callable[[], object]], float]) -> Result:
        """Time steps of one row: a pass with its log-probs, back through it, and AdamW."""
        kind, dtype = way.split()
        config = replace(self.config, dtype=dtype)  # type: ignore[arg-type]
        row, device = self.row(), torch.device(self.device)
        reset_peak(self.device)
        policy: FullPolicy | ShardedPolicy
        if kind == "plain":
            policy = FullPolicy(config, self.folder, initial=self.folder, needs_ref=False, device=device)
        else:
            policy = ShardedPolicy(config, self.folder, initial=self.folder, needs_ref=False, world=world)
        optimizer, norms = build_optimizer(policy.model, config), []

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            for _ in range(2):  # from the second row on gradients are there
                logprobs_T = response_logprobs(policy.model, row, 1.0, autocast=policy.autocast)
                (-logprobs_T.mean() / 2).backward()
            norms.append(apply_gradients(optimizer, config, config.learning_rate))

        step()
        times_s = [seconds(step) for _ in range(self.steps)]
        step_s = statistics.median(times_s)
        found = {
            "step_s": step_s,
            "tokens_per_s": 2 * self.samples * self.tokens / step_s,
            "grad_norm": norms[0],
            "peak_bytes": peak(self.device),
        }
        return found | (self.estimate(config) if kind == "plain" else {})

    def estimate(self, config: TrainerConfig) -> Result:
        """Return what ``rollover train --dry-run`` says that the plain trainer takes."""
        expected = training_memory(
            config,
            read_config(self.folder),
            max_prompt_tokens=1,
            max_response_tokens=self.tokens,
            batch_samples=self.samples,
        )
        return {"estimated_bytes": expected.total, "num_parameters": expected.num_parameters}

    def head(self, seconds: Callable[[Callable[[], object]], float]) -> Result:
        """Time log-probs and their gradients from the last hidden states on: in chunks, and by Liger's kernel."""
        sizes = read_config(self.folder)
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        head = torch.nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False, device=self.device, dtype=dtype)
        num = self.samples * self.tokens
        hidden_TD = torch.randn(num, sizes["hidden_size"], device=self.device, dtype=dtype, requires_grad=True)
        target_T = torch.randint(0, sizes["vocab_size"], (num,), device=self.device)
        ways: Mapping[str, Callable[[], torch.Tensor]] = {
            "chunked": lambda: -head_logprobs(head, hidden_TD, target_T, 1.0).sum()
        }
        if (fused := liger()) is not None and self.device != "cpu":
            ways = {**ways, "liger": lambda: fused(head.weight, hidden_TD, target_T)}
        found: Result = {}
        for name, loss in ways.items():

            def both(loss: Callable[[], torch.Tensor] = loss) -> float:
                head.weight.grad = hidden_TD.grad = None
                value = loss()
                value.backward()
                return float(value.detach())

            nats = both()
            reset_peak(self.device)
            time_s = statistics.median(seconds(both) for _ in range(self.steps))
            found[name] = {"step_s": time_s, "peak_bytes": peak(self.device), "loss": nats / num}
        if "liger" not in found:
            found["liger"] = "not measured: it needs liger-kernel and a GPU"
        return found


def liger() -> Any:
    """Return Liger's output matrix with its loss, where it is installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(reduction="sum")


@contextmanager
def one_rank(device: str) -> Iterator[World]:
    """Provide a world of one rank in which FSDP2 can shard."""
    kind = torch.device(device).type
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            yield World(mesh=init_device_mesh(kind, (1,)))
        finally:
            dist.destroy_process_group()


def or_out_of_memory(measure: Callable[[], Result]) -> Result:
    """Return what is measured or, if memory runs out, what the allocator says, with all that was taken given back."""
    try:
        with reporting_out_of_memory(TrainerConfig()):
            return measure()
    except ResourceError as error:
        said = str(error.__cause__)
    gc.collect()  # the frames that held tensors are gone with the error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"out_of_memory": said}


def reset_peak(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> int | None:
    """Return the bytes that tensors took at most; ``benchmarks/memory.py`` measures it on a CPU."""
    return None if device == "cpu" else torch.cuda.max_memory_allocated()


def show_training(found: Result) -> None:
    for way, row in found["ways"].items():
        if "out_of_memory" in row:
            print(f"  {way:15s} ran out of memory: {row['out_of_memory']}")
            continue
        said = f"  {way:15s} {1e3 * row['step_s']:9.1f} ms a step, {row['tokens_per_s']:9.0f} tokens/s"
        if "grad_norm_off_by" in row:
            said += f", gradient norm off by {row['grad_norm_off_by']:.1e}"
        if row["peak_bytes"] is not None:
            said += f", peak {row['peak_bytes'] / 2**30:.1f} GiB"
            if "estimated_bytes" in row:
                ratio, each = row["peak_bytes"] / row["estimated_bytes"], row["peak_bytes"] / row["num_parameters"]
                said += f" ({ratio:.2f} of the estimate, {each:.1f} bytes per parameter, of which 16 are the state)"
        print(said)
    said = ", ".join(f"{value:+.1%} in {dtype}" for dtype, value in found["fsdp2_overhead"].items())
    print(f"  FSDP2 on one device over plain training: {said or 'not known'}")
    for name, row in found["head"].items():
        print(
            f"  output matrix, {name}: " + (row if isinstance(row, str) else f"{1e3 * row['step_s']:.1f} ms"),
            flush=True,
        )
