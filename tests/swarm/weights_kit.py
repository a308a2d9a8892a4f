"""A small model with its publisher, and an HTTP server of blobs that misbehaves on request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.download import BlobDownloads
from rollover.swarm.publication.manifest import BlobRef, PublicationManifest, open_manifest
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.swarm.wire.messages import Head
from rollover.weights.sources import MemoryWeights
from tests.swarm.http_kit import QuietHandler, http_server

Weights = dict[str, torch.Tensor]

SIZES = {"model.embed_tokens.weight": (300, 64), "model.layers.0.up.weight": (64, 64), "model.norm.weight": (64,)}


def initial_weights(seed: int = 0) -> Weights:
    """In float32, as a trainer holds them."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(*shape, generator=generator) for name, shape in SIZES.items()}


def trained(weights: Weights, seed: int, *, learning_rate: float = 1e-6) -> Weights:
    """One step on; the norm does not move."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: w if w.dim() == 1 else w + learning_rate * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
    }


def versions(number: int, **options: Any) -> list[Weights]:
    made = [initial_weights()]
    while len(made) < number:
        made.append(trained(made[-1], len(made), **options))
    return made


def save_model(folder: Path) -> Path:
    """A model folder in bfloat16 with its companions."""
    folder.mkdir(parents=True)
    save_file({name: w.bfloat16() for name, w in initial_weights().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    (folder / "tokenizer.json").write_text(json.dumps({"vocab": ["a", "b"]}))
    return folder


def open_publisher(folder: Path, *, run_epoch: int = 1, run_id: str = "sums", **options: Any) -> SwarmPublisher:
    """The publisher of the run in ``folder``; a second one is the same run started again."""
    model = folder / "model"
    return SwarmPublisher(
        folder / "swarm",
        run_id=run_id,
        run_epoch=run_epoch,
        model=model if model.exists() else save_model(model),
        **options,
    )


def manifest_of(publisher: SwarmPublisher, head: Head) -> PublicationManifest:
    return open_manifest(publisher.blobs.read(head.manifest), publisher.public_key)


def source(version: int, weights: Mapping[str, torch.Tensor]) -> MemoryWeights:
    return MemoryWeights(version, weights)


def served(weights: Weights) -> Weights:
    return {name: w.bfloat16() for name, w in weights.items()}


def assert_same(found: Weights, expected: Weights) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


Answer = Callable[["BlobServer", str, bytes, int], tuple[int, dict[str, str], Sequence[Any]] | None]


@dataclass
class BlobServer:
    """Serves a folder of blobs, with Range.

    ``faults`` answer first: (server, digest, content, first byte asked for) to (status, headers, body). A body shorter
    than its Content-Length is a connection that breaks off; a body may be a list of bytes and calls made in between.
    """

    folder: Path
    url: str = ""
    asked: list[tuple[str, int]] = field(default_factory=list)
    authorized: list[str | None] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request, by name in small letters."""
    fault: Answer | None = None

    @property
    def num_asked(self) -> int:
        return len(self.asked)


def whole(content: bytes, start: int = 0, end: int | None = None) -> tuple[int, dict[str, str], bytes]:
    """The answer with the bytes of a blob from ``start`` on, before ``end`` if there is one."""
    if start >= len(content) > 0:
        return 416, {"Content-Length": "0", "Content-Range": f"bytes */{len(content)}"}, b""
    part = content[start:end]
    if not start and end is None:
        return 200, {"Content-Length": str(len(part))}, part
    last = start + len(part) - 1
    headers = {"Content-Length": str(len(part)), "Content-Range": f"bytes {start}-{last}/{len(content)}"}
    return 206, headers, part


def answering(status: int) -> Answer:
    """Answer everything with this status."""
    return lambda server, digest, content, start: (status, {"Content-Length": "0"}, b"")


@contextmanager
def serving(
    folder: Path, fault: Answer | None = None, certificate: tuple[str, str] | None = None
) -> Iterator[BlobServer]:
    blobs = BlobServer(folder=folder, fault=fault)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            digest = self.path.rsplit("/", 1)[-1]
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else None
            blobs.asked.append((digest, start))
            blobs.headers.append({name.lower(): value for name, value in self.headers.items()})
            blobs.authorized.append(self.headers.get("Authorization"))
            path = folder / digest
            content = path.read_bytes() if path.exists() else None
            answer = blobs.fault(blobs, digest, content or b"", start) if blobs.fault is not None else None
            if answer is None:
                answer = (404, {"Content-Length": "0"}, b"") if content is None else whole(content, start, end)
            status, headers, body = answer
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                num_sent = 0
                for part in [body] if isinstance(body, bytes) else body:
                    if isinstance(part, bytes):
                        self.wfile.write(part)
                        num_sent += len(part)
                    else:
                        part()
            except OSError:
                self.close_connection = True
            if num_sent < int(headers.get("Content-Length", 0)):
                self.close_connection = True

    with http_server(Handler, certificate) as url:
        blobs.url = f"{url}/blobs"
        yield blobs


def store_blobs(folder: Path, *contents: bytes) -> list[BlobRef]:
    blobs = BlobFolder(folder)
    return [BlobRef(digest=blobs.put(c), num_bytes=len(c), raw_bytes=len(c)) for c in contents]


@asynccontextmanager
async def open_downloads(folder: Path, *urls: str, **options: Any) -> AsyncIterator[BlobDownloads]:
    downloads = BlobDownloads(BlobFolder(folder), **{"backoff_s": 0.001, **options})
    downloads.use(urls)
    try:
        yield downloads
    finally:
        await downloads.close()


async def download(folder: Path, blobs: Sequence[BlobRef], *urls: str, **options: Any) -> None:
    """Fetch blobs, as a worker with its cache in ``folder`` does."""
    async with open_downloads(folder, *urls, **options) as downloads:
        await downloads.get(blobs)
