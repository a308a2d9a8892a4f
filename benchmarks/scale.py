"""What it costs to shard the trainer, and what it gives: time and memory of a step, and how even the assignment is.

    python benchmarks/scale.py --out benchmarks/results/scale-DATE.json    # some ten minutes on two idle cores
    python benchmarks/scale.py --small                                     # to see that it works

* **Step.** The same steps of GRPO by the trainer of one process, by FSDP2 over one rank (what sharding costs where
  there is nothing to share), and over two ranks (gloo). All ranks have one thread, and the three take turns. *Held* are
  the bytes of weights, gradients and moments; *peak* is resident memory at its height beyond what there was before the
  trainer was opened.
* **Dealing.** The batches of a real run of ``quickstart`` and of recorded lengths of responses (``lengths.json``),
  assigned to 2, 4 and 8 ranks: the cost of the busiest rank over the mean, passes for nothing included, beside what
  assigning families in turn makes of the same batches.

Publications have a script of their own, ``publication.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # memory that is freed goes back at once
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from engine import machine  # noqa: E402
from memory import make_batch, memory_now  # noqa: E402

from rollover.algorithms import AlgorithmConfig, resolve  # noqa: E402
from rollover.batch import Batch  # noqa: E402
from rollover.trainer.balancing import Row, assign_rows, attention_share, family_cost  # noqa: E402
from rollover.trainer.config import TrainerConfig  # noqa: E402
from rollover.trainer.packing import TrainingSample, families  # noqa: E402
from rollover.trainer.world import ALONE, World  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model and the batches that it is trained on. Each group fills a row, so two ranks get two rows each.

    Example: ``LOADS["whole"]`` is a model of 12 M parameters, and four groups of four responses with 192 tokens each.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    response: int
    """Tokens."""
    groups: int = 4
    group_size: int = 4

    @property
    def shape(self) -> dict[str, Any]:
        """The settings of a Qwen3 with heads of 64 numbers."""
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": max(1, self.hidden_size // 192),
            "head_dim": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        }

    @property
    def config(self) -> TrainerConfig:
        """The trainer's, whose rows have room for one group."""
        budget = 4 * self.group_size * self.response // 3
        return TrainerConfig(micro_batch_tokens=budget, device="cpu", learning_rate=1e-4)

    def batch(self, step: int) -> Batch:
        return make_batch(step, self.group_size, self.response, self.groups)

    def save_model(self, folder: Path) -> Path:
        """Write the model with random weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.shape)).save_pretrained(folder)
        return folder


LOADS = {
    "whole": Load(hidden_size=384, num_layers=6, vocab_size=4096, response=192),
    "small": Load(hidden_size=64, num_layers=2, vocab_size=64, response=12),
}
WAYS = {"one process": (1, False), "FSDP2 over 1 rank": (1, True), "FSDP2 over 2 ranks": (2, True)}
RANKS = (2, 4, 8)

_kept: dict[str, Any] = {}
"""A rank's trainer, from one call to the next."""


def open_trainer(world: World, load: Load, folder: Path, is_sharded: bool) -> dict[str, int]:
    """Open the trainer of a rank and take the first step, which makes the moments."""
    from rollover.trainer.local import LocalTrainer

    Path("/proc/self/clear_refs").write_text("5")  # the height of memory is measured from now on
    before = memory_now("VmRSS", os.getpid())
    trainer = LocalTrainer(
        load.config,
        resolve(AlgorithmConfig()),
        folder,
        temperature=1.0,
        max_response_tokens=load.response,
        num_steps=1000,
        world=world if is_sharded else ALONE,
    )
    _kept["trainer"] = trainer
    trainer.step(load.batch(0))
    return {"held": _held(trainer), "peak": memory_now("VmHWM", os.getpid()) - before}


def take_steps(world: World, load: Load, num: int) -> float:
    """Return the seconds that each of ``num`` steps took on this rank."""
    trainer = _kept["trainer"]
    started_s = time.perf_counter()
    for _ in range(num):
        trainer.step(load.batch(trainer.version))
    return (time.perf_counter() - started_s) / num


def _held(trainer: Any) -> int:
    """Weights, gradients (as many bytes) and moments, of which DTensors hold their rows alone."""

    def size(tensor: Any) -> int:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return int(own.numel() * own.element_size())

    weights = sum(size(p) for p in trainer._model.parameters())
    moments = sum(size(v) for state in trainer._optimizer.state.values() for v in state.values() if v.dim())
    return 2 * weights + moments


