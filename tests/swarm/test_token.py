"""The worker's token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover.errors import ConfigError
from rollover.privacy import redacted_text
from rollover.swarm.wire.token import TOKEN_VARIABLE, WorkerToken, member_of, read_token

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
TOKEN = WorkerToken.make("laptop-2", KEY.public_key())


def test_a_token_reads_as_it_was_made() -> None:
    again = WorkerToken.parse(f" {TOKEN.text}\n")
    assert again == TOKEN
    assert TOKEN.text == f"rw1.laptop-2.{TOKEN.secret}.{TOKEN.publisher}"
    again.publisher_key.verify(KEY.sign(b"weights"), b"weights")


@pytest.mark.parametrize("name", ["", "a.b", "-a", "a" * 65, "a/b", "a b", "ä"])
def test_a_name_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a worker's name"):
        WorkerToken.make(name, KEY.public_key())


def test_no_text_of_a_token_shows_its_secret() -> None:
    assert TOKEN.secret not in repr(TOKEN) + str(TOKEN) + f"{TOKEN}"
    assert TOKEN.secret not in redacted_text(f"the worker began with {TOKEN.text} and ended")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rw1",
        TOKEN.text[:-1],
        TOKEN.text + "0",
        TOKEN.text.replace("rw1", "rw2"),
        TOKEN.text.replace(".", ":"),
        "rw1.a.b.c",
    ],
    ids=range(7),
)
def test_what_is_no_token_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerToken.parse(text)
    assert "copy the whole line" in str(caught.value)
    assert TOKEN.secret not in str(caught.value)


def test_a_coordinator_knows_the_worker_by_the_hash_alone() -> None:
    hashes = {"laptop-2": TOKEN.hash, "phone": WorkerToken.make("phone", KEY.public_key()).hash}
    assert TOKEN.secret not in str(hashes)
    assert member_of(TOKEN.text, hashes) == "laptop-2"
    others = WorkerToken.make("laptop-2", KEY.public_key()), WorkerToken.make("stranger", KEY.public_key())
    wrong = ("", "rw1", "a" * 10_000, f"{TOKEN.text}\n")
    for refused in (*wrong, *(other.text for other in others)):
        assert member_of(refused, hashes) is None
    assert member_of(TOKEN.text, {"laptop-2": ""}) is None


def test_a_token_is_read_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN.text + "\n")
    file.chmod(0o600)
    assert read_token(file, {TOKEN_VARIABLE: "ignored"}) == TOKEN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN.text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_token(file, {})


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "none", {})
    os.mkfifo(tmp_path / "pipe", 0o600)
    for odd in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="it is not a file"):
            read_token(odd, {})


def test_a_token_is_read_from_the_environment() -> None:
    assert read_token(None, {TOKEN_VARIABLE: TOKEN.text}) == TOKEN
    with pytest.raises(ConfigError, match=f"--token-file, or set {TOKEN_VARIABLE}"):
        read_token(None, {})
    with pytest.raises(ConfigError, match=f"^{TOKEN_VARIABLE}: "):
        read_token(None, {TOKEN_VARIABLE: "rw1.x"})
