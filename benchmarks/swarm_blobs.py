"""Measures how fast blobs come through a relay, and how long many workers take over one that shares a narrow uplink.

    python benchmarks/swarm_blobs.py              # three minutes; needs nginx

``throughput``: clients that read and forget fetch the same files over loopback from nginx as plain files, from a relay
(``rollover relay``) that has them, from one that has not (its trainer is the plain nginx), and from the trainer's own
port. The share that counts is relay over plain files. ``worker`` is what a worker's downloads make of the relay, which
write each blob and compare its digest.

``convergence``: workers, each in a process, fetch a publication at the same time: all from the trainer's port behind an
uplink of ``--uplink`` bytes per second that they share; or from a relay with the same uplink, and from the trainer
where their rule of sources says so. With the relay the time should hardly depend on their number: at most 1.3 times
size over uplink, and a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.transports.gateway import Gateway
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.manifest import BlobRef
from rollover.swarm.relay.folder import write_folder
from rollover.swarm.relay.settings import RelaySettings
from rollover.swarm.wire.address import CoordinatorAddress

HERE = Path(__file__).parent
MB = 10**6
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
TOKEN = "rw1.benchmark.token"
FORK = multiprocessing.get_context("fork")

STATIC = """
daemon off; pid nginx.pid; error_log logs/error.log warn; worker_processes auto;
events { worker_connections 1024; }
http {
    access_log off; sendfile on; tcp_nopush on; default_type application/octet-stream;
    client_body_temp_path tmp/a; proxy_temp_path tmp/b; fastcgi_temp_path tmp/c; uwsgi_temp_path tmp/d;
    scgi_temp_path tmp/e;
    server { listen 127.0.0.1:@PORT@; location /v1/blobs/ { alias "@BLOBS@/"; } }
}
"""


def make_blobs(folder: Path, number: int, num_bytes: int) -> list[BlobRef]:
    rng, blobs, refs = random.Random(0), BlobFolder(folder), []
    for _ in range(number):
        digest = blobs.put(rng.randbytes(num_bytes))
        refs.append(BlobRef(digest=digest, num_bytes=num_bytes, raw_bytes=num_bytes))
    return refs


# -- servers --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(port: int) -> None:
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise SystemExit(f"nobody listens on port {port}")


@contextmanager
def nginx(folder: Path, port: int) -> Iterator[int]:
    assert NGINX is not None
    root = ["-g", "user root;"] if os.geteuid() == 0 else []
    command = [NGINX, "-p", str(folder), "-c", "nginx.conf", *root]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(port)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def plain_files(folder: Path, blobs: Path) -> Iterator[int]:
    port = free_port()
    for name in ("logs", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "nginx.conf").write_text(STATIC.replace("@PORT@", str(port)).replace("@BLOBS@", str(blobs)))
    with nginx(folder, port):
        yield port


@contextmanager
def relay(folder: Path, trainer: int) -> Iterator[int]:
    """A relay with an empty cache."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    port = free_port()
    address = CoordinatorAddress.parse(f"ws://127.0.0.1:{trainer}")
    write_folder(RelaySettings(trainer=address, listen=f"127.0.0.1:{port}", token=TOKEN), folder)
    with nginx(folder, port):
        yield port


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    child = FORK.Process(target=work, args=arguments)
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()


def serve_trainer(port: int, blobs: Path) -> None:
    """The trainer's port, with nobody behind it."""

    async def serve() -> None:
        config = SwarmConfig(listen=f"127.0.0.1:{port}")
        nobody: Any = None
        gateway = Gateway(config, nobody, member_of=lambda header: "somebody", blobs=blobs)
        gateway.bind()
        await gateway.serve()
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def trainer(blobs: Path) -> Iterator[int]:
    port = free_port()
    with process(serve_trainer, port, blobs):
        wait_for(port)
        yield port


