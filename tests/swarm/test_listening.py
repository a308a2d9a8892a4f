"""What is wrong with an address or a certificate is said before a run begins."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollover.cli import main
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.kind import check_listening
from tests.swarm.certificates import make_certificate


@contextmanager
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def check(certificate: str, key: str, *, listen: str = "0.0.0.0:0") -> str:
    return check_listening(SwarmConfig(listen=listen, tls_certificate=certificate, tls_key=key))


def test_a_good_certificate_makes_an_address_with_tls(tmp_path: Path) -> None:
    assert check(*make_certificate(tmp_path, "trainer.lan")) == "wss://0.0.0.0:0"


def test_without_a_certificate_the_address_alone_is_tried() -> None:
    assert check_listening(SwarmConfig(listen="127.0.0.1:0")) == "ws://127.0.0.1:0"


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


def test_a_key_with_a_password_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_key: '.*cert\.key' is encrypted, and a run cannot ask for its"):
        check(*make_certificate(tmp_path, "trainer.lan", password=b"secret"))


def test_the_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path, "trainer.lan")
    _, other = make_certificate(tmp_path, "trainer.lan", name="other")
    with pytest.raises(ConfigError, match=r"tls_key '.*other\.key' cannot be used together as PEM files: KEY_VALUES"):
        check(certificate, other)


@pytest.mark.parametrize("key", ["tls_certificate", "tls_key"])
def test_a_file_that_is_missing_or_holds_something_else_is_refused(tmp_path: Path, key: str) -> None:
    certificate, private = make_certificate(tmp_path, "trainer.lan")
    file = Path({"tls_certificate": certificate, "tls_key": private}[key])
    file.write_text("hello\n")
    with pytest.raises(ConfigError, match=rf"engine\.{key} '{file}'.* cannot be used together as PEM files: \S"):
        check(certificate, private)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"engine\.{key} '{file}'.* No such file"):
        check(certificate, private)


def test_the_dry_run_and_the_run_refuse_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate, private = make_certificate(tmp_path, "trainer.lan")
    Path(private).unlink()
    tls = ["--engine.tls_certificate", certificate, "--engine.tls_key", private]
    argv = ["--engine.kind", "swarm", "--engine.listen", "0.0.0.0:0", *tls]
    for more in (["--dry-run"], ["--run-dir", str(tmp_path / "run")]):
        assert main(["train", *argv, *more]) == 2
        said = capsys.readouterr().err
        assert f"engine.tls_key '{private}' cannot be used" in said and "warm" not in said, "a path is no secret"
    assert not (tmp_path / "run" / "model").exists()
