"""Tokens are shown once, stored as hashes, and refused from the moment they are revoked."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover import cli
from rollover.errors import ConfigError, RunError
from rollover.swarm.coordinator import trust
from rollover.swarm.coordinator.status.snapshot import WorkerStatus, shown, write_status
from rollover.swarm.coordinator.trust import Blocklist, Credentials
from tests.swarm.test_pages import status, worker

KEY = Ed25519PrivateKey.generate().public_key()


def test_a_token_is_valid_until_any_process_revokes_it(tmp_path: Path) -> None:
    here, elsewhere = (Credentials(tmp_path / "workers.json") for _ in range(2))
    assert here.member_of("Bearer x") is None
    token = elsewhere.add("laptop", KEY)
    header = f"Bearer {token.text}"
    assert here.member_of(header) == "laptop"
    assert [here.member_of(h) for h in (None, "", token.text, f"Basic {token.text}", f"{header}x")] == [None] * 5
    with pytest.raises(ConfigError, match="'laptop' already has a token"):
        here.add("laptop", KEY)
    elsewhere.revoke("laptop")
    assert here.member_of(header) is None
    with pytest.raises(ConfigError, match="no worker of this run is called 'laptop'; there are: none"):
        here.revoke("laptop")


def test_nobody_else_can_read_the_hashes_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, modes, flush = tmp_path / "workers.json", list[int](), os.fsync
    (tmp_path / ".new-workers.json").touch(0o644)  # a process was killed while it wrote

    def flushed(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            modes.append(stat.S_IMODE(status.st_mode))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    before = os.umask(0)
    try:
        tokens = [Credentials(file).add(name, KEY) for name in ("laptop", "tower")]
    finally:
        os.umask(before)
    assert not any(token.secret in file.read_text() for token in tokens)
    assert modes == [0o600, 0o600] and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_table_that_stays_locked_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_LOCK_TIMEOUT_S", 0.0)
    with (tmp_path / "workers.lock").open("wb") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"workers\.lock has been locked for 0 s: another rollover command"):
            Credentials(tmp_path / "workers.json").add("laptop", KEY)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text("{")
    with pytest.raises(RunError, match=r"workers\.json cannot be read"):
        Credentials(tmp_path / "workers.json").hashes()


def test_the_command_lists_adds_and_revokes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert cli.main(["workers", str(run)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    (run / "swarm").mkdir(parents=True)
    (run / "config.json").write_text('{"model_type": "qwen3"}')
    assert cli.main(["workers", str(run), "--add", "kitchen"]) == 2
    assert "is not a run directory: its config.json was not written by a run" in capsys.readouterr().err
    for other, message in (
        ('"engine": {"kind": "embedded"}', f"{run} has no swarm: its engine.kind is 'embedded'"),
        ('"engine": {"kind": "swarm"}, "variants": {"a": {}, "b": {}}', f"{run / 'a'} or {run / 'b'}"),
    ):
        (run / "config.json").write_text(f'{{"meta": {{}}, {other}}}')
        assert cli.main(["workers", str(run), "--add", "kitchen"]) == 2
        assert message in capsys.readouterr().err and not [*(run / "swarm").iterdir()]
    (run / "config.json").write_text('{"meta": {}, "engine": {"kind": "swarm"}, "variants": {}}')
    assert cli.main(["workers", str(run)]) == 2
    assert "has no swarm" in capsys.readouterr().err
    assert cli.main(["workers", str(run), "--out", "x"]) == 2
    assert "also give --add NAME" in capsys.readouterr().err
    out = tmp_path / "a.token"
    assert cli.main(["workers", str(run), "--add", "a", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    token = out.read_text().strip()
    assert token.startswith("rw1.a.") and token not in shown.out + shown.err
    assert stat.S_IMODE(os.stat(out).st_mode) == 0o600
    assert Credentials(run / "swarm" / "workers.json").member_of(f"Bearer {token}") == "a"
    assert cli.main(["workers", str(run), "--add", "b", "--out", str(out)]) == 2
    assert "the file exists" in capsys.readouterr().err
    assert cli.main(["workers", str(run), "--add", "b", "--out", str(tmp_path / "no" / "b.token")]) == 2
    assert "b" not in Credentials(run / "swarm" / "workers.json").hashes()
    assert cli.main(["workers", str(run), "--revoke", "a"]) == 0
    write_status(run / "swarm", status(worker("laptop", note="the disk is full"), time_s=1.0))
    capsys.readouterr()
    assert cli.main(["workers", str(run)]) == 0
    listed = capsys.readouterr().out
    assert "weights version 8" in listed
    assert "laptop" in listed and "6,410" in listed and "the disk is full" in listed
    assert "no news from the trainer" in listed, "it was written in 1970"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--revoke", "kitchen", "--trust", "attic"], "--revoke and --trust"),
        (["--add", "attic", "--revoke", "kitchen"], "--add and --revoke"),
        (["--add", "attic", "--trust", "attic"], "--add and --trust"),
        (["--add", "attic", "--revoke", "kitchen", "--trust", "attic"], "--add and --revoke and --trust"),
    ],
)
def test_two_changes_at_once_are_refused_before_either_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    (tmp_path / "config.json").write_text('{"meta": {}}')
    assert cli.main(["workers", str(tmp_path), "--add", "kitchen"]) == 0
    before = (tmp_path / "swarm" / "workers.json").read_bytes()
    capsys.readouterr()
    assert cli.main(["workers", str(tmp_path), *arguments]) == 2
    assert f"{named} cannot be combined: give one of them at a time" in capsys.readouterr().err
    assert (tmp_path / "swarm" / "workers.json").read_bytes() == before


def listed(run: Path, capsys: pytest.CaptureFixture[str], *workers: WorkerStatus, **changes: object) -> str:
    (run / "swarm").mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text('{"meta": {}}')
    write_status(run / "swarm", status(*workers, time_s=time.time(), **changes))
    assert cli.main(["workers", str(run)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_list_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    laptop = worker("laptop")
    assert f"create a token for each: rollover workers {tmp_path} --add NAME" in listed(tmp_path, capsys)
    seen = listed(tmp_path, capsys, replace(laptop, drift=2.5e-6), page="http://127.0.0.1:40121/")
    assert "live page: http://127.0.0.1:40121/" in seen and "2.5e-06" in seen and "create a token" not in seen
    Blocklist(tmp_path / "swarm").add("liar", "its log-probs are 0.2 nats off\x1b[2J")
    seen = listed(tmp_path, capsys, laptop)
    assert re.search(r"liar was sent away on \d{4}-\d\d-\d\d \d\d:\d\d: its log-probs are 0\.2 nats off\?\[2J;", seen)
    assert f"readmit it: rollover workers {tmp_path} --trust liar" in seen
    assert cli.main(["workers", str(tmp_path), "--trust", "liar"]) == 0
    assert "liar may join again" in capsys.readouterr().out
    assert "sent away" not in listed(tmp_path, capsys, laptop)
    assert cli.main(["workers", str(tmp_path), "--trust", "liar"]) == 2
    assert "'liar' was not sent away; members sent away: none" in capsys.readouterr().err
    seen = listed(tmp_path, capsys, replace(laptop, state="full"))
    assert "is waiting for the trainer's journal" in seen


def test_what_a_worker_says_is_text_without_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = Credentials(tmp_path / "workers.json").add("a", KEY)
    note = shown(f"\x1b[31m[bold]gone[/bold]\x1b[2J\n\x07 {token.text}")
    assert token.secret not in note and all(c.isprintable() for c in note)
    assert "[bold]gone[/bold]" in listed(tmp_path, capsys, worker("laptop", note=note)), "it is text, not markup"
