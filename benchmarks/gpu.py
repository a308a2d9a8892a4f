"""The embedded engine and the trainer on a GPU: right, how near the floor that memory sets, and what each way gains.

    python benchmarks/gpu.py                      # Qwen3-0.6B and Qwen3-4B shapes, random weights in bfloat16
    python benchmarks/gpu.py --device cpu --small # the same steps in a minute, without recording of launches
    python benchmarks/gpu.py --parts training     # see gpu_training.py

Needs torch, transformers and numpy only; liger-kernel is measured too where it is installed. The floor of an iteration
is the bytes it cannot avoid, all weights and the cached keys and values, over the bandwidth of a large copy measured in
the same run. Response lengths of the rollouts are forced: those of ``--lengths``, in order, so that both ways decode
the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu_training import TrainingBench, or_out_of_memory, show_training  # noqa: E402

from rollover.engine.base import GenerateRequest  # noqa: E402
from rollover.engine.embedded import EmbeddedConfig  # noqa: E402
from rollover.engine.embedded.core import EngineCore  # noqa: E402
from rollover.engine.embedded.graphs import GraphModelRunner  # noqa: E402
from rollover.types import FinishReason, SamplingParams  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
    "Qwen3-0.6B": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "Qwen3-4B": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
ITERATIONS = 40
"""Timed, after as many that are not."""
SHARE_OF_MEMORY = 0.7
"""That the cache may take of what is free once the weights are loaded."""
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and in what the engine runs."""

    device: str
    dtype: str
    shape: str
    folder: Path

    @property
    def token_bytes(self) -> int:
        """Of the cache."""
        sizes, width = SHAPES[self.shape], getattr(torch, self.dtype).itemsize
        return int(2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * width)

    @property
    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def core(self, max_running: int, num_cached: int) -> EngineCore:
        """Room for ``num_cached`` tokens and one sample of the longest context."""
        config = EmbeddedConfig(
            device=self.device,
            dtype=self.dtype,  # type: ignore[arg-type]
            max_running=max_running,
            max_context_tokens=4096,
            kv_cache_bytes=(num_cached + 4096 + 64 * (max_running + 1)) * self.token_bytes,
            prefill_chunk_tokens=4096,
        )
        return EngineCore(self.folder, config, make_model_runner=GraphModelRunner)

    def fits(self, num_cached: int) -> bool:
        if self.device == "cpu":
            return True
        free, _ = torch.cuda.mem_get_info()
        return num_cached * self.token_bytes < SHARE_OF_MEMORY * (free - self.weight_bytes)

    def seconds(self, call: Callable[[], object]) -> float:
        self._synchronize()
        start_s = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start_s

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def make_model(shape: str, folder: Path, dtype: str) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3",
        **SHAPES[shape],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def request(name: str, num_prompt: int, num_new: int, response: tuple[int, ...] = ()) -> GenerateRequest:
    """Samples ``g.0``, ``g.1`` ... share the prompt of ``g``."""
    group = name.split(".")[0]
    rng = np.random.default_rng(list(group.encode()))
    return GenerateRequest(
        request_id=f"{name}#{len(response)}",
        sample_key=name,
        prompt_key=group,
        prompt_ids=tuple(rng.integers(2, 500, num_prompt).tolist()),
        response_ids=response,
        params=SamplingParams(max_new_tokens=num_new),
        seed=int(rng.integers(2**31)) + len(name),
    )


def correctness(bench: Bench) -> Result:
    """Log-probs of sampled tokens against transformers' forward pass in the same type."""
    core = bench.core(8, 1024)
    asked = [request(f"c{i}", 20 + 7 * i, 24) for i in range(6)]
    tokens: dict[str, tuple[int, ...]] = {r.request_id: () for r in asked}
    logprobs: dict[str, tuple[float, ...]] = {r.request_id: () for r in asked}
    for r in asked:
        core.add(r)
    while core.has_work:
        for name, chunk in core.step():
            tokens[name] += chunk.token_ids
            logprobs[name] += chunk.logprobs
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(bench.folder, dtype=getattr(torch, bench.dtype))
    model = model.to(bench.device).eval()
    errors: list[float] = []
    for r in asked:
        ids = torch.tensor([r.prompt_ids + tokens[r.request_id]], device=bench.device)
        with torch.inference_mode():
            table = model(input_ids=ids).logits[0, len(r.prompt_ids) - 1 : -1].float().log_softmax(-1)
        expected = table.gather(1, ids[0, len(r.prompt_ids) :, None]).squeeze(1).tolist()
        errors += [abs(a - b) for a, b in zip(expected, logprobs[r.request_id], strict=True)]
    return {"mean_logprob_error": statistics.mean(errors), "largest_logprob_error": max(errors)}


