"""The kill campaign over ranks: deterministic runs whose trainer is sharded, and whose ranks are killed or stopped at
random moments, until the runs are done.

    python benchmarks/rank_kills.py                  # 60 losses, some minutes on two idle cores
    python benchmarks/rank_kills.py --losses 6 --cases 2-ranks

A loss is SIGKILL or SIGSTOP to one rank, at a moment drawn from ``--seed``: while ranks start, train, publish, write a
checkpoint, check log-probs, or after that. The driver process is never touched; how it resumes stands in ``kills.py``.
What must hold of every run: it has the batches, the decoded tokens, the waste and the weights of one that nobody
disturbed, bit for bit, and each message names the rank that was lost and how. The result goes to ``--out``; a law that
does not hold ends the campaign with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rollover import cli  # noqa: E402
from rollover.rollout.events import BatchConsumed, SegmentEnded  # noqa: E402
from rollover.rollout.journal import read_events  # noqa: E402
from rollover.trainer import ranks  # noqa: E402
from tests import runs  # noqa: E402
from tests.trainer import forked_ranks  # noqa: E402

STEPS = 8
TIMEOUT_S = 4.0
"""Ranks that do nothing for so long are given up: what a stopped one costs."""
CASES = {
    "2-ranks": ("--trainer.num_devices", "2"),
    "3-ranks": ("--trainer.num_devices", "3", "--trainer.mini_batches", "2", "--algorithm.name", "dapo"),
    "2-ranks-lora": ("--trainer.num_devices", "2", "--trainer.lora.rank", "4"),
}
SETTINGS = (
    *("--steps", str(STEPS), "--deterministic", "true", "--checkpoint.every_steps", "2", "--logging.progress", "plain"),
    *("--trainer.rank_timeout_s", str(TIMEOUT_S), "--trainer.max_restarts", "1000", "--trainer.device", "cpu"),
)
_SHARE = 0.45
"""Of the things that ranks do, how many one of them is lost in."""
_FIRST_GUESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Loss:
    """One rank was sent a signal. Example: ``Loss(1, signal.SIGSTOP, "step")``."""

    rank: int
    number: signal.Signals
    doing: str


@dataclass(slots=True)
class Saboteur:
    """Loses ranks at random moments of what they are asked to do, until ``wanted`` were lost."""

    lots: random.Random
    wanted: int
    losses: list[Loss] = field(default_factory=list)
    _durations_s: dict[str, float] = field(default_factory=dict)
    """Of what ranks do, when it was last done undisturbed."""
    _struck: set[int] = field(default_factory=set)
    """The processes that were sent a signal."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        undisturbed = ranks.Ranks._answers

        def answers(own: ranks.Ranks, doing: str) -> list[Any]:
            kind = next((k for k in ("step", "publication", "checkpoint", "log-prob") if k in doing), doing)
            began_s, threads = time.monotonic(), self._arm(own.pids, kind)
            try:
                done = undisturbed(own, doing)
                self._durations_s[kind] = time.monotonic() - began_s
                return done
            finally:
                for thread in threads:
                    thread.join()

        ranks.Ranks._answers = answers  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            ranks.Ranks._answers = undisturbed  # type: ignore[method-assign]

    def _arm(self, pids: Sequence[int], kind: str) -> list[threading.Thread]:
        if len(self.losses) >= self.wanted or self.lots.random() > _SHARE or self._struck & {*pids}:
            return []  # a second loss before the first is found would hide one of them
        delay_s = self.lots.uniform(0.0, 1.3 * self._durations_s.get(kind, _FIRST_GUESS_S))
        rank = self.lots.randrange(len(pids))
        number = signal.SIGSTOP if self.lots.random() < 0.25 else signal.SIGKILL

        def lose() -> None:
            time.sleep(delay_s)
            os.kill(pids[rank], number)
            self._struck.add(pids[rank])
            self.losses.append(Loss(rank, number, kind))

        thread = threading.Thread(target=lose)
        thread.start()
        return [thread]


