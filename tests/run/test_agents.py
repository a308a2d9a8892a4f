"""Programs that call the model over HTTP, trained by ``rollover train``: exact tokens, parks, kills and restarts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rollover import cli
from rollover.rollout.events import Observed, SampleFailed
from rollover.run.building import find
from rollover.types import FinishReason, Trajectory
from tests import runs
from tests.kills import CLIENT
from tests.runs import Cue, Processes

TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}#{% endif %}"

AGENT = (
    CLIENT
    + """
import sys

row = json.loads(os.environ["ROLLOVER_ROW"])
assert json.load(sys.stdin) == row
messages, count = [{"role": "user", "content": row["prompt"] + SALT}], 0
while count < 3:
    reply = ask(*messages)
    if reply is None:
        break
    count += 1
    messages += [reply, {"role": "user", "content": f"{count}{row['answer']}="}]
assert post("/reward", {"reward": count / 2})
"""
)
"""Asks three times, as far as it may."""

TREE = """\
import concurrent.futures

def say(*texts):
    said = [{"role": "user" if number % 2 == 0 else "assistant", "content": t} for number, t in enumerate(texts)]
    reply = ask(*said)
    return reply and reply["content"]

with concurrent.futures.ThreadPoolExecutor() as pool:
    plans = list(pool.map(say, [row["prompt"]] * 2))
if None not in plans:
    best = max(plans, key=lambda plan: (len(plan), plan))
    say(row["prompt"], best, "1=")
    say(row["prompt"], "#" + best, "2=")
