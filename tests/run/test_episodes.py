"""Runs with episodes, from the command line to the weights: kills, resumes, evaluation and what a person sees."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollover import cli
from rollover.environments.episodes.actor import environment_seed
from rollover.rollout.events import CheckpointSaved, Observed, SegmentEnded
from rollover.types import Prompt
from tests import runs
from tests.report.test_run_report import figures_of
from tests.run.test_train import EVERY_VERSION, LOGPROB_TOLERANCE
from tests.runs import Cue, Processes, Say, succeeded

GAME = """\
import random, time

class Digits:
    "Answers each turn with a random digit, until the model has had three turns."
    def __init__(self, slow_s=0.0, opens=False):
        self.slow_s, self.opens = slow_s, opens
    def reset(self, row, seed):
        self.letter, self.turns, self.draw = row["answer"], 0, random.random()
        return f"{row['answer']}{random.randint(0, 9)}=" if self.opens else None
    def step(self, action):
        time.sleep(self.slow_s)
        self.turns += 1
        with open("log.txt", "a") as file:
            file.write(f"{self.letter} {self.turns}\\n")
        answer = f"{random.randint(0, 9)}{self.letter}="
        return {"messages": answer, "reward": action.text.count(self.letter) / 8, "done": self.turns == 3}

def lookup(letter: str) -> str:
    '''Look a letter up.

    Args:
        letter: the letter
    '''
    return letter.upper()

def calls(text):
    return [("lookup", {"letter": text[-1:]})] if "4" in text else []
"""
SESSIONS = """
import json, os, uuid

class Snapshots(Digits):
    def reset(self, row, seed):
        super().reset(row, seed)
        self.name = uuid.uuid4().hex
    def restore(self, state):
        self.name, self.letter, self.turns = state
        self.log("restored")
    def snapshot(self):
        return [self.name, self.letter, self.turns]
    def step(self, action):
        self.log(self.turns)
        return super().step(action)
    def log(self, what):
        with open(f"{type(self).__name__.lower()}.txt", "a") as file:
            file.write(f"{self.name} {what} {os.getpid()}\\n")

class Nones(Snapshots):
    "Needs no earlier turn."
    def step(self, action):
        self.turns = action.turn
        return super().step(action)

class Lives(Snapshots):
    "Its files outlive this process, as a server would."
    def step(self, action):
        path = f"sessions/{self.name}.json"
        served = json.load(open(path)) if os.path.exists(path) else []
        if action.turn == len(served):
            self.turns = action.turn
            served.append(Digits.step(self, action))
            with open(path + ".new", "w") as file:
                json.dump(served, file)
            os.replace(path + ".new", path)
            self.log(action.turn)
        return served[action.turn]
