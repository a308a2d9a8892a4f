"""``rollover worker``: as a process of its own, over TLS, and with what a user may get wrong."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover import cli
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import PROTOCOL, Hello, Welcome
from rollover.swarm.wire.token import TOKEN_VARIABLE, WorkerToken
from rollover.swarm.worker.connection import CoordinatorConnection, Refused, open_connection, tls_context
from tests.engine.models import saved, tiny_model
from tests.speed import within
from tests.swarm.test_worker_real import collected, expected, flat, swarm, worker

ROOT = Path(__file__).parent.parent.parent
ENGINE = [
    *("--engine.max_running", "4", "--engine.max_context_tokens", "128", "--engine.kv_cache_bytes", "4194304"),
    *("--engine.stream_interval_tokens", "4", "--engine.cpu_kernels", "torch"),
]
SETTINGS = {"name": "s", "seed": 3, "max_new_tokens": 40}


def make_token(root: Path, name: str = "laptop") -> WorkerToken:
    return Credentials(root / "workers.json").add(name, open_key(root / "publisher.key").public_key())


def token_file(folder: Path, token: WorkerToken) -> Path:
    file = folder / f"{token.name}.token"
    file.touch(0o600)
    file.write_text(token.text)
    return file


@asynccontextmanager
async def process(engine: SwarmEngine, folder: Path, token: WorkerToken) -> AsyncIterator[asyncio.subprocess.Process]:
    assert engine.gateway is not None
    arguments = ["worker", "--join", engine.gateway.url, "--token-file", str(token_file(folder, token))]
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollover", *arguments, "--cache", str(folder / "cache"), *ENGINE),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


async def said(worker: asyncio.subprocess.Process, text: str) -> str:
    """Return what the process says up to a line that holds ``text``."""
    assert worker.stderr is not None
    lines = ""
    while text not in lines:
        line = (await worker.stderr.readline()).decode()
        assert line, f"the worker ended with: {lines}"
        lines += line
    return lines


async def test_a_worker_process_serves_is_killed_comes_back_and_leaves(tmp_path: Path) -> None:
    model = saved(tiny_model(), tmp_path / "model")
    root = tmp_path / "swarm"
    alone = [token for token, _ in flat(await expected(model, **SETTINGS))]
    async with asyncio.timeout(within(100)), swarm(root, model) as engine:
        token = make_token(root)
        async with process(engine, tmp_path, token) as worker:
            text = await said(worker, "serving version 0")
            assert re.search(r"^laptop: connected to ws://\S+ as 'laptop': run sums, epoch 1", text, re.M)
            assert [t for t, _ in flat(await collected(engine, **SETTINGS))] == alone
            worker.kill()
        async with process(engine, tmp_path, token) as worker:
            await said(worker, "serving version 0")
            chunks = await collected(engine, **{**SETTINGS, "call": 1})
            assert [t for t, _ in flat(chunks)] == alone
            worker.send_signal(signal.SIGTERM)
            text = await said(worker, "left the swarm")
            assert "handing over; press Ctrl-C again to stop immediately" in text
            assert await worker.wait() == 0
            assert token.secret not in text
        assert engine.coordinator.members["laptop"].last_error == "laptop has left: stopped by its user"


# -- TLS ------------------------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine that nobody has signed but itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swarm")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private


async def greeted(connection: CoordinatorConnection) -> object:
    await connection.send(Hello(protocols=(PROTOCOL,), software="test"))
    return await connection.receive()


async def test_a_tls_connection_is_checked_against_the_named_authority(tmp_path: Path) -> None:
    model, root = saved(tiny_model(), tmp_path / "model"), tmp_path / "swarm"
    certificate, key = make_certificate(tmp_path)
    async with (
        asyncio.timeout(within(30)),
        swarm(root, model, tls_certificate=str(certificate), tls_key=str(key)) as engine,
    ):
        assert engine.gateway is not None
        address, token = CoordinatorAddress.parse(engine.gateway.url), make_token(root)
        assert address.is_encrypted
        async with open_connection(address, token, tls_context(certificate), timeout_s=10.0) as connection:
            assert isinstance(await greeted(connection), Welcome)
        with pytest.raises(Refused, match=r"not signed by an authority that this worker trusts .*--ca-file"):
            async with open_connection(address, token, tls_context(None), timeout_s=10.0):
                pass
        plain = CoordinatorAddress.parse(f"ws://{address.netloc}")
        with pytest.raises(Refused, match=rf"speaks TLS: join wss://{address.netloc}$"):
            async with open_connection(plain, token, None, timeout_s=10.0):
                pass


async def test_a_coordinator_without_tls_differs_from_none_at_all(tmp_path: Path) -> None:
    model, root = saved(tiny_model(), tmp_path / "model"), tmp_path / "swarm"
    async with asyncio.timeout(within(30)), swarm(root, model) as engine:
        assert engine.gateway is not None
        address = CoordinatorAddress.parse(engine.gateway.url.replace("ws://", "wss://"))
        with pytest.raises(Refused, match=r"it does not speak TLS there .*with ws://"):
            async with open_connection(address, make_token(root), tls_context(None), timeout_s=10.0):
                pass


# -- what a user may get wrong ----------------------------------------------------------------------------------------


def test_a_revoked_token_ends_the_worker_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = WorkerToken.make("laptop", Ed25519PrivateKey.generate().public_key())

    async def main() -> int:
        model, root = saved(tiny_model(), tmp_path / "model"), tmp_path / "swarm"
        async with asyncio.timeout(within(60)), swarm(root, model) as engine:
            assert engine.gateway is not None
            command = ["worker", "--join", engine.gateway.url, "--cache", str(tmp_path / "cache")]
            return await asyncio.to_thread(cli.main, command)

    monkeypatch.setenv(TOKEN_VARIABLE, token.text)
    assert asyncio.run(main()) == 2
    error = capsys.readouterr().err
    assert "refuses the token of 'laptop' (HTTP 401)" in error
    assert token.secret not in error


def joined_in_vain(engine: SwarmEngine, token: WorkerToken, cache: Path) -> int:
    """Return the exit code of a worker that cannot serve this run."""
    file = token_file(cache.parent, token)
    return cli.main(["worker", "--join", engine.url, "--token-file", str(file), "--cache", str(cache), *ENGINE])


def test_a_token_with_another_publishers_key_ends_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> int:
        model, root = saved(tiny_model(), tmp_path / "model"), tmp_path / "swarm"
        async with asyncio.timeout(within(60)), swarm(root, model) as engine:
            token = Credentials(root / "workers.json").add("laptop", Ed25519PrivateKey.generate().public_key())
            return await asyncio.to_thread(joined_in_vain, engine, token, tmp_path / "cache")

    assert asyncio.run(main()) == 2
    error = capsys.readouterr().err
    assert "not signed by the publisher whose key this worker was given with its token: ask the run's owner" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_a_run_with_another_model_ends_a_worker_that_joined_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    async def main() -> int:
        root, cache = tmp_path / "swarm", tmp_path / "cache"
        model = saved(tiny_model(), tmp_path / "model")
        async with asyncio.timeout(within(90)), swarm(root, model) as engine, worker(root, engine, cache) as lines:
            while not any("serving version 0" in line for line in lines):
                await asyncio.sleep(0.01)
        content = json.loads((model / file).read_text()) if (model / file).exists() else {}
        (model / file).write_text(json.dumps({**content, "exchanged": True}))
        async with asyncio.timeout(within(90)), swarm(root, model) as engine:
            return await asyncio.to_thread(joined_in_vain, engine, make_token(root, "again"), cache)

    assert asyncio.run(main()) == 2
    error = capsys.readouterr().err
    assert "has a config or tokenizer other than version 0, which this worker has had" in error and "--cache" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--join'"),
        (["--join", "swarm.example"], "not a coordinator's address"),
        (["--join", "ws://swarm.example"], "give --insecure"),
        (["--join", "ws://127.0.0.1"], "ws://127.0.0.1: the port is missing"),
        (["--join", "ws://127.0.0.1:1", "--token-file", "none"], "none: the worker's token cannot be read"),
        (["--join", "ws://127.0.0.1:1", "--engine.kind", "vlm"], "'vlm' is not allowed; did you mean 'vllm'?"),
        (["--join", "ws://127.0.0.1:1", "--max_held_token", "3"], "did you mean '--max_held_tokens'?"),
        (["--join", "ws://127.0.0.1:1", "--max_held_tokens", "0"], "max_held_tokens must be positive, got 0"),
        (["--join", "ws://127.0.0.1:1", "--engine.kind", "vllm"], "urls or launch = true"),
        (["--join", "ws://127.0.0.1:1", "--engine.colocated", "true"], "engine.colocated has no effect in a worker"),
        (
            [
                "--join",
                "ws://127.0.0.1:1",
                "--engine.kind",
                "vllm",
                "--engine.launch",
                "true",
                "--deterministic",
                "true",
            ],
            "deterministic = true needs the embedded engine",
        ),
        (["--join", "wss://127.0.0.1:1", "--ca-file", "none"], "none: holds no readable certificates"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    token = WorkerToken.make("laptop", Ed25519PrivateKey.generate().public_key())
    monkeypatch.setenv(TOKEN_VARIABLE, token.text)
    assert cli.main(["worker", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert token.secret not in error


def test_two_workers_do_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    token = WorkerToken.make("laptop", Ed25519PrivateKey.generate().public_key())
    monkeypatch.setenv(TOKEN_VARIABLE, token.text)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["worker", "--join", "ws://127.0.0.1:1", "--cache", str(tmp_path)]) == 2
    assert "is in use by another worker: give this one a folder of its own with --cache" in capsys.readouterr().err