assert post("/reward", {"reward": float(len(plans[0] or ""))})
"""
"""Takes the better one of two replies up, and edits it."""

ENVIRONMENT = f"""\
reward = {{kind = "environment"}}
[tasks.train.environment]
kind = "agent"
command = ["{sys.executable}", "agent.py"]
max_turn_tokens = 48
"""


@pytest.fixture
def processes(agent: Path) -> Processes:
    return Processes(agent)


@pytest.fixture
def agent(experiment: Path) -> Path:
    """The experiment, whose responses are the episodes of ``agent.py``."""
    from transformers import AutoTokenizer

    runs.save_model(Path("chat"), max_position_embeddings=120)
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("chat")
    head, _, rest = runs.CONFIG.partition("[tasks.train.reward]")
    config = (head + ENVIRONMENT + "[tasks]" + rest.partition("[tasks]")[2]).replace('"model"', '"chat"')
    config = config.replace("max_prompt_tokens = 16", "max_prompt_tokens = 8").replace("= 60", "= 100")
    Path("run.toml").write_text(config.replace("rollout_batch_size = 4", "rollout_batch_size = 2"))
    Path("agent.py").write_text(AGENT.replace("SALT", "''"))
    return experiment


def said(text: str) -> tuple[int, ...]:
    return (*(runs.CHARACTERS.index(c) + 2 for c in text), 0, runs.CHARACTERS.index("#") + 2)


def assert_as_asked(trajectory: Trajectory) -> None:
    """Every token is what the program asked or the model sampled, and the reward what the program posted."""
    row, turns = trajectory.prompt.columns, trajectory.turns
    assert trajectory.prompt.token_ids == () and turns[0] == ()
    asked = [row["prompt"], *(f"{n}{row['answer']}=" for n in (1, 2))]
    last = trajectory.observations[-1]
    given = trajectory.observations[:-1] if last.end is not None else trajectory.observations
    for number, (text, observation) in enumerate(zip(asked, given, strict=False)):
        begun = said(text) if number == 0 or turns[number][-1] == 0 else (0, *said(text))
        assert observation.token_ids == begun
        assert json.loads(observation.text) == {"messages": [{"role": "user", "content": text}]}
    if trajectory.finish_reason is FinishReason.STOP:
        assert (len(turns), trajectory.reward) == (4, 1.5), trajectory
    else:
        assert trajectory.reward == (len(given) / 2 if last.end is not None else 0.0)


def test_what_a_program_asks_is_trained_token_for_token(agent: Path) -> None:
    many = ("--steps", "3", "--rollout.strategy.over_sampling_batch_size", "8", "--deterministic", "true")
    assert cli.main(["train", "run.toml", "--run-dir", "out", *many]) == 0
    trained = runs.trajectories(Path("out"))
    for trajectory in trained:
        assert_as_asked(trajectory)
    assert {t.finish_reason for t in trained} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(len(set(t.policy_versions)) > 1 for t in trained), "an episode goes on under newer weights"
    drifts = [row["drift"] for row in runs.rows(Path("out")) if "drift" in row]
    assert drifts and max(drifts) < 1e-5, "the engine and the trainer read the same tokens"
    assert runs.ledger(Path("out")).num_failed == 0


def test_a_killed_run_answers_programs_from_the_record(agent: Path, processes: Processes) -> None:
    killed = processes.run("train", "run.toml", "--run-dir", "out", kill_at=Cue(Observed, 16))
    assert killed.code == -9
    before = {s.sample_id: s.trajectory for g in runs.ledger(Path("out")).groups.values() for s in g.samples}
    assert any(len(t.observations) > 1 and t.finish_reason is not FinishReason.STOP for t in before.values())
    assert processes.run("train", "--resume", "out").code == 0
    found = runs.ledger(Path("out"))
    assert found.num_failed == 0
    for group in found.groups.values():
        for sample in group.samples:
            if (known := before.get(sample.sample_id)) is not None:
                assert sample.trajectory.response_ids[: len(known.response_ids)] == known.response_ids
                assert sample.trajectory.observations[: len(known.observations)] == known.observations
    for trajectory in runs.trajectories(Path("out")):
        assert_as_asked(trajectory)


def test_a_program_that_asks_otherwise_after_a_kill_fails_its_sample(agent: Path, processes: Processes) -> None:
    Path("agent.py").write_text(AGENT.replace("SALT", "str(os.getpid())[-4:]"))
    config = Path("run.toml").read_text().replace('"april"', '"sync"')  # which waits for the episodes that are open
    Path("run.toml").write_text(config.replace("= 48", "= 48\nturn_timeout_s = 3"))
    reasons = list[str]()
    for nth in range(16, 20):  # an episode that ends at the limit of the open turn needs its program no more
        runs.kill_amid_episodes(processes, "train", "run.toml", nth=nth)
        assert processes.run("train", "--resume", "out").code == 0
        reasons += [event.reason for event in runs.events(Path("out")) if isinstance(event, SampleFailed)]
        if reasons:
            break
    assert reasons and all('started again, the program added \'{"messages"' in reason for reason in reasons)


def test_the_program_of_the_documentation_is_trained_on_the_packaged_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_draws: None
) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "agents.md"
    program = page.read_text().partition("```python\n")[2].partition("```")[0]
    assert "from openai import" in program and len(program.splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(program)
    config = find("agent").read_text().partition("[[tasks.train]]")[2].partition("[[tasks.eval]]")[0]
    command = f'command = ["{sys.executable}", "agent.py"]'
    config = config.replace('function = "rollover.tasks.calculator_agent:solve"', command)
    assert command in config
    sizes = "[sft]\nnum_steps = 150\n[rollout]\nrollout_batch_size = 2\ngroup_size = 2\n[eval]\nnum_prompts = 1\n"
    Path("run.toml").write_text(f'extends = "agent"\nsteps = 1\n{sizes}[[tasks.train]]{config}')
    argv = ["train", "run.toml", "--run-dir", "out", "--logging.progress", "off", "--rollout.strategy", "sync"]
    assert cli.main(argv) == 0
    trained = runs.trajectories(Path("out"))
    assert len(trained) == 4 and runs.ledger(Path("out")).num_failed == 0
    assert max(t.num_turns for t in trained) > 2, "the calculator is used"


def test_branches_are_trained_once_each_and_survive_a_kill(agent: Path, processes: Processes) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    Path("agent.py").write_text(AGENT.partition("messages, count")[0] + TREE)
    assert processes.run("train", "run.toml", "--run-dir", "out", kill_at=Cue(Observed, 24)).code == -9
    assert processes.run("train", "--resume", "out").code == 0
    assert runs.ledger(Path("out")).num_failed == 0
    trained = runs.trajectories(Path("out"))
    whole = [t for t in trained if t.finish_reason is FinishReason.STOP]
    assert whole and {t.paths for t in whole} <= {((0, 1), (0, 2, 3), (0, 4)), ((0, 2), (0, 1, 3), (0, 4))}
    drifts = [row["drift"] for row in runs.rows(Path("out")) if "drift" in row]
    assert drifts and max(drifts) < 1e-5, "the engine and the trainer read the same tokens"
    assert max(row["episode/rows"] for row in runs.rows(Path("out")) if "episode/rows" in row) > 2
    model, seen = AutoModelForCausalLM.from_pretrained("chat"), 0
    for trajectory in (t for t in trained if set(t.policy_versions) == {0}):
        logprobs = iter(trajectory.rollout_logprobs)
        for turn, ids in enumerate(trajectory.turns[1:], start=1):
            before, seen = trajectory.before(turn), seen + 1
            logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].detach()
            found = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            torch.testing.assert_close(found, torch.tensor([next(logprobs) for _ in ids]), atol=1e-5, rtol=1e-5)
    assert seen > 4
