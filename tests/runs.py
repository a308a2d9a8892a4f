"""Tiny experiments for end-to-end tests: a model folder, a dataset, a reward, and processes that die on cue.

Processes are forked from a server that has imported what a run needs, so a child costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import pytest

from rollover import cli
from rollover.batch import Batch
from rollover.report.progress import Progress
from rollover.rollout.events import CheckpointSaved, Event, Observed, SegmentEnded
from rollover.rollout.journal import Journal, read_events
from rollover.rollout.ledger import Ledger
from rollover.rollout.records import SampleState
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, Trajectory
from tests.segments import batch_of
from tests.speed import within

LETTERS = "abcdefgh"
CHARACTERS = [*"0123456789", *LETTERS, "=", "\n", "#", " "]
END = "<end>"

Say = Callable[..., str]
"""Gives a command line to ``rollover`` and returns what it says."""

_DEADLINE_S = within(120)
_ROOT = Path(__file__).parent.parent

REWARD = """\
import asyncio

def share(prompts, completions, answer, **columns):
    "The share of the response that is the letter asked for."
    return [text.count(letter) / max(1, len(text)) for text, letter in zip(completions, answer)]

async def share_now(prompts, completions, answer, **columns):
    return share(prompts, completions, answer)

def share_in_a_loop(prompts, completions, answer, **columns):
    return asyncio.run(share_now(prompts, completions, answer))
"""

CONFIG = """\
steps = 4
[model]
path = "model"
[[tasks.train]]
kind = "jsonl"
name = "letters"
path = "letters.jsonl"
[tasks.train.reward]
kind = "function"
function = "letter_reward:share_now"
workers = 0
[tasks]
max_prompt_tokens = 16
[rollout]
strategy = "april"
rollout_batch_size = 4
group_size = 2
max_new_tokens = 60
[engine]
max_running = 24
kv_cache_bytes = 4194304
block_size_tokens = 4
stream_interval_tokens = 2
[trainer]
learning_rate = 3e-3
[checkpoint]
every_steps = 2
[logging]
tensorboard = false
progress = "off"
"""

UNSEEN = """\
[[tasks.eval]]
kind = "jsonl"
name = "unseen"
path = "unseen.jsonl"
reward = {kind = "function", function = "letter_reward:share_now", workers = 0, pass_score = 0.05}
"""
"""Goes behind ``CONFIG``: prompts that are not trained."""


def save_tokenizer(folder: Path) -> int:
    """One token per character. Returns the size of the vocabulary."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocab = {END: 0, "<unknown>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    core = Tokenizer(WordLevel(vocab, unk_token="<unknown>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, unk_token="<unknown>").save_pretrained(folder)
    return len(vocab)


def save_model(folder: Path, family: str = "qwen3", *, seed: int = 3, **changes: Any) -> Path:
    """A random model with its tokenizer, written by transformers as a user's would be. It ends one response in ten or
    so at any token, so lengths differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    shape = {
        "vocab_size": save_tokenizer(folder),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 80,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(shape | changes))).float().save_pretrained(folder)
    return folder


def write_experiment(folder: Path, model: Path) -> Path:
    """``run.toml`` in ``folder``, with the model, dataset and reward function it names beside it."""
    (folder / "model").symlink_to(model)
    rows = [{"prompt": f"{i}{letter}=", "answer": letter} for i, letter in enumerate(LETTERS * 2)]
    (folder / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unseen = [{"prompt": f"{letter}{letter}=", "answer": letter} for letter in LETTERS]
    (folder / "unseen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unseen))
    (folder / "letter_reward.py").write_text(REWARD)
    (folder / "run.toml").write_text(CONFIG)
    return folder / "run.toml"


@contextlib.contextmanager
def working_in(folder: Path, model: Path) -> Iterator[None]:
    """``folder``, with the experiment in it, is the working directory, and nothing imported from there survives."""
    import torch

    threads, places, before = torch.get_num_threads(), list(sys.path), Path.cwd()
    write_experiment(folder, model)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.path[:] = [place for place in places if place]  # an installed program does not see its working directory
    try:
        yield
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        sys.path[:] = places
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


# -- what a run left behind ---------------------------------------------------------------------------------------


def events(run: Path) -> list[Event]:
    return [event for _, event in read_events(run / "journal.sqlite", effective=True)]


def batches(run: Path) -> list[Batch]:
    """All batches, also those older than the last checkpoint."""
    folded = RolloutState(event for event in events(run) if not isinstance(event, CheckpointSaved))
    return [batch_of(folded, step) for step in sorted(folded.ledger.batches)]


def trajectories(run: Path) -> list[Trajectory]:
    return [t for batch in batches(run) for t in batch.trajectories]


def sampled(run: Path) -> list[Any]:
    """All that was trained, but not when it was decoded."""
    return [
        (t.sample_id, t.response_ids, t.rollout_logprobs, t.policy_versions, [o.text for o in t.observations], t.reward)
        for t in trajectories(run)
    ]


def answers(run: Path) -> Counter[tuple[object, int]]:
    """The number of answers to each turn of each sample."""
    found, ended = Counter[tuple[object, int]](), Counter[object]()
    for event in events(run):
        if isinstance(event, SegmentEnded):
            ended[event.sample_id] += event.segment.finish_reason is FinishReason.TURN
        elif isinstance(event, Observed):
            found[event.sample_id, ended[event.sample_id]] += 1
    return found


def decode(token_ids: Sequence[int]) -> str:
    """As the reward function gets it: without special tokens."""
    return "".join(CHARACTERS[i - 2] for i in token_ids if i >= 2)


def ledger(run: Path) -> Ledger:
    """Folded and proved."""
    folded = Ledger(events(run))
    folded.check()
    return folded


def kill_amid_episodes(processes: Processes, *argv: str, nth: int, beside: Collection[str] = ()) -> None:
    """Kill a run in ``out`` at its ``nth`` answer. If no episode of a source not in ``beside`` is open with an answer
    then, begin again and kill at the next answer."""
    for later in range(8):
        shutil.rmtree("out", ignore_errors=True)
        for log in Path().glob("*s.txt"):
            log.write_text("")
        assert (ended := processes.run(*argv, "--run-dir", "out", kill_at=Cue(Observed, nth + later))).code == -9, ended
        samples = [s for group in ledger(Path("out")).groups.values() for s in group.samples]
        is_open = {SampleState.RUNNING, SampleState.PARKED, SampleState.ACTING}
        if any(s.state in is_open and s.trajectory.observations and s.prompt.source not in beside for s in samples):
            return
    raise AssertionError("no episode was in the middle at any kill")


def rows(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def weights(run: Path, step: int) -> bytes:
    """Weights of a checkpoint: the model's, or its adapters'."""
    folder = run / "checkpoints" / f"step_{step}"
    (file,) = (path for name in ("model", "adapter_model") if (path := folder / f"{name}.safetensors").is_file())
    return file.read_bytes()


def largest_logprob_error(run: Path, initial: Path, trajectories: list[Trajectory], *, replays: bool = True) -> float:
    """Between the log-probs on record and the trainer's forward pass under the version that each token is labelled
    with, of which there is a checkpoint; with ``replays``, by the kept sets and routes of the tokens."""
    import torch

    from rollover.trainer.logprobs import all_logprobs
    from rollover.trainer.models import open_model
    from rollover.trainer.packing import TrainingSample, pack

    samples = [path for t in trajectories for path in TrainingSample.all_of(t, replays_routes=True)]
    samples = samples if replays else [replace(sample, kept=(), routes=()) for sample in samples]
    versions_T = torch.tensor([v for t in trajectories for v in t.policy_versions])
    recorded_T = torch.tensor([p for t in trajectories for p in t.rollout_logprobs])
    worst = 0.0
    for version in versions_T.unique().tolist():
        model = open_model(run / "checkpoints" / f"step_{version}" if version else initial)
        logprobs_T = all_logprobs(model, pack(samples, 1024), 1.0, num_tokens=len(recorded_T))
        worst = max(worst, float((logprobs_T - recorded_T)[versions_T == version].abs().max()))
    return worst


# -- processes that die on cue ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cue:
    """The ``nth`` event of a kind (from 1, counting this process's) goes to the journal: just before it is on disk, or
    just after. With no kind, the ``nth`` step of the warm-up has been taken; with ``"flush"``, a file is forced to disk
    for the ``nth`` time."""

    kind: type[Event] | Literal["flush"] | None
    nth: int
    before: bool = False


@dataclass(frozen=True)
class Outcome:
    code: int
    """As ``Popen`` has it: minus the signal, for a process that was killed."""
    out: str
    err: str


def succeeded(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, f"exit code {outcome.code}: {outcome.err or outcome.out}"
    return outcome


class Processes:
    """Runs ``rollover`` in processes of their own, one at a time, in the folder ``cwd``."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preloaded"])
        with contextlib.chdir(_ROOT):  # where it finds what it imports
            forkserver.ensure_running()

    def run(
        self,
        *argv: str,
        kill_at: Cue | None = None,
        interrupt_at: Cue | None = None,
        signals: Sequence[int] = (signal.SIGINT,),
        kill_after_s: float | None = None,
    ) -> Outcome:
        """``kill_at`` sends the process SIGKILL; ``interrupt_at`` the ``signals``, Ctrl-C when left out, in a row.
        ``kill_after_s`` kills it so long after it was started."""
        for name in ("out.txt", "err.txt"):
            (self.cwd / name).write_text("")  # it may be killed before it opens them
        process = self._context.Process(target=_main, args=(str(self.cwd), argv, kill_at, interrupt_at, signals))
        process.start()
        if kill_after_s is not None:
            process.join(kill_after_s)
            process.kill()
        process.join(_DEADLINE_S)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"rollover {' '.join(argv)} did not end within {_DEADLINE_S} s")
        return Outcome(process.exitcode, (self.cwd / "out.txt").read_text(), (self.cwd / "err.txt").read_text())