def run(folder: Path, name: str, case: str) -> str:
    """Run a case in ``folder / name`` to its end, and return what was said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["train", "run.toml", "--run-dir", str(folder / name), *SETTINGS, *CASES[case]])
    assert code == 0, said.getvalue()
    return said.getvalue()


def check(ours: Path, theirs: Path, said: str, losses: Sequence[Loss]) -> None:
    """Raise ``AssertionError`` unless a run that lost ranks is the one that lost none, and named each loss."""
    assert sampled(ours) == sampled(theirs), "other batches were trained"
    consumed = [event.step for event in runs.events(ours) if isinstance(event, BatchConsumed)]
    assert consumed == list(range(STEPS)), f"steps {consumed} were trained"
    one, other = runs.ledger(ours), runs.ledger(theirs)
    assert one.tokens == other.tokens, "other tokens were decoded, trained or wasted"
    assert weights(ours).keys() == weights(theirs).keys()
    for key, tensor in weights(ours).items():
        assert torch.equal(tensor, weights(theirs)[key]), f"{key} has other values"
    told = [line for line in " ".join(said.split()).split("trainer: ")[1:] if line.startswith("rank ")]
    assert len(told) in (len(losses), len(losses) - 1), f"{len(losses)} losses, {len(told)} messages"  # the last may
    # come when nothing is asked of ranks any more
    for message, loss in zip(told, losses, strict=False):
        how = "was killed (SIGKILL, " if loss.number == signal.SIGKILL else "it was stopped (SIGSTOP)"
        assert message.startswith(f"rank {loss.rank} of ") and how in message, f"{loss} was told as: {message}"


def counts(ours: Path, theirs: Path) -> dict[str, int]:
    """Count what the journal of a run says of its groups and tokens, beside that of one which lost no rank."""
    consumed = Counter(group for event in written(ours, BatchConsumed) for group in event.group_ids)
    expected = {group for event in written(theirs, BatchConsumed) for group in event.group_ids}
    decoded = [sum(len(e.segment.token_ids) for e in written(run, SegmentEnded)) for run in (ours, theirs)]
    return {
        "groups_trained": len(consumed),
        "groups_lost": len(expected - consumed.keys()),
        "groups_trained_twice": sum(times > 1 for times in consumed.values()),
        "tokens_decoded": decoded[0],
        "tokens_decoded_again": decoded[0] - decoded[1],
    }


def written(folder: Path, kind: type[Any]) -> list[Any]:
    """All events of a kind that ever went to the journal."""
    return [event for _, event in read_events(folder / "journal.sqlite") if isinstance(event, kind)]


def sampled(folder: Path) -> list[Any]:
    return [(t.sample_id, t.token_ids, t.reward) for batch in runs.batches(folder) for t in batch.trajectories]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds, moments included."""
    files = (folder / "checkpoints" / f"step_{STEPS}").rglob("*.safetensors")
    return {f"{path.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=60, help="in all (%(default)s)")
    parser.add_argument("--cases", default=",".join(CASES), help="between commas; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawn", action="store_true", help="start ranks as a run does, which takes seconds for each")
    parser.add_argument("--out", type=Path, help="the JSON file; none is written when left out")
    options = parser.parse_args(argv)
    chosen = options.cases.split(",")
    if unknown := [name for name in chosen if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}; known: {', '.join(CASES)}")
    if not options.spawn:
        ranks._start = forked_ranks.start
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="rollover-rank-kills-"))
    model, work = runs.save_model(folder / "model"), folder / "runs"
    work.mkdir()
    with runs.working_in(work, model):
        campaign(options, chosen, work)


def campaign(options: argparse.Namespace, chosen: Sequence[str], folder: Path) -> None:
    began_s, rows = time.monotonic(), list[dict[str, Any]]()
    print(f"{'case':14} {'losses':>6} {'killed':>7} {'stopped':>8} {'runs':>5}", flush=True)
    for i, case in enumerate(chosen):
        wanted = options.losses // len(chosen) + (i < options.losses % len(chosen))
        run(folder, f"{case}-whole", case)
        num_runs, losses, found = 0, list[Loss](), Counter[str]()
        while len(losses) < wanted:
            lots = random.Random(f"{options.seed}/{case}/{num_runs}")
            saboteur = Saboteur(lots, wanted - len(losses))
            name = f"{case}-{num_runs}"
            with saboteur.at_work():
                said = run(folder, name, case)
            try:
                check(folder / name, folder / f"{case}-whole", said, saboteur.losses)
            except AssertionError as error:
                sys.exit(f"{folder / name}: {error}")
            found.update(counts(folder / name, folder / f"{case}-whole"))
            found["steps_repeated"] += sum(map(int, re.findall(r", (\d+) steps? to repeat", " ".join(said.split()))))
            losses += saboteur.losses
            num_runs += 1
        ways = Counter(loss.number.name for loss in losses)
        print(f"{case:14} {len(losses):6} {ways['SIGKILL']:7} {ways['SIGSTOP']:8} {num_runs:5}", flush=True)
        rows.append(
            {
                "case": case,
                "losses": len(losses),
                "by_signal": dict(sorted(ways.items())),
                "by_moment": dict(sorted(Counter(loss.doing for loss in losses).items())),
                "runs": num_runs,
                **found,
            }
        )
    wall_s = time.monotonic() - began_s
    total = sum(row["losses"] for row in rows)
    print(f"{total} ranks lost in {wall_s:.0f} s: every law held")
    if options.out is not None:
        result = {
            "date": date.today().isoformat(),
            "command": f"python benchmarks/rank_kills.py --losses {options.losses} --seed {options.seed}"
            + (" --spawn" if options.spawn else ""),
            "machine": machine(),
            "steps_of_a_run": STEPS,
            "rank_timeout_s": TIMEOUT_S,
            "losses": total,
            "wall_s": round(wall_s, 1),
            "cases": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