"""
TOML = """\
steps = 6
model.path = "model"
[[tasks.train]]
kind = "jsonl"
name = "letters"
path = "letters.jsonl"
reward = { kind = "environment" }
environment = { kind = "class", factory = "game:Digits", max_turn_tokens = 10, workers = 1 }
[[tasks.eval]]
kind = "jsonl"
name = "unseen"
path = "unseen.jsonl"
reward = { kind = "environment" }
environment = { kind = "class", factory = "game:Digits", max_turn_tokens = 10, workers = 1 }
"""
SIZES = (
    *("--tasks.max_prompt_tokens", "16", "--rollout.max_new_tokens", "40", "--engine.kv_cache_bytes", "4194304"),
    *("--rollout.rollout_batch_size", "4", "--rollout.group_size", "3", "--logging.progress", "off"),
    *("--engine.max_running", "10", "--engine.block_size_tokens", "4", "--rollout.stop_strings", '["#", "7"]'),
    *("--checkpoint.every_steps", "2"),
)

OPENS = (
    *("--tasks.train.0.environment.params.opens", "true", "--tasks.train.0.environment.reset_in_prompt", "true"),
    *("--tasks.eval.0.environment.params.opens", "true", "--tasks.eval.0.environment.reset_in_prompt", "true"),
)


@pytest.fixture
def processes(experiment: Path) -> Processes:
    Path("game.py").write_text(GAME)
    Path("run.toml").write_text(TOML)
    return Processes(experiment)


def test_a_killed_deterministic_run_of_episodes_ends_the_same(processes: Processes) -> None:
    argv = ["train", "run.toml", "--deterministic", "true", *SIZES]
    succeeded(processes.run(*argv, "--run-dir", "whole"))
    cues = [Cue(SegmentEnded, 20), Cue(Observed, 30, before=True), Cue(CheckpointSaved, 1)]
    for number, cue in enumerate(cues):
        resumed = ["train", "--resume", "killed"] if number else [*argv, "--run-dir", "killed"]
        assert processes.run(*resumed, kill_at=cue).code == -9
    succeeded(processes.run("train", "--resume", "killed"))
    assert runs.sampled(Path("killed")) == runs.sampled(Path("whole"))
    assert runs.weights(Path("killed"), 6) == runs.weights(Path("whole"), 6)
    found = runs.trajectories(Path("whole"))
    assert max(t.num_turns for t in found) == 3
    assert any(t.policy_versions[0] != t.policy_versions[-1] for t in found if t.num_turns > 1)


def test_a_killed_run_repeats_lost_episodes_and_loses_no_turn(processes: Processes, done: Say) -> None:
    argv = ["train", "run.toml", "--tasks.train.0.environment.params.slow_s", "0.02", *OPENS, *SIZES]
    for number, cue in enumerate([Cue(Observed, 15), Cue(SegmentEnded, 12), Cue(Observed, 9, before=True)]):
        resumed = ["train", "--resume", "out"] if number else [*argv, "--run-dir", "out"]
        assert processes.run(*resumed, kill_at=cue).code == -9
    succeeded(processes.run("train", "--resume", "out"))
    ledger = runs.ledger(Path("out"))
    assert ledger.tokens.observed_in_batches > 0
    assert max(runs.answers(Path("out")).values()) == 1, "a turn has two answers"
    seen = Counter(Path("log.txt").read_text().split("\n"))
    assert seen, "the environment has acted"
    for trajectory in runs.trajectories(Path("out")):
        row, opening = trajectory.prompt.columns, trajectory.observations[0]
        assert trajectory.prompt.token_ids == trajectory.turns[0] == () and opening.text[0] == row["answer"]
        assert opening.token_ids == tuple(runs.CHARACTERS.index(c) + 2 for c in f"{row['prompt']}{opening.text}")
    assert cli.main(["samples", "out", "--show", "2"]) == 0
    assert cli.main(["eval", "out", "--logging.progress", "off"]) == 0
    assert runs.rows(Path("out"), "eval")[0]["eval/scored"] == 8
    assert "first prompt, 6 tokens" in done("train", "run.toml", "--dry-run", *OPENS, *SIZES)


def test_episodes_go_on_after_a_kill_as_their_recovery_says(processes: Processes) -> None:
    """Sources of three kinds in one run: from snapshots, in live sessions, and begun again."""
    Path("sessions").mkdir()
    with Path("game.py").open("a") as file:
        file.write(SESSIONS)
    head, source, rest = re.split(r"(?<=model.path = .model.\n)|(?=\[\[tasks.eval)", TOML)
    kinds = ("snapshot", "live", "none")
    for kind in kinds:
        Path(f"{kind}s.txt").touch()  # a run may be killed before a source had its turn
        factory = f'"game:{kind.title()}s", recovery = "{kind}"'
        head += source.replace('"letters"', f'"{kind}"', 1).replace('"game:Digits"', factory)
    Path("run.toml").write_text(head + rest)
    argv = ["train", "run.toml", "--steps", "3", *SIZES, "--engine.max_running", "30"]
    # An episode in the middle may end by its length, and need its environment no more.
    assert any(_killed_and_resumed(processes, kinds, argv, nth) for nth in range(24, 28)), "no episode was taken up"
    turns = {t.num_turns for t in runs.trajectories(Path("out"))}
    assert 3 in turns and runs.ledger(Path("out")).num_failed == 0


def _killed_and_resumed(processes: Processes, kinds: Sequence[str], argv: list[str], nth: int) -> set[str]:
    """Return the episodes that were taken up again."""
    runs.kill_amid_episodes(processes, *argv, nth=nth, beside=["none"])
    before = {kind: Path(f"{kind}s.txt").read_text() for kind in kinds}
    succeeded(processes.run("train", "--resume", "out"))
    gone_on: set[str] = set()
    for kind in kinds:
        steps = [line.split() for line in Path(f"{kind}s.txt").read_text().split("\n")[:-1]]
        took_up = {name for name, turn, _ in steps if turn == "restored"}
        assert kind != "none" or not took_up
        assert all(f"{name} 0" in before[kind] for name in took_up)
        played = Counter((name, turn) for name, turn, _ in steps if turn != "restored")
        repeated = [key for key, times in played.items() if times > 1]
        assert kind == "snapshot" or not repeated, "a server applies a turn once, and a new object plays no old turn"
        assert all(played[name, turn] == 2 for name, turn in repeated), "an open turn is repeated, and no other"
        assert len(repeated) <= len({name for name, _ in repeated}), "one open turn for each episode"
        afresh = {name for name, _ in played} - {name for name, turn in played if turn == "0"}
        assert kind == "none" or not afresh, "an object that begins in the middle"
        gone_on |= took_up | afresh
    return gone_on


def test_tools_train_evaluate_and_are_shown(processes: Processes, done: Say) -> None:
    tools = 'environment = { kind = "tools", functions = ["game:lookup"], parser = "game:calls", workers = 1 }'
    config = re.sub(r"environment = .*", tools, TOML).replace(
        '{ kind = "environment" }', '{ kind = "function", function = "game:score" }'
    )
    Path("run.toml").write_text(config)
    with Path("game.py").open("a") as file:
        file.write(
            "def score(prompts, completions, answer, transcripts, **columns):\n"
            "    turns = [m for m in transcripts[0] if m['role'] == 'assistant']\n"
            "    assert completions[0] == turns[-1]['content']\n"
            "    return [transcripts[0][-1]['content'].count(answer[0]) + len(turns) / 8]\n"
        )
    argv = ["train", "run.toml", "--run-dir", "out", "--steps", "2", *SIZES[:-2], *EVERY_VERSION]
    assert cli.main(argv) == 0
    assert cli.main(["eval", "out", "--logging.progress", "off"]) == 0
    found = runs.trajectories(Path("out"))
    with_turns = [b.step for b in runs.batches(Path("out")) if any(t.num_turns > 1 for t in b.trajectories)]
    assert with_turns and all(t.reward for t in found)
    assert runs.largest_logprob_error(Path("out"), Path("model"), found) < LOGPROB_TOLERANCE
    assert runs.rows(Path("out"), "eval")[0]["eval/scored"] == 8
    assert "⟦environment:" in done("samples", "out", "--step", str(with_turns[0]), "--show", "12")
    assert "the environment answered with" in str(figures_of(Path("out/report.html").read_text()))


def test_evaluations_meet_the_same_episodes_whatever_the_seed_of_the_run(processes: Processes) -> None:
    """But a run that an earlier version began goes on with its own."""
    with Path("game.py").open("a") as file:
        file.write(
            "class Seeded(Digits):\n"
            "    def reset(self, row, seed):\n"
            "        super().reset(row, seed)\n"
            "        with open('seeds.txt', 'a') as file: file.write(f'{seed}\\n')\n"
        )

    unseen = TOML.rindex("game:Digits")
    Path("run.toml").write_text(TOML[:unseen] + TOML[unseen:].replace("Digits", "Seeded"))

    def seeds(*argv: str) -> set[str]:
        Path("seeds.txt").write_text("")
        assert cli.main([*argv, "--logging.progress", "off"]) == 0
        return set(Path("seeds.txt").read_text().split())

    def made_of(seed: int) -> set[str]:
        ids = (f"eval/unseen/{i}@0" for i in range(8))
        prompts = (Prompt(prompt_id=each, token_ids=(1,), text="", source="eval/unseen") for each in ids)
        return {str(environment_seed(seed, prompt)) for prompt in prompts}

    assert set() < seeds("train", "run.toml", "--run-dir", "run", "--seed", "1", "--steps", "1", *SIZES) <= made_of(0)
    assert set() < seeds("eval", "run") <= made_of(0)
    config = json.loads(Path("run/config.json").read_text())
    assert config["meta"].pop("eval_seed") == 0
    Path("run/config.json").write_text(json.dumps(config))
    assert set() < seeds("train", "--resume", "run", "--steps", "2") <= made_of(1)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("factory", "game:Digit", "no function 'Digit' in game"),
        ("factory", "nowhere:Digits", "cannot import 'nowhere'"),
        ("params.sides", "6", "environment.params do not fit game:Digits"),
    ],
)
@pytest.mark.usefixtures("processes")
def test_a_broken_environment_is_named_before_anything_runs(refused: Say, key: str, value: str, told: str) -> None:
    assert told in refused("train", "run.toml", "--dry-run", f"--tasks.train.0.environment.{key}", value, *SIZES)


def test_a_warm_up_awaits_what_an_environment_does(processes: Processes, refused: Say) -> None:
    with Path("game.py").open("a") as file:
        file.write(
            "class Late(Digits):\n"
            "    async def reset(self, row, seed): super().reset(row, seed)\n"
            "    async def step(self, action): return f'{1 / (8 - int(action.text))}'\n"
            "    async def demonstrate(self, row): return ['7', '8']\n"
        )
    late = ("--tasks.train.0.environment.factory", "game:Late", "--sft.num_steps", "1", "--sft.batch_size", "2")
    for job in ("train", "eval", "sft"):
        told = refused(job, "run.toml", "--run-dir", job, *late, *SIZES)
        assert "environment of prompt letters/7@0, step: ZeroDivisionError: division" in told
