"""Runs that are killed again and again at random moments, and what must hold of them.

A case is a strategy, the unit it trains, and whether the run is deterministic. Its run has the defaults in everything but
sizes. It is killed with SIGKILL at moments drawn from a seed, in three ways: when an event goes to the journal, when a
file is forced to disk, and by the clock; and it is resumed in between, or begun again where it had not yet begun. After
every kill the journal is folded and conservation proved. When the run is over:

* each step was trained, each group at most once, no token older than the bound allows;
* no turn of an episode has two answers;
* every token that any of its processes wrote down as decoded was trained, is accounted for as waste, or is live;
* the newest checkpoints are there, as many as the default keeps, and whole;
* a deterministic run has the weights and the batches of one that nobody killed, bit for bit.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollover.rollout import events as recorded
from rollover.rollout.events import SegmentEnded
from rollover.rollout.journal import read_events
from rollover.rollout.strategies import STRATEGIES
from rollover.run.building import build_config
from rollover.trainer.checkpoint import list_checkpoints, read_manifest, verify_files
from tests import runs
from tests.runs import Cue, Processes, succeeded

STEPS = 8
CONFIG = """\
[model]
path = "model"
[[tasks.train]]
kind = "jsonl"
name = "letters"
path = "letters.jsonl"
reward = {kind = "function", function = "letter_reward:share_in_a_loop"}
[[tasks.eval]]
kind = "jsonl"
name = "unseen"
path = "unseen.jsonl"
reward = {kind = "function", function = "letter_reward:share_in_a_loop", pass_score = 0.05}
[tasks]
max_prompt_tokens = 16
[rollout]
rollout_batch_size = 4
group_size = 2
max_new_tokens = 60
[engine]
max_running = 12
kv_cache_bytes = 4194304
[trainer]
learning_rate = 3e-3
[checkpoint]
every_steps = 2
"""
"""Sizes, and what has no default."""
CLIENT = """\
import http.client, json, os, urllib.parse

def post(path, body):
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", url.path + path, json.dumps(body), head)
    response = connection.getresponse()
    content = json.loads(response.read())
    return content if response.status == 200 else None

def ask(*messages):
    answer = post("/chat/completions", {"messages": messages})
    return answer and answer["choices"][0]["message"]
"""
"""Asks the model. Each episode is a process, in which the import of httpx would take longer than all else."""
GAME = (
    CLIENT
    + """
import random

class Digits:
    def reset(self, row, seed):
        self.turns = 0
    def step(self, action):
        self.turns += 1
        return {"messages": f"{random.randint(0, 9)}=", "reward": len(action.text) / 20, "done": self.turns == 4}

def user(text):
    return {"role": "user", "content": text}

def plays(row):
    messages = [user(row["prompt"])]
    for turn in range(3):
        reply = ask(*messages)
        if reply is None:
            break
        post("/reward", {"reward": len(reply["content"] or "") / 20})
        messages += [reply, user(f"{turn}=")]

def branches(row):
    "Takes the better of two plans, has two others work at the same time, and goes on from what they said, and anew."
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor() as pool:
        plans = list(pool.map(ask, [user(row["prompt"])] * 2))
        if None not in plans:
            plan = max(plans, key=lambda plan: plan["content"])
            parts = list(pool.map(ask, [user("b="), user("c=")]))
            if None not in parts:
                said = "".join(part["content"][:3] for part in parts)
                ask(user(row["prompt"]), plan, user(said + "="))
                ask(user("d" + said))
    post("/reward", {"reward": sum(len(plan["content"]) for plan in plans if plan) / 40})
"""
)
"""An environment that needs its own random numbers and every turn to answer as before, and agents."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}#{% endif %}"

_ENVIRONMENT = "--tasks.train.0.environment"
EPISODES = (
    *(f"{_ENVIRONMENT}.kind", "class", f"{_ENVIRONMENT}.factory", "letter_game:Digits"),
    *(f"{_ENVIRONMENT}.max_turn_tokens", "14", f"{_ENVIRONMENT}.workers", "1"),
    *("--tasks.train.0.reward.kind", "environment", "--rollout.stop_strings", '["#", "7", "a"]'),
)
AGENTS = (
    *(f"{_ENVIRONMENT}.kind", "agent", f"{_ENVIRONMENT}.function", "letter_game:plays"),
    *(*EPISODES[4:], "--tasks.chat_template_file", "chat.jinja"),
)
TREES = (
    *(*AGENTS[:3], "letter_game:branches", f"{_ENVIRONMENT}.max_turn_tokens", "40", *AGENTS[6:10]),
    *("--rollout.stop_strings", json.dumps([*"#7eo"]), *AGENTS[-2:]),
)