def _main(cwd: str, argv: Sequence[str], kill_at: Cue | None, interrupt_at: Cue | None, signals: Sequence[int]) -> None:
    """The forked process."""
    import torch

    torch.set_num_threads(1)
    os.chdir(cwd)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if kill_at is not None:
        signal_at(kill_at, [signal.SIGKILL])
    if interrupt_at is not None:
        signal_at(interrupt_at, signals)
    code = cli.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def signal_at(cue: Cue, signals: Sequence[int]) -> None:
    def send() -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    def watch(owner: Any, name: str, is_due: Callable[..., bool]) -> None:
        as_ever = getattr(owner, name)

        def watched(*args: Any) -> None:
            due = is_due(*args)
            if due and cue.before:
                send()
            as_ever(*args)
            if due and not cue.before:
                send()

        pytest.MonkeyPatch().setattr(owner, name, watched)  # for good: the process ends with the run

    def is_appended(journal: Journal, events: Sequence[Event]) -> bool:
        before = len(seen)
        seen.extend(event for event in events if type(event) is cue.kind)
        return before < cue.nth <= len(seen)

    seen, calls = list[Event](), itertools.count(1)
    if cue.kind is None:
        watch(Progress, "warmup", lambda *_: next(calls) == cue.nth)
    elif cue.kind == "flush":
        watch(os, "fsync", lambda *_: next(calls) == cue.nth)
    else:
        watch(Journal, "append", is_appended)
