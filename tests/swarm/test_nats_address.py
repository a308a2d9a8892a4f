"""The address of a swarm on a NATS cluster, the file with the login, and the settings of the transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover import cli
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.nats.address import NatsAddress
from rollover.swarm.nats.credentials import NatsCredentials
from rollover.swarm.wire.token import TOKEN_VARIABLE, WorkerToken
from rollover.swarm.worker.dialing import parse_address


@pytest.mark.parametrize(
    ("url", "servers", "subject"),
    [
        ("nats://127.0.0.1", ("nats://127.0.0.1:4222",), "rollover"),
        ("tls://a.example:4333/runs.sums", ("tls://a.example:4333",), "runs.sums"),
        ("tls://a.example,b.example:1/x/", ("tls://a.example:4222", "tls://b.example:1"), "x"),
        ("nats://[::1]:9/x", ("nats://[::1]:9",), "x"),
    ],
)
def test_servers_and_subject(url: str, servers: tuple[str, ...], subject: str) -> None:
    address = parse_address(url)
    assert isinstance(address, NatsAddress)
    assert (address.servers, address.subject) == (servers, subject)
    assert NatsAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nats://", "is not an address on a NATS cluster"),
        ("nats://a b", "is not an address on a NATS cluster"),
        ("tls://a:70000", "is not an address on a NATS cluster"),
        ("tls://a,,b", "is not an address on a NATS cluster"),
        ("tls://a/x.*", "is not a NATS subject"),
        ("tls://a/x..y", "is not a NATS subject"),
        ("nats://a.example", "use tls://, or give --insecure"),
        ("tls://me:secret@a.example", "logins belong in a file"),
    ],
)
def test_what_cannot_be_an_address_is_one_message(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        NatsAddress.parse(url)
    assert "secret" not in str(refused.value)


def test_inboxes_belong_to_a_worker() -> None:
    address = NatsAddress.parse("nats://127.0.0.1/runs.sums")
    assert address.inbox_owner(address.new_inbox("attic")) == "attic"
    for other in (address.new_session(), "runs.sums.worker.attic.short", "x" + address.new_inbox("attic"), ""):
        assert address.inbox_owner(other) is None


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("two words", 0o600, "no login that NATS accepts"),
        ("user:secret", 0o644, "chmod 600"),
        (None, 0, "cannot be read"),
    ],
)
def test_a_login_that_cannot_be_used_is_one_message(text: str | None, mode: int, says: str, tmp_path: Path) -> None:
    file = tmp_path / "login"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=says) as refused:
        NatsCredentials.read(file)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"transport": "nats", "listen": "127.0.0.1:1"}, "listen = .* has no effect with transport = 'nats'"),
        ({"nats_url": "nats://127.0.0.1/x"}, "nats_url = .* has no effect with transport = 'websocket'"),
        ({"transport": "nats", "nats_bucket": "Upper"}, "nats_bucket must be lower-case"),
        ({"transport": "nats", "nats_url": "nats://a.example"}, "engine.insecure = true"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SwarmConfig(**settings)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--join", "ws://127.0.0.1:1", "--nats-credentials", "x"],
            "is not an address of a NATS cluster: leave out --nats-credentials",
        ),
        (["--join", "nats://a.example"], "give --insecure"),
        (["--join", "nats://127.0.0.1:1", "--nats-credentials", "none"], "none: the login for the NATS cluster cannot"),
    ],
)
def test_a_workers_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, WorkerToken.make("laptop", Ed25519PrivateKey.generate().public_key()).text)
    assert cli.main(["worker", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_runs_login_that_cannot_be_read_is_named_by_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nats = ["--engine.kind", "swarm", "--engine.transport", "nats", "--engine.nats_credentials", "gone"]
    assert cli.main(["train", "quickstart", *nats, "--run-dir", str(tmp_path / "run")]) == 2
    assert "engine.nats_credentials: gone: the login for the NATS cluster cannot be read" in capsys.readouterr().err
