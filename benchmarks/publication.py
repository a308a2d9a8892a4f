"""Measures what it takes to publish a version of the weights by each way, in seconds per GB and in bytes held.

    python benchmarks/publication.py                          # some minutes on two cores
    SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/publication.py    # with a real server beside

A Qwen3 with random weights in float32 goes, in turn, through a folder on disk, through shared memory written by two
ranks, and through a group over gloo from one process and from two ranks, to one and to two receivers. Receivers are
processes on this machine that take the bytes and do nothing with them; a first round, which is not timed, checks that
they are the sender's bits. Readers of folders read every tensor. Held is what the memory of the sending process (the
first rank, where there are ranks) grows by at the most in any round, as the kernel counts it; in buckets is what the
sender itself counts of whole tensors, which includes the trainer's own where they are sent as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import machine

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.clock import SystemClock
from rollover.engine.kind import EngineSetup
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.open import open_sglang
from rollover.engine.servers.sglang.weights import SGLangWeights
from rollover.engine.servers.weights.transfer import Receiver, TransferCalls, send_weights
from rollover.trainer.config import TrainerConfig
from rollover.trainer.fleet import FleetTrainer
from rollover.trainer.local import LocalTrainer
from rollover.weights.buckets import Bucket, as_served, buckets
from rollover.weights.folders import WeightFolders
from rollover.weights.publisher import Publisher
from rollover.weights.sources import FolderWeights
from tests.engine.servers.receivers import ReceiverProcess, digest
from tests.real.sglang_server import sglang_server

HERE = Path(__file__).parent
GB = 1e9
LIMIT_S = 300.0


def make_folder(folder: Path, layers: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    other = {"vocab_size": 8192, "tie_word_embeddings": False, "max_position_embeddings": 512, "eos_token_id": 1}
    config = AutoConfig.for_model("qwen3", **shape, **heads, **other)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def grown(pid: int, act: Callable[[], Any]) -> tuple[float, int, Any]:
    """Return the seconds that ``act`` takes, the bytes that the process grows by meanwhile, and what it returns."""
    status, clear = Path(f"/proc/{pid}/status"), Path(f"/proc/{pid}/clear_refs")
    clear.write_text("5")
    before = _kb(status, "VmRSS")
    start_s = time.perf_counter()
    value = act()
    return time.perf_counter() - start_s, 1024 * max(0, _kb(status, "VmHWM") - before), value


def _kb(status: Path, key: str) -> int:
    (line,) = [line for line in status.read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1])


def sent(trainer: Any, receivers: list[ReceiverProcess], limit_bytes: int) -> int:
    source = trainer.weights_to_send()
    pieces = buckets(as_served(source.manifest.tensors, {}), limit_bytes=limit_bytes)
    own = [receiver.receiver() for receiver in receivers]
    opened = partial(source.open_sender, buckets=pieces)
    return asyncio.run(send_weights(opened, pieces, own, limit_s=LIMIT_S, part_s=10.0)).peak_bytes


def read_all(folder: Path, num_readers: int) -> None:
    for _ in range(num_readers):
        for _, tensor in FolderWeights(0, folder).tensors():
            tensor.sum()  # every page of it


def ways(
    alone: LocalTrainer, fleet: FleetTrainer, folders: WeightFolders, new: Callable[..., ReceiverProcess], limit: int
) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return, for each way, the process that sends and what it does."""
    here, rank = os.getpid(), fleet.pids[0]

    def by_folder(num: int) -> None:
        read_all(folders.write(1, dict(alone.weights())), num)

    def by_shared_memory(num: int) -> None:
        source: Any = fleet.weight_source()
        for _ in range(num):
            for _, tensor in source.tensors():
                tensor.sum()

    found: dict[str, tuple[int, Callable[[], Any]]] = {}
    for num in (1, 2):
        found[f"folder, {num}"] = here, partial(by_folder, num)
        found[f"shared memory of 2 ranks, {num}"] = rank, partial(by_shared_memory, num)
        for form, is_flat in (("flat", True), ("tensors", False)):
            to = [new(is_flat=is_flat) for _ in range(num)]
            found[f"group of 1 process, {form}, {num}"] = here, partial(sent, alone, to, limit)
            found[f"group of 2 ranks, {form}, {num}"] = rank, partial(sent, fleet, to, limit)
    return found


def forget(fleet: FleetTrainer) -> None:
    """Have a fleet write its version again: it writes each once."""
    for written in fleet._staging._published.values():
        shutil.rmtree(written)
    fleet._staging._published.clear()


_AS_IT_IS = SGLangWeights.receiver


