"""A campaign: one canary for every place and route a secret can take, and every output searched for it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from rollover import cli
from tests import runs
from tests.report.test_run_report import figures_of

CANARY = "c4nary-9f8e7d6c5b"
"""Nothing but this test writes it."""

REWARD = """\
async def share(prompts, completions, answer, **columns):
    return [text.count(letter) / max(1, len(text)) for text, letter in zip(completions, answer)]

async def leaky(prompts, completions, answer, **columns):
    raise RuntimeError(f"login refused: {columns}, https://me:{columns['api_key']}@host/?token={columns['api_key']}")
"""
IN_TOML = f"""
[tasks.train.reward.params]
api_key = "{CANARY}"
url = "https://me:{CANARY}@host/path?sig={CANARY}"
headers = {{ Authorization = "Bearer {CANARY}", Cookie = "id={CANARY}" }}
arguments = ["--auth-token", "{CANARY}", "-H", "X-Api-Key: {CANARY}"]
"""
IN_ARGUMENTS = (
    ["--tasks.train.0.reward.params.api_key", CANARY],
    [f"--tasks.train.0.reward.params.db_password={CANARY}"],
    ["--tasks.train.0.reward.params", f'{{api_key = "{CANARY}", url = "http://h/?t={CANARY}"}}'],
    [f'--tasks.train.0.reward={{kind = "function", function = "canary_reward:share", workers = 0, params = {{api_key = "{CANARY}"}}}}'],
)  # fmt: skip
SERVERS = f"""
[engine]
kind = "vllm"
launch = true
launch_command = ["python", "serve.py"]
launch_args = ["--api-key", "{CANARY}", "--hf-token={CANARY}"]
launch_env = {{ HF_TOKEN = "{CANARY}", PROXY = "http://me:{CANARY}@proxy" }}
launch_timeout_s = 30.0
"""


@pytest.fixture
def place(experiment: Path) -> Path:
    """The experiment with a reward that takes parameters."""
    Path("canary_reward.py").write_text(REWARD)
    text = Path("run.toml").read_text().replace("letter_reward:share_now", "canary_reward:share")
    Path("run.toml").write_text(text)
    return experiment


def said(capfd: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """What the command wrote to the terminal; the canary is not in it."""
    capfd.readouterr()
    before, sys.argv = sys.argv, ["rollover", *argv]
    try:
        assert cli.main(argv) == code, capfd.readouterr().err[-2000:]
    finally:
        sys.argv = before
    out, err = capfd.readouterr()
    assert CANARY not in out + err
    assert "Traceback" not in out + err
    return out + err


def holding_the_canary(folder: Path) -> set[str]:
    """Names of the files below ``folder`` in which the canary stands."""
    found = {file.name for file in folder.rglob("*") if file.is_file() and CANARY.encode() in file.read_bytes()}
    return found | {page.name for page in folder.glob("report.html") if CANARY in str(figures_of(page.read_text()))}


def test_a_secret_of_the_toml_file_reaches_config_json_alone(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(Path("run.toml").read_text() + IN_TOML + runs.UNSEEN.replace("letter_", "canary_"))
    text = Path("run.toml").read_text().replace("canary_reward:share_now", "canary_reward:share")
    Path("run.toml").write_text(text.replace("tensorboard = false", "tensorboard = true").replace('"off"', '"plain"'))
    said(capfd, 0, "train", "run.toml", "--run-dir", "out", "--steps", "2")
    said(capfd, 0, "train", "--resume", "out", "--steps", "3")
    said(capfd, 0, "report", "out")
    said(capfd, 0, "eval", "out", "--run-dir", "measured")
    assert holding_the_canary(Path("out")) == holding_the_canary(Path("measured")) == {"config.json"}
    assert "[hidden]" in Path("out/report.html").read_text()
    assert stat.S_IMODE(Path("out/report.html").stat().st_mode) == 0o600


@pytest.mark.parametrize("arguments", IN_ARGUMENTS[::3])
def test_a_secret_of_the_command_line_reaches_config_json_alone(
    place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    said(capfd, 0, "train", "run.toml", "--run-dir", "out", "--steps", "1", *arguments)
    said(capfd, 0, "report", "out")
    assert holding_the_canary(Path("out")) == {"config.json"}
    saved = json.loads(Path("out/config.json").read_text())
    assert CANARY not in json.dumps(saved["meta"])
    assert CANARY in json.dumps(saved["tasks"]), "the run itself needs it"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [*(("train", arguments) for arguments in IN_ARGUMENTS), ("eval", IN_ARGUMENTS[0]), ("sft", IN_ARGUMENTS[0])],
)
def test_a_dry_run_shows_no_secret_and_what_it_prints_says_so(
    place: Path, capfd: pytest.CaptureFixture[str], command: str, arguments: list[str]
) -> None:
    shown = said(capfd, 0, command, "run.toml", "--dry-run", *arguments)
    assert "[hidden]" in shown
    Path("printed.toml").write_text(shown)
    message = said(capfd, 2, "train", "printed.toml", "--dry-run")
    assert "this is the placeholder of a hidden secret: write the secret itself" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logging.api_key", CANARY],
        [f"--logging.api_key={CANARY}"],
        [f"--api-key={CANARY}"],
        ["--engine", f'{{api_key = "{CANARY}"}}'],
        ["--engine", f'{{api_key = "{CANARY}'],
        ["--engine.kind", "vllm", "--engine.urls", f'["http://me:{CANARY}@host"]'],
        ["--engine.kind", "vllm", "--engine.urls", f'["http://host/?key={CANARY}"]'],
        ["--engine.kind", "vllm", "--engine.launch", "true", "--engine.launch_env", f'{{A = ["{CANARY}"]}}'],
        ["--engine.kind", "vllm", "--engine.launch", "true", "--engine.launch_env.A.b", CANARY],
        ["--engine.kind", "vllm", "--engine.launch", "true", "--engine.launch_args", f'["--api-key", "{CANARY}", 3]'],
        ["--engine.kind", "vllm", "--engine.launch_args", f'["--api-key", "{CANARY}"]'],
        ["--engine.kind", "vllm", "--engine.launch", "true", "--engine.api_key_env", CANARY],
        ["--steps", f'{{api_key = "{"x" * 30}", token = "{CANARY}"}}'],
        ["--steps", f'{{padding = "{"x" * 30}", token = "{CANARY}"}}'],
        [f"api_key={CANARY}"],
        ["--tasks.train.0.reward.params.token", CANARY, CANARY],
        ["--tasks.train.0.path", f"https://me:{CANARY}@host/rows.jsonl?sig={CANARY}"],
        ["--model.path", f"https://me:{CANARY}@host/model?sig={CANARY}"],
        ["--tasks.train.0.reward", f'{{kind = "function", function = "gone:f", params = {{api_key = "{CANARY}"}}}}'],
    ],
)
def test_a_refusal_repeats_no_secret(place: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    said(capfd, 2, "train", "run.toml", "--run-dir", "out", *arguments)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "text", [f'[logging]\napi_key = "{CANARY}"', f'[engine]\nlaunch_env = {{ A = "{CANARY}" }}', f'token = "{CANARY}\n'],
)  # fmt: skip
def test_a_mistake_is_told_without_secrets_near_it(place: Path, capfd: pytest.CaptureFixture[str], text: str) -> None:
    Path("run.toml").write_text(text)
    said(capfd, 2, "train", "run.toml")


def test_what_a_failing_reward_says_is_redacted(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = ["--tasks.train.0.reward.function", "canary_reward:leaky", "--tasks.train.0.reward.params.api_key", CANARY]
    message = said(capfd, 2, "train", "run.toml", "--run-dir", "out", *reward)
    assert "login refused" in message


def test_a_server_that_does_not_start_leaks_nothing(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    serve = "import os, sys\nprint('api_key:', sys.argv, os.environ['HF_TOKEN'], os.environ['PROXY'])\nsys.exit(1)\n"
    Path("serve.py").write_text(serve)
    text = Path("run.toml").read_text()
    a, b = text.index("[engine]"), text.index("[trainer]")
    Path("run.toml").write_text(text[:a] + SERVERS + text[b:])
    message = said(capfd, 2, "train", "run.toml", "--run-dir", "out")
    assert "the server did not start: python serve.py" in message
    assert "api_key: [" in message
    assert holding_the_canary(Path("out")) <= {"config.json", "server-0.log"}
    assert stat.S_IMODE(next(Path("out").rglob("server-0.log")).stat().st_mode) == 0o600
    shown = said(capfd, 0, "train", "run.toml", "--dry-run")
    assert 'launch_args = ["--api-key", "[hidden]", "--hf-token=[hidden]"]' in shown


def test_only_the_owner_may_read_what_holds_secrets_or_answers(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0o022)
    try:
        said(capfd, 0, "train", "run.toml", "--run-dir", "out", "--steps", "1")
        for name in ("config.json", "journal.sqlite", "lock"):
            Path("out", name).chmod(0o644)  # as an earlier version left them
        said(capfd, 0, "train", "--resume", "out", "--steps", "2")
    finally:
        os.umask(before)
    kept = [p for p in Path("out").iterdir() if p.name.startswith(("config.json", "journal.sqlite", "lock"))]
    assert {p.name for p in kept} >= {"config.json", "journal.sqlite", "lock"}
    assert {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in kept} == {p.name: "0o600" for p in kept}


def test_a_secret_in_a_command_line_of_an_old_record_is_hidden(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said(capfd, 0, "train", "run.toml", "--run-dir", "out", "--steps", "1")
    saved = json.loads(Path("out/config.json").read_text())
    saved["meta"]["command"] = f"rollover train run.toml --engine '{{api_key = \"{CANARY}\"}}' --hf-token {CANARY}"
    Path("out/config.json").write_text(json.dumps(saved))
    shutil.copytree("out", "copy")
    said(capfd, 0, "report", "copy")
    assert "report.html" not in holding_the_canary(Path("copy"))
