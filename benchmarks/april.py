"""APRIL's throughput table (arXiv 2509.18521, figure 4), simulated by its counting rules and by ours.

    python benchmarks/april.py --out benchmarks/results/april-DATE.json       # five seeds: some minutes

Published is what partial rollouts gain over none, in rollout tokens per second, for GRPO and for DAPO, whose filter
drops groups of equal rewards; GSPO has no throughput panel, and its rollouts are scheduled as those of GRPO. N = 32
groups of G = 8 samples, and with partial rollouts N' = 64; Qwen3-4B on 8 GPUs, for which B0 = 108 samples. No lengths
were published: two fitted laws of reasoning models stand for the three data sets. Nothing is fitted to the table.

As released: (1) tokens count when they are decoded, dropped and filtered ones too; (2) groups that finish with the last
one of a batch are dropped; (3) once the filter leaves fewer groups in flight or kept than a batch has, as many groups
start as a round starts with; (4) without partial rollouts, what is unfinished is dropped. ``decoded`` follows these
rules, ``trained`` counts the same schedules by tokens that are trained. ``ours`` is ``april`` of this package over its
``sync``, and ``ours over released`` over the released baseline, both by tokens that are trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rollover.batch import WasteCause
from rollover.frontier.sweep import MeanOverSeeds
from rollover.rollout.events import BatchConsumed, Event, GroupDropped, SegmentEnded
from rollover.rollout.state import View
from rollover.rollout.strategies.april import April
from rollover.rollout.strategy import OnFull, Strategy
from rollover.sim.run import simulate
from rollover.sim.scenario import ReplicaModel, Scenario
from rollover.sim.strategies import SimulatedRollout
from rollover.workload.source import PRESETS

PUBLISHED = {
    "grpo": {"Qwen3-4B": (1.24, 1.31, 1.35), "Qwen3-8B": (1.26, 1.35, 1.44)},
    "dapo": {"Qwen3-4B": (1.08, 1.11, 1.10), "Qwen3-8B": (1.08, 1.08, 1.10)},
}
"""For DAPO-Math-17k, DeepScaleR and DeepMath-103K."""
N, G, LAUNCHED, B0 = 32, 8, 64, 108.0
PROMPTS: dict[str, dict[str, Any]] = {
    "like prompts": {"accuracy": 0.5},
    "unlike prompts": {"accuracy": 0.5, "accuracy_icc": 0.6},
    "very unlike prompts": {"accuracy": 0.5, "accuracy_icc": 0.85},
    "unlike prompts, long ones harder": {
        "accuracy": 0.5,
        "accuracy_icc": 0.6,
        "accuracy_length_correlation": -0.6,
    },
}
LAWS = ("r1-16k", "qwen3-16k")
STEPS, WARMUP = 72, 12
SCENARIO = Scenario(replicas=(ReplicaModel(c0_s=1.0, b0=B0, prefill_tokens_per_s=1600.0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(April):
    """A round of the released code: it starts with ``launched_groups``, and with as many again whenever a batch is no
    longer in flight."""

    def groups_to_open(self, view: View) -> int:
        ledger = view.ledger
        if not ledger.running and not ledger.ready:
            return self.launched_groups - ledger.num_unconsumed
        return self.launched_groups if ledger.num_unconsumed < self.batch_size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedWithout(Released):
    """The same without partial rollouts."""

    on_full = OnFull.DISCARD


class Account:
    """Decoded tokens until each batch, when it was full, and what became of groups."""

    def __init__(self) -> None:
        self._num_decoded = 0
        self._at_batches: list[tuple[float, int]] = []
        self._num_trained, self._num_filtered = 0, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, SegmentEnded):
            self._num_decoded += len(event.segment.token_ids)
        elif isinstance(event, GroupDropped):
            self._num_filtered += event.cause is WasteCause.FILTER_ZERO_SIGNAL
        elif isinstance(event, BatchConsumed):
            self._num_trained += len(event.group_ids)
            self._at_batches.append((event.time_s, self._num_decoded))

    @property
    def tokens_per_s(self) -> float:
        (start_s, before), (end_s, after) = self._at_batches[WARMUP], self._at_batches[-1]
        return (after - before) / (end_s - start_s)

    @property
    def filtered(self) -> float:
        """The share of the finished groups that the filter dropped."""
        return self._num_filtered / (self._num_filtered + self._num_trained)


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per c0 of one simulation."""

    decoded: float
    trained: float
    filtered: float


def rates(strategy: Strategy, law: str, seed: int, scenario: Scenario) -> Rates:
    account = Account()
    found = simulate(strategy, PRESETS[law].workload(seed), scenario, steps=STEPS, seed=seed, observer=account)
    return Rates(account.tokens_per_s, found.after(WARMUP).tokens_per_s, account.filtered)


def strategies() -> dict[str, Strategy]:
    shared: dict[str, Any] = {"batch_size": N, "group_size": G, "drop_surplus": True}

    def packaged(name: str, **options: Any) -> Strategy:
        config = SimulatedRollout.of(name, rollout_batch_size=N, group_size=G, **options)
        return config.build_strategy(SCENARIO.capabilities)

    return {
        "released without": ReleasedWithout(max_staleness=60, launched_groups=N, **shared),
        "released with": Released(max_staleness=60, launched_groups=LAUNCHED, **shared),
        "sync": packaged("sync"),
        "april": packaged("april", over_sampling_batch_size=LAUNCHED, max_staleness=60),
    }


def cell(law: str, scenario: Scenario, seeds: int) -> dict[str, Any]:
    """Return the gains of partial rollouts: means over seeds with their 95 % margins."""
    runs = [{name: rates(s, law, seed, scenario) for name, s in strategies().items()} for seed in range(seeds)]

    def gain(of: str, over: str, unit: str) -> list[float | None]:
        mean = MeanOverSeeds.of([getattr(run[of], unit) / getattr(run[over], unit) for run in runs])
        return [mean.mean, mean.margin]

    return {
        "decoded": gain("released with", "released without", "decoded"),
        "trained": gain("released with", "released without", "trained"),
        "ours": gain("april", "sync", "trained"),
        "ours over released": gain("april", "released without", "trained"),
        "filtered": statistics.fmean(run["sync"].filtered for run in runs),
    }


def table(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for law in LAWS:
        for algorithm, prompts, given in [("grpo", "", {}), *(("dapo", name, of) for name, of in PROMPTS.items())]:
            scenario = replace(SCENARIO, filter_zero_signal=algorithm == "dapo", **given)
            rows.append({"law": law, "algorithm": algorithm, "prompts": prompts} | cell(law, scenario, seeds))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    record = {
        "date": str(date.today()),
        "seeds": args.seeds,
        "b0": B0,
        "published": PUBLISHED,
        "rows": table(args.seeds),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