def copy_bandwidth(bench: Bench) -> float:
    """Bytes per second, read and written."""
    size = 2**26 if bench.device == "cpu" else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / statistics.median(bench.seconds(lambda: target.copy_(source)) for _ in range(10))


def decode_times(bench: Bench, batch_sizes: list[int], context: int, bandwidth: float) -> list[Result]:
    """Batch sizes whose cache does not fit are left out."""
    rows = []
    for batch in batch_sizes:
        if not bench.fits(batch * (context + 2 * ITERATIONS)):
            continue
        core = bench.core(batch, batch * (context + 2 * ITERATIONS))
        for i in range(batch):
            core.add(request(f"d{i}", context, 2 * ITERATIONS + 2))
        while any(s.num_missing for s in core.scheduler.running) or core.scheduler.waiting:
            core.step()
        times_s = [bench.seconds(core.step) for _ in range(2 * ITERATIONS)]
        time_s = statistics.median(times_s[ITERATIONS:])
        cached = sum(s.num_cached_tokens for s in core.scheduler.running)
        floor_s = (bench.weight_bytes + cached * bench.token_bytes) / bandwidth
        found = {"batch": batch, "cached_tokens": cached, "iteration_s": time_s, "floor_s": floor_s}
        rows.append(found | {"share_of_floor": floor_s / time_s, "tokens_per_s": batch / time_s})
    return rows


@dataclass(slots=True)
class Rollouts:
    """Steps of ``wanted`` whole groups, with ``launched`` groups open at a time: as many is the synchronous way, more
    is partial rollouts (APRIL, arXiv 2509.18521), where a step ends with its last group and the rest is parked."""

    core: EngineCore
    pending: list[tuple[int, list[int]]]
    wanted: int
    launched: int
    num_prompt: int
    num_trained: int = 0
    _open: dict[int, list[int]] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _calls: dict[str, GenerateRequest] = field(default_factory=dict)
    _responses: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def step(self) -> None:
        while len(self._open) < self.launched:
            group, lengths = self.pending.pop(0)
            self._open[group], self._left[group] = lengths, len(lengths)
            for i, length in enumerate(lengths):
                self._submit(f"{group}.{i}", length)
        done = 0
        while done < self.wanted:
            for name, chunk in self.core.step():
                asked = self._take(name, chunk.token_ids)
                if chunk.finish_reason is FinishReason.LENGTH:
                    del self._calls[name]
                    done += self._finished(int(asked.prompt_key))
        for name, chunk in self.core.abort_all():
            asked = self._take(name, chunk.token_ids)
            del self._calls[name]
            self._submit(asked.sample_key, asked.params.max_new_tokens)

    def _submit(self, name: str, length: int) -> None:
        asked = request(name, self.num_prompt, length, self._responses.get(name, ()))
        self._calls[asked.request_id] = asked
        self.core.add(asked)

    def _take(self, name: str, token_ids: tuple[int, ...]) -> GenerateRequest:
        asked = self._calls[name]
        self._responses[asked.sample_key] = self._responses.get(asked.sample_key, ()) + token_ids
        return asked

    def _finished(self, group: int) -> int:
        """1 when the group is whole."""
        self._left[group] -= 1
        if self._left[group]:
            return 0
        self.num_trained += sum(self._open.pop(group))
        return 1