PACKAGED = (
    *("--rollout.rollout_batch_size", "4", "--rollout.group_size", "2", "--sft.num_steps", "200"),
    *("--tasks.eval.0.limit", "8", "--eval.num_prompts", "8", "--checkpoint.every_steps", "2"),
)
"""Sizes of an experiment of the package, which warms its own model up."""


def write_game(folder: Path) -> None:
    """Write what ``EPISODES``, ``AGENTS`` and ``TREES`` name."""
    (folder / "letter_game.py").write_text(GAME)
    (folder / "chat.jinja").write_text(TEMPLATE)


_WAYS = {"event": 0.45, "flush": 0.2, "clock": 0.35}
_EVENTS: dict[type[recorded.Event], int] = {
    recorded.GroupOpened: 12,
    recorded.SampleStarted: 30,
    recorded.SegmentEnded: 50,
    recorded.SampleScored: 24,
    recorded.Observed: 40,
    recorded.BatchConsumed: 4,
    recorded.VersionPublished: 4,
    recorded.CheckpointSaved: 2,
    recorded.Restarted: 1,
}
"""Kinds of events, and up to which of a process the kill waits in a run of ``STEPS``."""
_MAX_FLUSHES = 25
_MAX_RESUMES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    strategy: str
    unit: str = "group"
    deterministic: bool = False
    adapters: bool = False
    """Adapters are trained, and published alone."""
    overlap: bool = False
    """Rounds overlap with training."""
    episodes: Literal["", "class", "agent", "tree"] = ""
    """An environment answers each turn, or a program asks for each."""
    packaged: Literal["", "tool", "agent"] = ""
    """The experiment of the package that is run, with its own environment and program."""
    steps: int = STEPS

    @property
    def name(self) -> str:
        ends = "-deterministic" * self.deterministic + "-adapters" * self.adapters + "-overlapped" * self.overlap
        kind = self.episodes or (self.packaged and f"packaged-{self.packaged}")
        return f"{self.strategy}-{self.unit}{ends}{kind and f'-{kind}'}"

    @property
    def experiment(self) -> str:
        return self.packaged or "run.toml"

    @property
    def argv(self) -> tuple[str, ...]:
        return (
            *("--rollout.strategy", self.strategy, "--rollout.unit", self.unit, "--steps", str(self.steps)),
            *(("--algorithm.advantage", "history") if self.unit == "sample" else ()),
            *(("--deterministic", "true") if self.deterministic else ()),
            *(("--rollout.strategy.overlap", "true") if self.overlap else ()),
            *(("--trainer.lora.rank", "4", "--trainer.lora.publish", "adapter") if self.adapters else ()),
            *{"": (), "class": EPISODES, "agent": AGENTS, "tree": TREES}[self.episodes],
            *(PACKAGED if self.packaged else ()),
        )


def cases() -> list[Case]:
    """All that can be run here for real."""
    made = []
    for strategy, config in STRATEGIES.items():
        for unit in ("group", "sample"):
            made.append(Case(strategy=strategy, unit=unit))
            made += [] if config().overlaps_training else [Case(strategy=strategy, unit=unit, deterministic=True)]
    made += [Case(strategy="rollover", unit=unit, overlap=True) for unit in ("group", "sample")]
    for kind in ("class", "agent", "tree"):
        made += [Case(strategy=name, episodes=kind) for name in ("april", "bounded_async")]
    made += [Case(strategy="april", deterministic=True, episodes=kind) for kind in ("class", "agent")]
    for experiment in ("tool", "agent"):
        made += [Case(strategy="april", deterministic=exact, packaged=experiment) for exact in (False, True)]
    return made


@dataclass(slots=True)
class Record:
    """What became of one case."""

    case: Case
    kills: Counter[str] = field(default_factory=Counter)
    """By the way in which the process was killed."""
    num_runs: int = 0
    """Runs that were brought to their end."""
    num_repeated_steps: int = 0
    """Training steps taken again after a kill."""
    decoded_tokens: int = 0
    lost_tokens: int = 0
    """Wasted because of the kills, as far as the journal knows of them: what a deterministic run decoded again."""

    @property
    def num_kills(self) -> int:
        return self.kills.total()


