"""What is wrong with an address or a certificate is said before a run begins."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollover.cli import main
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.listening import check_listening
from tests.swarm.certificates import make_certificate

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
DAY = timedelta(days=1)


@contextmanager
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def check(certificate: str, key: str, *, listen: str = "0.0.0.0:0") -> list[str]:
    return check_listening(SwarmConfig(listen=listen, tls_certificate=certificate, tls_key=key), now=NOW)


def made(folder: Path, *hosts: str, **options: Any) -> tuple[str, str]:
    return make_certificate(folder, *hosts, **{"starts": NOW - DAY, "ends": NOW + 30 * DAY, **options})


def test_a_good_certificate_is_described(tmp_path: Path) -> None:
    (line,) = check(*made(tmp_path, "trainer.lan", "192.168.1.10"))
    assert line == "wss://0.0.0.0:0 with a certificate for trainer.lan and 192.168.1.10, valid until 2026-12-23"


def test_without_a_certificate_the_address_alone_is_tried() -> None:
    assert check_listening(SwarmConfig(listen="127.0.0.1:0")) == ["ws://127.0.0.1:0"]


def test_a_port_in_use_is_said_also_by_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    with taken() as address:
        with pytest.raises(ConfigError, match=f"cannot listen on engine.listen = '{address}': Address already in use"):
            check_listening(SwarmConfig(listen=address))
        assert main(["train", "--dry-run", "--engine.kind", "swarm", "--engine.listen", address]) == 2
    assert f"engine.listen = '{address}'" in capsys.readouterr().err
    check_listening(SwarmConfig(listen=address))


def test_a_port_that_was_tried_can_be_taken_at_once() -> None:
    with taken() as address:
        pass
    for _ in range(3):
        check_listening(SwarmConfig(listen=address))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ends": NOW - DAY, "starts": NOW - 9 * DAY}, r"'.*cert\.pem' expired on 2026-11-22 12:00 UTC: renew it"),
        (
            {"starts": NOW + DAY},
            r"is not valid before 2026-11-24 12:00 UTC, and this machine's clock says 2026-11-23 12:00",
        ),
        ({"password": b"secret"}, r"tls_key: '.*cert\.key' is encrypted, and a run cannot ask for its password"),
    ],
)
def test_a_certificate_that_no_worker_would_accept_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(*made(tmp_path, "trainer.lan", **options))


def test_a_certificate_without_a_host_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names no host.*openssl req -addext 'subjectAltName=DNS"):
        check(*made(tmp_path))


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, _ = made(tmp_path, "trainer.lan")
    _, other = made(tmp_path, "trainer.lan", name="other")
    with pytest.raises(ConfigError, match=r"tls_key: '.*other\.key' is not the key of engine\.tls_certificate"):
        check(certificate, other)


@pytest.mark.parametrize("key", ["tls_certificate", "tls_key"])
def test_a_file_that_is_missing_or_holds_something_else_is_named(tmp_path: Path, key: str) -> None:
    certificate, private = made(tmp_path, "trainer.lan")
    file = Path({"tls_certificate": certificate, "tls_key": private}[key])
    file.write_text("hello\n")
    with pytest.raises(
        ConfigError, match=rf"engine\.tls_certificate: .*{file.name if key == 'tls_key' else 'PEM form'}"
    ):
        check(certificate, private)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"engine\.{key}: '{file}' cannot be read: No such file"):
        check(certificate, private)
    file.mkdir()
    with pytest.raises(ConfigError, match=rf"engine\.{key}: '{file}' cannot be read: Is a directory"):
        check(certificate, private)


@pytest.mark.parametrize(
    ("hosts", "listen", "warns"),
    [
        (("trainer.lan",), "127.0.0.1:0", True),
        (("trainer.lan", "127.0.0.1"), "127.0.0.1:0", False),
        (("LOCALHOST",), "localhost:0", False),
        (("*.lan",), "localhost:0", True),
        (("trainer.lan",), "0.0.0.0:0", False),
    ],
)
def test_a_certificate_for_other_hosts_is_warned_of(
    tmp_path: Path, hosts: tuple[str, ...], listen: str, warns: bool
) -> None:
    lines = check(*made(tmp_path, *hosts), listen=listen)
    assert any("will reject the certificate, which is for" in line for line in lines) is warns


def test_a_certificate_that_ends_soon_and_an_open_key_are_warned_of(tmp_path: Path) -> None:
    certificate, private = made(tmp_path, "trainer.lan", ends=NOW + 3 * DAY)
    Path(private).chmod(0o644)
    _, soon, open_key = check(certificate, private)
    assert soon == "warning: the certificate expires on 2026-11-26 12:00 UTC; after that no worker can connect"
    assert open_key.endswith(f"can read {private}: chmod 600 {private}")


def test_the_dry_run_and_the_run_itself_refuse_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, private = make_certificate(
        tmp_path, "trainer.lan", ends=datetime(2026, 1, 2, tzinfo=UTC), starts=datetime(2026, 1, 1, tzinfo=UTC)
    )
    tls = ["--engine.tls_certificate", certificate, "--engine.tls_key", private]
    argv = ["--engine.kind", "swarm", "--engine.listen", "0.0.0.0:0", *tls]
    for more in (["--dry-run"], ["--run-dir", str(tmp_path / "run")]):
        assert main(["train", *argv, *more]) == 2
        said = capsys.readouterr().err
        assert "expired on 2026-01-02" in said and "warm" not in said
    Path(private).unlink()
    assert main(["train", *argv, "--dry-run"]) == 2
    assert f"engine.tls_key: '{private}' cannot be read" in capsys.readouterr().err, "a path is no secret"
    assert not (tmp_path / "run" / "model").exists()