async def _flat(self: Any, label: str, *, keeps_kv: bool) -> Receiver:
    """Have a server receive each bucket as one tensor, as it would over NCCL."""
    receiver = await _AS_IT_IS(self, label, keeps_kv=keeps_kv)

    def calls(address: Mapping[str, Any]) -> TransferCalls:
        own = receiver.calls(address)

        def announce(bucket: Bucket, is_last: bool) -> tuple[str, Any]:
            path, body = own.announce(bucket, is_last)
            return path, {**body, "load_format": "flattened_bucket"}

        return replace(own, announce=announce)

    return replace(receiver, plan=replace(receiver.plan, is_flat=True), calls=calls)


async def real_server(folder: Path, alone: LocalTrainer, log: Path, rounds: int) -> dict[str, list[float]]:
    """Return seconds of loads into a real SGLang server, by a folder and by a group."""
    server = sglang_server(folder, log)
    found: dict[str, list[float]] = {}
    try:
        server.start()
        server.wait_until_ready()
        for transfer, form in (("folder", ""), ("gloo", "flat"), ("gloo", "tensors")) * rounds:
            SGLangWeights.receiver = _flat if form == "flat" else _AS_IT_IS  # type: ignore[method-assign]
            how: Any = transfer
            config = SGLangConfig(urls=(server.url,), weight_transfer=how, read_back="never", max_running=16)
            setup = EngineSetup(folder=folder, run="benchmark", root=log.parent, clock=SystemClock())
            pool = await open_sglang(config, setup)
            folders = WeightFolders(log.parent / "weights", like=folder)
            publisher = Publisher(pool, folders=folders, timeout_s=LIMIT_S)
            try:
                start_s = time.perf_counter()
                source: Any = alone.weights_to_send() if publisher.sends else alone.weight_source()
                await publisher.publish(await publisher.stage(source))
                found.setdefault(f"SGLang, {transfer} {form}", []).append(time.perf_counter() - start_s)
            finally:
                await pool.close()
    finally:
        server.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 12.6 MB each, beside 33.6 MB of embedding and head")
    parser.add_argument("--bucket-mb", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"publication-{date.today()}.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        root = Path(scratch)
        folder = make_folder(root / "model", arguments.layers)
        common: dict[str, Any] = {"temperature": 1.0, "max_response_tokens": 8, "num_steps": 2}
        algorithm = resolve(AlgorithmConfig())
        alone = LocalTrainer(TrainerConfig(device="cpu"), algorithm, folder, **common)
        config = TrainerConfig(device="cpu", num_devices=2)
        fleet = FleetTrainer(config, algorithm, folder, fallback=root / "staging", logs=root / "logs", **common)
        stack.callback(fleet.close)

        def new(**settings: Any) -> ReceiverProcess:
            receiver = ReceiverProcess("receiver", timeout_s=LIMIT_S, **settings)
            stack.callback(receiver.close)
            return receiver

        limit = arguments.bucket_mb << 20
        expected = {name: digest(tensor) for name, tensor in alone.weights().items()}
        for trainer in (alone, fleet):
            checked = new(is_flat=True)
            sent(trainer, [checked], limit)
            assert checked.held == expected, "a receiver was sent other weights than the trainer has"
        num_bytes = sum(tensor.nbytes for tensor in alone.weights().values())
        print(f"{num_bytes / GB:.3f} GB in {len(expected)} tensors; buckets of {arguments.bucket_mb} MiB")
        rows: dict[str, dict[str, list[float]]] = {}
        todo = ways(alone, fleet, WeightFolders(root / "weights", like=folder), partial(new, keeps=False), limit)
        for number in range(arguments.rounds + 1):
            for name, (pid, act) in todo.items():
                forget(fleet)
                elapsed_s, held, peak = grown(pid, act)
                row = rows.setdefault(name, {"s_per_gb": [], "held_mb": [], "bucket_mb": []})
                row["held_mb"].append(held / 1e6)
                row["bucket_mb"].append((peak or 0) / 1e6)
                if number:  # the first round is for warming up; memory that it has taken is kept for the next
                    row["s_per_gb"].append(elapsed_s / num_bytes * GB)
        real: dict[str, list[float]] = {}
        if "SGLANG_PYTHON" in os.environ:
            real = asyncio.run(real_server(folder, alone, root / "server.log", arguments.rounds))
    for name, row in rows.items():
        s_per_gb, held_mb, bucket_mb = statistics.median(row["s_per_gb"]), max(row["held_mb"]), max(row["bucket_mb"])
        print(f"{name:38} {s_per_gb:6.2f} s/GB {held_mb:6.0f} MB held, {bucket_mb:4.0f} MB in buckets")
    for name, values in real.items():
        print(f"{name:38} {statistics.median(values) / num_bytes * GB:6.2f} s/GB")
    result = {
        "date": str(date.today()),
        "machine": machine(),
        "num_bytes": num_bytes,
        "num_tensors": len(expected),
        "bucket_mib": arguments.bucket_mb,
        "ways": rows,
        "real_s": real,
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
