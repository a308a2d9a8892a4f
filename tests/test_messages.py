"""The whole messages of the mistakes that users make most often, as ``messages.txt`` records them.

A block of that file is a command and what it says. ``python -m tests.test_messages`` runs the commands of the file and
records their messages anew, so that a change of wording is read as a change of that file.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import tempfile
from pathlib import Path

import pytest

from rollover import cli
from tests import runs

FILE = Path(__file__).with_name("messages.txt")
PROMPT = "$ rollover "


def recorded() -> dict[str, str]:
    """The message of each command."""
    blocks = FILE.read_text(encoding="utf-8").split(PROMPT)[1:]
    return {command: said.strip() for command, _, said in (block.partition("\n") for block in blocks)}


def said(command: str) -> str:
    """What a command that is refused says. It leaves no run behind."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert cli.main(shlex.split(command)) == 2, command
    assert not Path("runs").exists()
    return err.getvalue().strip()


@pytest.mark.usefixtures("experiment")
@pytest.mark.parametrize("command", recorded())
def test_a_mistake_is_answered_as_recorded(command: str) -> None:
    assert said(command) == recorded()[command]


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as scratch,
        runs.working_in(Path(scratch), runs.save_model(Path(scratch, "policy"))),
    ):
        texts = [f"{PROMPT}{command}\n{said(command)}\n" for command in recorded()]
    FILE.write_text("\n".join(texts), encoding="utf-8")