def rollouts(bench: Bench, launched: int, args: argparse.Namespace) -> Result:
    """The first steps of partial rollouts train the short groups and are not counted."""
    lengths: list[list[int]] = [group[: args.group] for group in json.loads(args.lengths.read_text())]
    num_cached = launched * sum(map(sum, lengths)) // len(lengths) + launched * args.prompt_tokens
    core = bench.core(launched * args.group, num_cached)
    run = Rollouts(core, list(enumerate(lengths)), args.prompts, launched, args.prompt_tokens)
    for _ in range(args.warmup_steps):
        run.step()
    run.num_trained, before = 0, core.stats()
    took_s = [bench.seconds(run.step) for _ in range(args.steps)]
    return {
        "tokens_per_s": run.num_trained / sum(took_s),
        "trained_tokens": run.num_trained,
        "iterations": core.stats().decode_iterations - before.decode_iterations,
        "reprefilled_tokens": core.stats().reprefilled_tokens - before.reprefilled_tokens,
        "step_s": took_s,
    }


def measure_engine(bench: Bench, args: argparse.Namespace) -> Result:
    exact = Bench(device=args.device, dtype="float32", shape=bench.shape, folder=bench.folder)
    bandwidth = copy_bandwidth(bench)
    found: Result = {
        "copy_bytes_per_s": bandwidth,
        "correctness": {args.dtype: correctness(bench), "float32": correctness(exact)},
        "decode": decode_times(bench, args.batch_sizes, args.context, bandwidth),
        "sync": rollouts(bench, args.prompts, args),
        "april": rollouts(bench, 2 * args.prompts, args),
    }
    return found | {"gain": found["april"]["tokens_per_s"] / found["sync"]["tokens_per_s"]}


def measure(shape: str, folder: Path, args: argparse.Namespace) -> Result:
    bench = Bench(device=args.device, dtype=args.dtype, shape=shape, folder=make_model(shape, folder, args.dtype))
    found = or_out_of_memory(lambda: measure_engine(bench, args)) if "engine" in args.parts else {}
    if "training" in args.parts:
        samples, tokens = args.row
        training = TrainingBench(
            device=args.device, folder=bench.folder, samples=samples, tokens=tokens, steps=args.training_steps
        )
        found["training"] = training.measure(bench.seconds)
    return found


def show(shape: str, found: Result) -> None:
    if "training" in found:
        print(f"{shape}, training:")
        show_training(found["training"])
    if "correctness" in found:
        show_engine(shape, found)
    if "out_of_memory" in found:
        print(f"{shape}: the engine ran out of memory: {found['out_of_memory']}", flush=True)


def show_engine(shape: str, found: Result) -> None:
    for dtype, errors in found["correctness"].items():
        print(f"{shape}, {dtype}: log-probs off by {errors['mean_logprob_error']:.1e} on average")
    for row in found["decode"]:
        print(
            f"  batch {row['batch']:4d}: {1e3 * row['iteration_s']:8.2f} ms, {row['share_of_floor']:5.1%} of the floor"
        )
    print(f"  partial rollouts over synchronous ones: {found['gain']:.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--small", action="store_true", help="tiny model and load: whether it works, not how fast")
    parser.add_argument("--parts", nargs="+", choices=("engine", "training"), default=["engine", "training"])
    parser.add_argument(
        "--row", type=int, nargs=2, default=(8, 1024), help="samples of a training pass, tokens of each"
    )
    parser.add_argument("--training-steps", type=int, default=5)
    parser.add_argument("--shapes", default="Qwen3-0.6B,Qwen3-4B")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--context", type=int, default=512, help="tokens cached per sample while timing")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lengths", type=Path, default=HERE / "lengths.json", help="JSON: a list of lengths per group")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"gpu-{date.today()}.json")
    args = parser.parse_args()
    if args.small:
        small = {"shapes": "tiny", "batch_sizes": "1,3", "context": 40, "prompts": 2, "group": 2, "steps": 2}
        vars(args).update(small, prompt_tokens=8, warmup_steps=1, row=(3, 24), training_steps=2)
    args.batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    record: Result = {
        "command": sys.argv,
        "date": str(date.today()),
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "shapes": {},
    }
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            record["shapes"][shape] = measure(shape, Path(folder), args)
        show(shape, record["shapes"][shape])
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
