"""Runs of a swarm with real processes: a trainer, workers on loopback, and SIGKILL for any of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from rollover.engine.servers.start.launch import free_port
from rollover.rollout.events import SegmentEnded
from rollover.rollout.journal import read_events
from rollover.run.layout import RUN_FILES
from rollover.swarm.coordinator.status.snapshot import StatusFile
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from tests import runs
from tests.speed import within

DEADLINE_S = within(240.0)
ROOT = Path(__file__).parents[2]


class Swarm:
    """A trainer and its workers, as processes in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.run = folder / "out"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        config = re.sub(r"\[engine\]\n.*?(?=\[trainer\])", "", runs.CONFIG, flags=re.DOTALL)
        (folder / "swarm.toml").write_text(f'{config}\n[engine]\nkind = "swarm"\nlease_s = 3.0\nmax_running = 24\n')

    def spawn(self, name: str, *argv: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.folder)])}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "rollover", *argv], cwd=self.folder, env=env, stdout=log, stderr=log
            )

    def train(self, *argv: str) -> None:
        self.spawn("trainer", "train", *argv, "--engine.listen", f"127.0.0.1:{self.port}")

    def join(self, name: str, *argv: str, url: str = "") -> None:
        """Start a worker, at once: those that are to share a short run begin together."""
        token = self.folder / f"{name}.token"
        if not token.exists():
            swarm = self.run / "swarm"
            key = open_key(swarm / "publisher.key").public_key()
            token.touch(0o600)
            token.write_text(Credentials(swarm / "workers.json").add(name, key).text)
        self.spawn(
            name,
            *("worker", "--join", url or f"ws://127.0.0.1:{self.port}", "--token-file", str(token)),
            *("--cache", str(self.folder / f"cache-{name}"), "--engine.max_running", "12", *argv),
        )

    def rollover(self, *argv: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rollover", *argv],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait()

    def until(self, what: str, condition: Path | Callable[[], bool], *, holds: str = "") -> None:
        """Wait for a file, or for text in it, or for anything else that becomes true."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not (
            condition.exists() and holds in condition.read_text(errors="replace")
            if isinstance(condition, Path)
            else condition()
        ):
            assert time.monotonic() < give_up_s, f"{what} did not happen:\n{self.logs()}"
            ended = self.processes["trainer"].poll()
            assert ended is None, f"the trainer ended with {ended} before {what}:\n{self.logs()}"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", self.run / "metrics.jsonl", holds=f'"step": {step}')

    def num_events(self) -> int:
        """Return how many events the journal has by now."""
        return sum(1 for _ in read_events(self.run / "journal.sqlite"))

    def until_sampled(self, name: str, *, after: int = 0) -> None:
        """Wait until tokens of a worker, for training, are in the journal behind its first so many events."""
        journal = self.run / "journal.sqlite"

        def has_sampled() -> bool:
            events = [event for _, event in read_events(journal)][after:] if journal.exists() else []
            segments = (event.segment for event in events if isinstance(event, SegmentEnded))
            return any(segment.engine == name and segment.token_ids for segment in segments)

        self.until(f"{name} has sampled", has_sampled)

    def until_state(self, name: str, state: str) -> None:
        """Wait until the trainer says that a worker is in a state."""
        status = StatusFile(self.run / "swarm" / "status.json")
        self.until(f"{name} is {state}", lambda: any((w.name, w.state) == (name, state) for w in status.read().workers))

    def finish(self) -> None:
        try:
            code = self.processes["trainer"].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.logs()) from None
        assert code == 0, self.logs()

    def logs(self) -> str:
        return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@contextmanager
def swarm(folder: Path) -> Iterator[Swarm]:
    made = Swarm(folder)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def tokens(run: Path) -> list[list[tuple[Sequence[int], Sequence[float]]]]:
    """Tokens of each batch with the log-probs that they were sampled with."""
    return [[(t.token_ids, t.rollout_logprobs) for t in batch.trajectories] for batch in runs.batches(run)]


def assert_conserved(run: Path, steps: int) -> None:
    ledger = runs.ledger(run)
    assert ledger.next_step == steps
    counted = ledger.tokens
    assert counted.decoded == counted.trained + counted.live + sum(counted.wasted.values())
    groups = [group.group_id for batch in runs.batches(run) for group in batch.groups]
    assert len(groups) == len(set(groups)), "a group was trained twice"


def assert_weights_are_accounted(run: Path, members: set[str]) -> None:
    """What the record of publications says is what the metrics of the steps say."""
    records = list(map(json.loads, (run / "swarm" / "weights.jsonl").read_text().splitlines()))
    changes = [record for record in records if record["record"] == "change"]
    assert {change["member"] for change in changes} <= members
    assert len({(change["member"], change["version"]) for change in changes}) == len(changes)
    assert all(change["wire_bytes"] > 0 and change["prepare_s"] > 0 for change in changes)
    assert sorted(p["version"] for p in records if p not in changes) == list(range(len(records) - len(changes)))
    told = sum(row.get("swarm/wire_bytes", 0) for row in runs.rows(run))
    assert 0 < told <= sum(change["wire_bytes"] for change in changes)  # the last changes come behind the last step


@pytest.mark.parametrize(
    ("names", "late", "steps"),
    [
        pytest.param(("a", "b", "c"), (), 30, id="three workers"),
        pytest.param(("a",), ("b",), 40, id="one that joins late"),
    ],
)
def test_pull_mode_is_the_co_located_run_for_any_number_of_workers(
    names: tuple[str, ...], late: tuple[str, ...], steps: int, experiment: Path
) -> None:
    argv = ["--rollout.strategy", "sync", "--steps", str(steps)]
    # Blocks are of the size that the co-located engine has, since sums are taken block by block; a batch of 8 samples
    # needs more places than one worker has, so each that is there decodes some.
    engine = ("--engine.block_size_tokens", "4", "--engine.max_running", "3")
    with swarm(experiment) as it:
        it.rollover("train", "run.toml", "--run-dir", "alone", *argv)
        it.train("swarm.toml", "--run-dir", "out", "--engine.mode", "pull", *argv)
        it.until("the swarm", it.run / "swarm" / "status.json")
        for name in names:
            it.join(name, *engine)
        if late:
            it.until_step(0)
        for name in late:
            it.join(name, *engine)
        it.finish()
        for name in (*names, *late):
            assert it.processes[name].wait(DEADLINE_S) == 0, it.logs()
            assert "left the swarm: the run has ended" in (experiment / f"{name}.log").read_text()
        workers = StatusFile(it.run / "swarm" / "status.json").read().workers
        assert {(w.state, w.num_held) for w in workers} == {("away", 0)}
    assert tokens(it.run) == tokens(experiment / "alone")
    ours, theirs = (load(runs.weights(run, steps)) for run in (it.run, experiment / "alone"))
    for name, tensor in theirs.items():  # the kernels compute each row alone, whatever is decoded beside it
        assert torch.equal(ours[name], tensor), name
    for batch in runs.batches(it.run):
        assert {v for t in batch.trajectories for v in t.policy_versions} == {batch.step}
    sampled_by = [
        {s.engine for t in batch.trajectories for s in t.segments if s.token_ids} for batch in runs.batches(it.run)
    ]
    assert set.union(*sampled_by) == {*names, *late}, "each has done its share"
    assert not late or sampled_by[0] == {*names}
    assert_weights_are_accounted(it.run, members={*names, *late})
    assert {entry.name for entry in it.run.iterdir()} <= {*RUN_FILES}, "no variant can take one of these names"


def test_workers_and_trainer_are_killed_and_nothing_is_lost_or_doubled(experiment: Path) -> None:
    steps = 120  # enough for each worker to sample after the trainer was killed, on a fast machine too
    with swarm(experiment) as it:
        argv = ["--rollout.strategy", "bounded_async", "--rollout.max_staleness", "2", "--steps", str(steps)]
        it.train("swarm.toml", "--run-dir", "out", *argv)
        it.until("the swarm", it.run / "swarm" / "status.json")
        for name in ("a", "b"):
            it.join(name)
        for name in ("a", "b"):
            it.until_sampled(name)
        it.until_step(3)
        it.kill("a")
        it.until_step(5)
        it.kill("trainer")
        before = it.num_events()
        it.join("a")
        it.train("--resume", str(it.run))
        for name in ("a", "b"):
            it.until_sampled(name, after=before)
        it.kill("b")
        it.kill("a")
        it.join("c")  # without which the run would not end
        it.finish()
        members = {w.name: w for w in StatusFile(it.run / "swarm" / "status.json").read().workers}
    assert_conserved(it.run, steps)
    lags = [batch.step - v for batch in runs.batches(it.run) for t in batch.trajectories for v in t.policy_versions]
    assert max(lags) <= 2
    assert {"a", "c"} <= members.keys() and not any(w.state == "sent away" for w in members.values())
    sampled_by = {s.engine for batch in runs.batches(it.run) for t in batch.trajectories for s in t.segments}
    assert {"a", "b"} <= sampled_by
    assert [row["step"] for row in runs.rows(it.run)][-1] == steps - 1


def test_a_revoked_worker_is_sent_away_and_says_so(experiment: Path) -> None:
    with swarm(experiment) as it:
        it.train("swarm.toml", "--run-dir", "out", "--steps", "400")
        it.until("the swarm", it.run / "swarm" / "status.json")
        it.join("a")
        it.join("b")
        for name in ("a", "b"):
            it.until_sampled(name)
        it.rollover("workers", str(it.run), "--revoke", "a")
        assert it.processes["a"].wait(DEADLINE_S) == 2
        assert "revoked" in (experiment / "a.log").read_text()
        it.until_state("a", "sent away")
        assert "sent away" in it.rollover("workers", str(it.run))
        second = it.rollover("train", "--resume", str(it.run), "--engine.listen", "127.0.0.1:0", code=2)
        assert f"is in use by pid {it.processes['trainer'].pid}" in second, "a run has one coordinator"
        step = runs.rows(it.run)[-1]["step"]
        it.until_step(step + 2)
        it.processes["trainer"].send_signal(signal.SIGINT)
        assert it.processes["trainer"].wait(DEADLINE_S) in (0, 130), it.logs()
