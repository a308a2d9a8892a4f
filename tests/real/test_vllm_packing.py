"""Buckets of weights as one tensor of bytes each, read by vLLM's own code; its CUDA streams and NCCL are left out."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover.weights.base import TensorSpec
from rollover.weights.buckets import buckets, flattened
from tests.real.test_vllm import PYTHON
from tests.speed import within

pytestmark = pytest.mark.vllm

LIMIT = 4096
RECEIVE = """
import contextlib, json, sys
from types import SimpleNamespace
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import packed_tensor

stream = SimpleNamespace(synchronize=lambda: None)
packed_tensor._get_streams = lambda device, number: (stream,) * number
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.accelerator.current_device_index = lambda: 0

sent, found = load_file("sent"), {}


class Group:
    def broadcast(self, tensor, src):
        bytes_sent = sent.pop(str(number))  # once for each call
        assert tensor.shape == bytes_sent.shape, (tensor.shape, bytes_sent.shape)
        tensor.copy_(bytes_sent)


for number, told in enumerate(json.load(open("told"))):
    given = zip(told["names"], zip(told["shapes"], (getattr(torch, name) for name in told["dtype_names"])))
    packed_tensor.packed_nccl_broadcast_consumer(
        given, Group(), 0, lambda pairs: found.update(pairs), buffer_size_bytes=int(sys.argv[1]), device="cpu"
    )
assert not sent
save_file({name: tensor.clone() for name, tensor in found.items()}, "found")
"""


def test_vllm_reads_buckets_as_they_are_sent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.randn(7),
        "larger than a bucket": torch.randn(40, 50),
        **{f"w{i}": torch.randn(9, 13, dtype=torch.float32).to(torch.bfloat16) for i in range(30)},
        "exact": torch.randn(LIMIT // 4),
        "last": torch.randn(1, 2),
    }
    specs = [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    ]
    pieces = buckets(specs, limit_bytes=LIMIT)
    assert len(pieces) > 4 and max(piece.num_bytes for piece in pieces) > LIMIT
    sent = {
        str(number): flattened((weights[spec.name] for spec in piece.tensors), piece.num_bytes)
        for number, piece in enumerate(pieces)
    }
    save_file(sent, tmp_path / "sent")
    (tmp_path / "told").write_text(json.dumps([piece.described("dtype_names") for piece in pieces]))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([PYTHON, "-c", RECEIVE, str(LIMIT)], cwd=tmp_path, env=env, timeout=within(300), check=True)
    found = load_file(tmp_path / "found")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
