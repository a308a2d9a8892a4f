"""Measures what a delta between two versions of a trained bfloat16 model takes, against full weights and the entropy.

    python benchmarks/delta.py                    # ten minutes on one core, a third of them to train the model

A byte-level Qwen3 of 1.7 million parameters is trained on the source of Python's standard library at 1e-3. Training
then goes on with a fresh AdamW over float32 masters at the learning rates of reinforcement learning. After ``WARM``
steps, the served weights of every step, or of every so many, are encoded against those before. Masters start where
training left them, anywhere between two bfloat16 values, as in the middle of a run; at 1e-6 also from the bfloat16
values themselves, as at the beginning of one, when fewer weights reach the next value.

Bounds, summed over tensors: ``entropy`` is that of which elements changed, and of the number of bfloat16 values by
which each moved. ``entropy_given_exponent`` lets both depend on the old value's exponent: small weights move often.
Rivals, each followed by zstd: ``overwrite`` (gaps as varints and the new values), the same at level 19, ``planes``
(gaps and the two bytes of new values apart), ``xor`` with the old tensor, and a ``bitmask`` of what changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from engine import machine

from rollover.swarm.publication.delta import Bytes, _ranks, apply
from rollover.swarm.publication.publisher import smaller_encoding

HERE = Path(__file__).parent
LEARNING_RATES = (1e-7, 1e-6, 3e-6, 1e-5, 1e-4)
INTERVALS = (1, 4, 16)
WARM, MEASURED = 30, 33
CONTEXT, BATCH = 64, 16

Snapshot = dict[str, Bytes]


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def make_model(seed: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 5, "num_attention_heads": 5}
    more = {"num_key_value_heads": 5, "head_dim": 32, "vocab_size": 256, "tie_word_embeddings": True}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape, **more)).float()


def train(
    model: torch.nn.Module, data: torch.Tensor, learning_rate: float, num_steps: int, rng: np.random.Generator
) -> Iterator[float]:
    """Yield the loss after each step of a fresh AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(num_steps):
        if num_steps > 200:  # the long training cools down
            optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, 2 * (1 - step / num_steps))
        starts = rng.integers(0, len(data) - CONTEXT, BATCH)
        ids = torch.stack([data[s : s + CONTEXT] for s in starts]).long()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


def snapshot(model: torch.nn.Module) -> Snapshot:
    return {
        name: p.detach().bfloat16().reshape(-1).view(torch.uint8).numpy().copy() for name, p in model.named_parameters()
    }