def serve_uplink(port: int, target: int, bytes_per_s: float, passed: Any) -> None:
    """Pass connections on; what comes back shares one bandwidth, piece by piece, and is counted in ``passed``."""
    turn = asyncio.Lock()
    free_s = 0.0

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_narrow: bool) -> None:
        nonlocal free_s
        with contextlib.suppress(OSError):
            while piece := await reader.read(16_384):
                if is_narrow:
                    async with turn:
                        free_s = max(free_s, time.monotonic() - 0.01) + len(piece) / bytes_per_s
                        wait_s = free_s - time.monotonic()
                        passed.value += len(piece)
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                writer.write(piece)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target, limit=2**16)
        await asyncio.gather(pass_on(reader, back, is_narrow=False), pass_on(there, writer, is_narrow=True))

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", port, backlog=512)
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def uplink(target: int, bytes_per_s: float) -> Iterator[tuple[int, Any]]:
    port, passed = free_port(), FORK.Value("d", 0.0)
    with process(serve_uplink, port, target, bytes_per_s, passed):
        wait_for(port)
        yield port, passed


# -- throughput -----------------------------------------------------------------------------------------------------


def read_all(port: int, digests: Sequence[str], buffer: bytearray) -> int:
    """Fetch blobs over one connection, and forget them; return the bytes of their bodies."""
    total = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for digest in digests:
            request = f"GET /v1/blobs/{digest} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            connection.sendall(request.encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65_536)
            lines, _, begun = head.partition(b"\r\n\r\n")
            assert lines.startswith(b"HTTP/1.1 200"), lines
            length = next(
                int(ln.split(b":")[1]) for ln in lines.split(b"\r\n") if ln.lower().startswith(b"content-len")
            )
            left = length - len(begun)
            while left:
                got = connection.recv_into(buffer, min(left, len(buffer)))
                assert got, "the connection ended"
                left -= got
            total += length
    return total


def rate(port: int, digests: Sequence[str], num_clients: int) -> float:
    """Bytes per second of all clients together, each in a process with a connection and a share of the blobs."""

    def client(number: int) -> None:
        buffer = bytearray(2**20)
        barrier.wait()
        read_all(port, digests[number::num_clients], buffer)
        barrier.wait()

    barrier = FORK.Barrier(num_clients + 1)
    clients = [FORK.Process(target=client, args=(n,)) for n in range(num_clients)]
    for each in clients:
        each.start()
    barrier.wait(60)
    start_s = time.perf_counter()
    barrier.wait(300)
    took_s = time.perf_counter() - start_s
    for each in clients:
        each.join()
    return num_bytes_of(digests) / took_s


_SIZES: dict[str, int] = {}


def num_bytes_of(digests: Sequence[str]) -> int:
    return sum(_SIZES[digest] for digest in digests)


def worker_rate(port: int, blobs: Sequence[BlobRef], folder: Path) -> float:
    async def fetch() -> float:
        downloads = BlobDownloads(BlobFolder(folder))
        downloads.use([f"http://127.0.0.1:{port}/v1/blobs"])
        start_s = time.perf_counter()
        await downloads.get(blobs)
        took_s = time.perf_counter() - start_s
        await downloads.close()
        return took_s

    try:
        return sum(blob.num_bytes for blob in blobs) / asyncio.run(fetch())
    finally:
        shutil.rmtree(folder)


def throughput(folder: Path, number: int, repeats: int, num_clients: int) -> dict[str, Any]:
    blobs = make_blobs(folder / "blobs", number, 32 * 2**20)
    digests = [blob.digest for blob in blobs]
    _SIZES.update((blob.digest, blob.num_bytes) for blob in blobs)
    found: dict[str, list[float]] = {}
    with plain_files(folder / "static", folder / "blobs") as plain, trainer(folder / "blobs") as home:
        for repeat in range(repeats + 1):  # the first warms all caches
            with relay(folder / "relay", plain) as between:
                measured = {"plain files": rate(plain, digests, num_clients)}
                measured["relay, cold"] = rate(between, digests, num_clients)
                measured["relay"] = rate(between, digests, num_clients)
                measured["plain files again"] = rate(plain, digests, num_clients)
                measured["trainer"] = rate(home, digests, num_clients)
                measured["worker"] = worker_rate(between, blobs, folder / "worker")
            if repeat:
                for name, value in measured.items():
                    found.setdefault(name, []).append(round(value / MB))
                print(f"{repeat}: " + ", ".join(f"{name} {value / MB:,.0f} MB/s" for name, value in measured.items()))
    medians = {name: statistics.median(values) for name, values in found.items()}
    shares = [
        relayed / statistics.mean((one, two))
        for relayed, one, two in zip(found["relay"], found["plain files"], found["plain files again"], strict=True)
    ]
    print(f"the relay gives {statistics.median(shares):.2f} of what plain files do")
    return {"mb_per_s": found, "medians": medians, "relay_over_plain_files": [round(share, 3) for share in shares]}