def step_times(load: Load, rounds: int, num: int) -> dict[str, Any]:
    """Open the three trainers and let them take turns."""
    from tests.trainer.rank_pool import RankPool

    pools = {way: RankPool(size) for way, (size, _) in WAYS.items()}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = load.save_model(Path(scratch))
            memory = {
                way: pool.call(open_trainer, load=load, folder=folder, is_sharded=WAYS[way][1])
                for way, pool in pools.items()
            }
        times: dict[str, list[float]] = {way: [] for way in pools}
        for _ in range(rounds):
            for way, pool in pools.items():
                times[way].append(max(pool.call(take_steps, load=load, num=num)))
    finally:
        for pool in pools.values():
            pool.close()
    plain_s = statistics.median(times["one process"])
    found: dict[str, Any] = {}
    for way in pools:
        median_s = statistics.median(times[way])
        found[way] = {
            "seconds": [round(t, 4) for t in times[way]],
            "median_s": round(median_s, 4),
            "of_one_process": round(median_s / plain_s, 3),
            "held_mib": [round(m["held"] / 2**20, 1) for m in memory[way]],
            "peak_mib": [round(m["peak"] / 2**20, 1) for m in memory[way]],
        }
        print(
            f"{way:20} {median_s:7.3f} s a step, {found[way]['of_one_process']:.2f} of one process; held"
            f" {found[way]['held_mib'][0]:.0f} MiB, peak {found[way]['peak_mib'][0]:.0f} MiB",
            flush=True,
        )
    return found


def in_turn(samples: Sequence[TrainingSample], budget: int, num_ranks: int, quadratic: float) -> list[float]:
    """Assign families to ranks one after the other, as they come, and return the cost of each rank's rows."""
    parts = families(samples, range(len(samples)), budget)
    return [sum(family_cost(samples, part, quadratic) for part in parts[rank::num_ranks]) for rank in range(num_ranks)]


def by_us(samples: Sequence[TrainingSample], budget: int, num_ranks: int, quadratic: float) -> list[float]:
    """Return the cost of each rank's rows as the trainer assigns them, with the passes that it makes for nothing."""
    assigned = assign_rows(samples, range(len(samples)), budget=budget, num_ranks=num_ranks, quadratic=quadratic)

    def cost(row: Row) -> float:
        return sum(family_cost(samples, part, quadratic) for part in row)

    return [sum(map(cost, d.rows)) + d.num_padding * cost(d.padding) for d in assigned]


def recorded_batches() -> list[list[TrainingSample]]:
    """Batches of 16 prompts with the recorded lengths; a prompt has 100 tokens."""
    lengths = json.loads((ROOT / "benchmarks/lengths.json").read_text())
    groups = [
        [TrainingSample(prompt_ids=(group,) * 100, response_ids=(1,) * n) for n in each]
        for group, each in enumerate(lengths)
    ]
    return [[s for group in groups[at : at + 16] for s in group] for at in range(0, len(groups) - 15, 16)]


def run_batches(steps: int) -> list[list[TrainingSample]]:
    """Train quickstart for some steps and return what it trained on."""
    from tests.runs import batches

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "rollover",
            "train",
            "quickstart",
            "--run-dir",
            str(run),
            "--steps",
            str(steps),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [
            [TrainingSample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids) for t in made.trajectories]
            for made in batches(run)
        ]


def balance(batches: list[list[TrainingSample]], budget: int, width: int) -> dict[str, Any]:
    quadratic = attention_share(width)
    found: dict[str, Any] = {}
    for ranks in RANKS:
        ours: list[float] = []
        turns: list[float] = []
        for samples in batches:
            for costs, kept in (
                (by_us(samples, budget, ranks, quadratic), ours),
                (in_turn(samples, budget, ranks, quadratic), turns),
            ):
                kept.append(max(costs) / statistics.mean(costs))
        found[str(ranks)] = {
            "busiest_over_mean": round(statistics.mean(ours), 4),
            "worst": round(max(ours), 4),
            "in_turn": round(statistics.mean(turns), 4),
            "in_turn_worst": round(max(turns), 4),
        }
        print(f"  {ranks} ranks: {found[str(ranks)]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of each trainer in a round")
    parser.add_argument("--run-steps", type=int, default=12, help="of the quickstart whose batches are assigned")
    parser.add_argument("--small", action="store_true", help="a tiny model, one round, and no run of the quickstart")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.small:
        args.rounds, args.steps, args.run_steps = 1, 1, 0
    load = LOADS["small" if args.small else "whole"]
    result: dict[str, Any] = {"machine": machine(), "load": asdict(load)}
    result["step"] = step_times(load, args.rounds, args.steps)
    print("assignment, recorded lengths (16 prompts x 8), rows of 8,192:")
    result["dealing_recorded"] = balance(recorded_batches(), 8192, 1024)
    if args.run_steps:
        print("assignment, batches of quickstart, its own rows:")
        result["dealing_quickstart"] = balance(run_batches(args.run_steps), 8192, 96)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