def entropy(counts: np.ndarray) -> float:
    """Bits of all that was counted."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def bits_of_change(moved: np.ndarray, by: np.ndarray) -> float:
    """Of which moved, and by how much."""
    places = entropy(np.array([moved.sum(), (~moved).sum()]))
    return places + (entropy(np.unique(by, return_counts=True)[1]) if by.size else 0.0)


def bounds(old: Bytes, new: Bytes) -> tuple[float, float]:
    """Bytes: entropy, and entropy given the exponent of the old value."""
    before, after = old.view(np.uint16), new.view(np.uint16)
    moved = before != after
    by = _ranks(after).astype(int) - _ranks(before).astype(int)
    given = 0.0
    for exponent in np.unique(before >> 7 & 255):
        of = (before >> 7 & 255) == exponent
        given += bits_of_change(moved[of], by[of & moved])
    return bits_of_change(moved, by[moved]) / 8, given / 8


def varints(numbers: np.ndarray) -> bytes:
    out = bytearray()
    for n in numbers.tolist():
        while n > 127:
            out.append(n & 127 | 128)
            n >>= 7
        out.append(n)
    return bytes(out)


def rivals(old: Snapshot, new: Snapshot) -> dict[str, int]:
    """Bytes of other encodings of the whole model."""
    plain, planes, mask, xor, full = [], [], [], [], []
    for name, content in new.items():
        before, after = old[name].view(np.uint16), content.view(np.uint16)
        places = np.flatnonzero(before != after)
        gaps = varints(np.diff(places, prepend=-1) - 1)
        values = after[places].tobytes()
        octets = after[places].view(np.uint8).reshape(-1, 2)
        plain.append(gaps + values)
        planes.append((gaps, octets[:, 0].tobytes(), octets[:, 1].tobytes()))
        mask.append((np.packbits(before != after).tobytes(), octets[:, 0].tobytes(), octets[:, 1].tobytes()))
        xor.append((before ^ after).tobytes())
        full.append(content.tobytes())

    def size(content: bytes, level: int = 1) -> int:
        return len(zstandard.ZstdCompressor(level=level).compress(content))

    return {
        "full": size(b"".join(full)),
        "overwrite": size(b"".join(plain)),
        "overwrite_level_19": size(b"".join(plain), 19),
        "planes": sum(size(plane) for tensor in planes for plane in tensor),
        "bitmask": sum(size(plane) for tensor in mask for plane in tensor),
        "xor": size(b"".join(xor)),
        "xor_level_19": size(b"".join(xor), 19),
    }


def compare(old: Snapshot, new: Snapshot) -> dict[str, float]:
    """Bytes of the whole model in every way, checked to come back bit for bit."""
    found: dict[str, float] = {"raw": sum(c.nbytes for c in new.values()), "ours": 0, "entropy": 0.0}
    found |= {"entropy_given_exponent": 0.0, "changed": 0.0, **rivals(old, new)}
    for name, content in new.items():
        encoded = smaller_encoding(old[name], content, 2)
        if encoded is None:
            found["ours"] += len(zstandard.ZstdCompressor(level=1).compress(content.data))
        else:
            made = apply(old[name], encoded, 2)
            assert np.array_equal(made, content) and np.array_equal(apply(made, encoded, 2), content)
            found["ours"] += len(encoded)
        bound, given = bounds(old[name], content)
        found["entropy"] += bound
        found["entropy_given_exponent"] += given
        found["changed"] += float((old[name].view(np.uint16) != content.view(np.uint16)).sum()) * 2
    return found


def measure(folder: Path, data: torch.Tensor, learning_rate: float, every: int, start: str) -> dict[str, float]:
    model = make_model(0)
    weights = torch.load(folder / "trained.pt", weights_only=True)
    model.load_state_dict({name: w.bfloat16().float() if start == "bfloat16" else w for name, w in weights.items()})
    total: dict[str, float] = {}
    last, number = None, 0
    for step, _ in enumerate(train(model, data, learning_rate, WARM + MEASURED, np.random.default_rng(1))):
        if step < WARM or (step - WARM) % every:
            continue
        now = snapshot(model)
        if last is not None:
            number += 1
            for key, value in compare(last, now).items():
                total[key] = total.get(key, 0.0) + value
        last = now
    return {key: value / number for key, value in total.items()}


def row(learning_rate: float, every: int, start: str, found: dict[str, float]) -> dict[str, Any]:
    raw = found["raw"]
    shares = {name: round(value / raw, 6) for name, value in found.items() if name != "raw"}
    ratios = {bound: round(found["ours"] / found[bound], 4) for bound in ("entropy", "entropy_given_exponent")}
    rivals_found = "  ".join(f"{name} {shares[name]:.3%}" for name in ("overwrite", "planes", "xor", "bitmask", "full"))
    print(
        f"lr {learning_rate:.0e} every {every:2d} from {start}: changed {shares['changed']:.3%}, ours"
        f" {shares['ours']:.3%}, {ratios['entropy']:.2f} times the entropy,"
        f" {ratios['entropy_given_exponent']:.2f} given the exponent;  {rivals_found}",
        flush=True,
    )
    return {"learning_rate": learning_rate, "every": every, "start": start, "share_of_raw": shares, "times": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=700, help="of the training at 1e-3")
    parser.add_argument("--folder", type=Path, default=HERE.parent / "build" / "delta", help="keeps the trained model")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"delta-{date.today()}.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, start_s = text(), time.perf_counter()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "trained.pt").exists():
        model = make_model(0)
        losses = list(train(model, data, 1e-3, args.steps, np.random.default_rng(0)))
        (args.folder / "losses.json").write_text(json.dumps(losses[::50]))
        torch.save(model.state_dict(), args.folder / "trained.pt")
        print(f"trained to a loss of {np.mean(losses[-50:]):.3f} in {time.perf_counter() - start_s:.0f} s", flush=True)
    record: dict[str, Any] = {"command": sys.argv, "date": str(date.today()), "machine": machine(), "rows": []}
    record["losses_of_training_every_50"] = json.loads((args.folder / "losses.json").read_text())
    for learning_rate in LEARNING_RATES:
        for every in INTERVALS if learning_rate == 1e-6 else (1,):
            for start in ("float32", "bfloat16") if learning_rate == 1e-6 else ("float32",):
                found = measure(args.folder, data, learning_rate, every, start)
                record["rows"].append(row(learning_rate, every, start, found))
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"recorded in {args.out}")


if __name__ == "__main__":
    main()