def kill_and_resume(case: Case, model: Path, folder: Path, *, num_kills: int, seed: int = 0) -> Record:
    """Kill runs of ``case`` so many times in all, each run several times, and bring each to its end.

    Raises:
        AssertionError: saying which law does not hold, of which run in ``folder``.
    """
    record = Record(case)
    processes = Processes(folder)
    folder.mkdir(parents=True)
    runs.write_experiment(folder, model)
    (folder / "run.toml").write_text(CONFIG)
    write_game(folder)
    whole, began_s = folder / "whole", time.monotonic()
    succeeded(processes.run("train", case.experiment, "--run-dir", "whole", *case.argv))
    whole_s = time.monotonic() - began_s
    while record.num_kills < num_kills:
        run = folder / f"killed-{record.num_runs}"
        lots = random.Random(f"{seed}/{case.name}/{record.num_runs}")
        try:
            _one_run(case, processes, run, record, lots, num_kills, whole_s)
            _check_end(case, run, whole if case.deterministic else None, record)
        except Exception as error:
            error.add_note(f"in {run}, run {record.num_runs} of case {case.name}, after {dict(record.kills)}")
            raise
        record.num_runs += 1
        shutil.rmtree(run)
    return record


def _one_run(
    case: Case, processes: Processes, run: Path, record: Record, lots: random.Random, num_kills: int, whole_s: float
) -> None:
    for _ in range(_MAX_RESUMES):
        begun = (run / "config.json").exists()
        argv = ("--resume", run.name) if begun else (case.experiment, "--run-dir", run.name, *case.argv)
        if record.num_kills >= num_kills:
            succeeded(processes.run("train", *argv))
            return
        way, moment = _drawn(lots, whole_s, case.steps)
        outcome = processes.run("train", *argv, **moment)
        if outcome.code != -9:
            succeeded(outcome)  # it came to its end before the moment did
            return
        record.kills[way] += 1
        if (run / "journal.sqlite").exists():
            runs.ledger(run)
    raise AssertionError(f"it has not come to its end after {_MAX_RESUMES} resumes")


def _drawn(lots: random.Random, whole_s: float, steps: int) -> tuple[str, dict[str, Any]]:
    """How and when the next process is killed, as arguments of ``Processes.run``. A run of ``steps`` that is left alone
    takes ``whole_s``."""
    (way,) = lots.choices(list(_WAYS), list(_WAYS.values()))
    before = lots.random() < 0.5
    if way == "clock":
        return way, {"kill_after_s": lots.uniform(0.0, whole_s)}
    if way == "flush":
        return way, {"kill_at": Cue("flush", lots.randint(1, _MAX_FLUSHES * steps // STEPS), before)}
    kind = lots.choice(list(_EVENTS))
    return way, {"kill_at": Cue(kind, lots.randint(1, max(1, _EVENTS[kind] * steps // STEPS)), before)}


def _check_end(case: Case, run: Path, whole: Path | None, record: Record) -> None:
    """The laws at the end of a run."""
    experiment = case.packaged or str(run.parent / "run.toml")
    config, last = build_config(experiment, case.argv), case.steps
    batches, ledger = runs.batches(run), runs.ledger(run)
    assert [batch.step for batch in batches] == list(range(last)), "a step is missing"
    groups = [group.group_id for batch in batches for group in batch.groups]
    assert len(set(groups)) == len(groups) == last * 4 * config.rollout.num_siblings, "a group was trained twice"
    bound = config.rollout.staleness_bound
    assert all(b.step - t.oldest_version <= bound for b in batches for t in b.groups), "a token is older than the bound"
    tokens = ledger.tokens
    assert tokens.decoded == sum(_decoded(run)), "a token that was decoded is not in the account"
    assert not ledger.running, "a sample of a finished run is running"
    if case.packaged and not case.deterministic:  # a deterministic run decodes the open round again, token for token
        again = {cause: num_tokens for cause, num_tokens in tokens.wasted.items() if cause.is_by_rollout and num_tokens}
        assert not again, "a turn was decoded again, or a sample failed"
    turns = runs.answers(run)
    assert not turns or max(turns.values()) == 1, "a turn has two answers"
    assert bool(turns) is bool(case.episodes or case.packaged)
    kept = list_checkpoints(run / "checkpoints")
    assert [path.name for path in kept] == [f"step_{last - 2}", f"step_{last}"], "other checkpoints than the default"
    for checkpoint in kept:
        verify_files(checkpoint, read_manifest(checkpoint))
    steps = [row["step"] for row in runs.rows(run)]
    assert set(steps) == set(range(last)), "a step has no metrics"
    record.num_repeated_steps += len(steps) - last
    record.decoded_tokens += tokens.decoded
    if whole is not None:
        assert runs.weights(run, last) == runs.weights(whole, last), "the weights are not those of the unkilled run"
        assert runs.sampled(run) == runs.sampled(whole), "the batches are not those of the unkilled run"
        record.lost_tokens += tokens.decoded - runs.ledger(whole).tokens.decoded


def _decoded(run: Path) -> Iterator[int]:
    """Tokens of every segment that any process of the run wrote down, also of rounds that were decoded again."""
    for _, event in read_events(run / "journal.sqlite"):
        if isinstance(event, SegmentEnded):
            yield len(event.segment.token_ids)