# -- convergence ----------------------------------------------------------------------------------------------------


def converge(folder: Path, blobs: Sequence[BlobRef], urls: Sequence[str], num_workers: int) -> list[float]:
    """Seconds until each of the workers has everything, from their common start."""

    def work(number: int) -> None:
        async def fetch() -> None:
            authorization = {url: f"Bearer {TOKEN}" for url in urls}
            downloads = BlobDownloads(
                BlobFolder(folder / f"worker-{number}"), authorization=authorization, random=random.Random(number)
            )
            downloads.use(urls)
            await asyncio.to_thread(barrier.wait)
            await downloads.get(blobs)
            ends[number] = time.monotonic()
            await downloads.close()

        asyncio.run(fetch())

    barrier, ends = FORK.Barrier(num_workers + 1), FORK.Array("d", num_workers)
    workers = [FORK.Process(target=work, args=(n,)) for n in range(num_workers)]
    for each in workers:
        each.start()
    barrier.wait(60)
    start_s = time.monotonic()
    for each in workers:
        each.join(600)
        assert each.exitcode == 0
    took = [end_s - start_s for end_s in ends[:]]
    for number in range(num_workers):
        for blob in blobs:
            file = folder / f"worker-{number}" / blob.digest
            assert hashlib.sha256(file.read_bytes()).hexdigest() == blob.digest
        shutil.rmtree(folder / f"worker-{number}")
    return took


def convergence(folder: Path, numbers: Sequence[int], number: int, size: int, bytes_per_s: float) -> dict[str, Any]:
    blobs = make_blobs(folder / "publication", number, size)
    ideal_s = number * size / bytes_per_s
    rows: list[dict[str, Any]] = []
    with trainer(folder / "publication") as home, uplink(home, bytes_per_s) as (narrow, passed):
        for num_workers in numbers:
            own = f"http://127.0.0.1:{narrow}/v1/blobs"
            before = passed.value
            with relay(folder / "relay", narrow) as between:
                relayed = converge(folder, blobs, [f"http://127.0.0.1:{between}/v1/blobs", own], num_workers)
            times = (passed.value - before) / (number * size)
            alone = converge(folder, blobs, [own], num_workers)
            row = {"workers": num_workers, "relay_s": round(max(relayed), 2), "alone_s": round(max(alone), 2)}
            row |= {"limit_s": round(1.3 * ideal_s + 1, 2), "times_over_uplink": round(times, 2)}
            rows.append(row)
            print(row, flush=True)
    return {"num_bytes": number * size, "uplink_bytes_per_s": bytes_per_s, "ideal_s": round(ideal_s, 2), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blobs", type=int, default=32, help="of 32 MiB, for the throughput")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--pieces", type=int, default=16, help="blobs of the publication that workers fetch")
    parser.add_argument("--piece-mb", type=float, default=8.0)
    parser.add_argument("--uplink", type=float, default=16e6, help="bytes per second")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"swarm-blobs-{date.today()}.json")
    args = parser.parse_args()
    if NGINX is None:
        raise SystemExit("nginx is not installed: apt install nginx-light")
    numbers = [int(k) for k in args.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="swarm-blobs-") as made:
        folder = Path(made)
        narrow = convergence(folder, numbers, args.pieces, int(args.piece_mb * MB), args.uplink)
        wide = {} if not args.repeats else throughput(folder, args.blobs, args.repeats, args.clients)
    from engine import machine  # after the measurement, since it brings torch

    version = subprocess.run([str(NGINX), "-v"], capture_output=True, text=True).stderr.strip()
    record = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "nginx": version}
    args.out.write_text(json.dumps(record | {"throughput": wide, "convergence": narrow}, indent=1) + "\n")
    print(f"recorded in {args.out}")


if __name__ == "__main__":
    main()
