"""Digests of a server's tensors are compared with the folder that it was given, whatever its layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from rollover.engine.servers.weights.read_back import FolderDigests, HeldTensor, ReadBack
from rollover.errors import EngineError

Tensors = dict[str, NDArray[np.float32]]
LAYER = "model.layers.0."
QUERY, KEY, VALUE = (f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
JOINED, GATED = f"{LAYER}self_attn.qkv_proj.weight", f"{LAYER}mlp.gate_up_proj.weight"


def model(seed: int) -> Tensors:
    drawn = np.random.default_rng(seed)
    shapes = {QUERY: (8, 6), KEY: (4, 6), VALUE: (4, 6), GATE: (10, 6), UP: (10, 6), DOWN: (6, 10)}
    shapes |= {NORM: (6,), EMBEDDING: (70, 6)}
    return {name: drawn.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def saved(tensors: Tensors, folder: Path) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [saved(model(seed), tmp_path / f"v{seed}") for seed in range(3)]


def digest(*parts: NDArray[np.float32]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def whole(t: Tensors) -> dict[HeldTensor, str]:
    """As one worker holds them: joined matrices, a vocabulary padded with zeros."""
    padded = np.concatenate([t[EMBEDDING], np.zeros((58, 6), np.float32)])
    held = {JOINED: (t[QUERY], t[KEY], t[VALUE]), GATED: (t[GATE], t[UP]), DOWN: (t[DOWN],), NORM: (t[NORM],)}
    held |= {EMBEDDING: (padded,), "lm_head.weight": (padded,)}
    return {("tp0", name): digest(*parts) for name, parts in held.items()}


def opaque(t: Tensors) -> dict[HeldTensor, str]:
    """Digests of a kind of its own."""
    return {place: found[:8] for place, found in whole(t).items()}


def test_joined_and_padded_tensors_are_recognised_and_must_be_there_after_each_load(folders: list[Path]) -> None:
    read_back = ReadBack(FolderDigests())
    for version, folder in enumerate(folders[:2]):
        assert read_back.check(folder, whole(model(version)), server="one") == len(read_back.exact) == 6
    with pytest.raises(EngineError, match=r"one was given \S+v2 and holds other weights: 6 of 6 "):
        read_back.check(folders[2], whole(model(1)), server="one")
    one_is_old = {**whole(model(2)), ("tp0", JOINED): whole(model(1))["tp0", JOINED]}
    with pytest.raises(EngineError, match=rf"1 of 6 tensors .* the first is '{JOINED}'"):
        read_back.check(folders[2], one_is_old, server="one")
    read_back.check(folders[2], whole(model(2)), server="one")


def test_digests_of_another_kind_must_follow_the_changes(folders: list[Path], tmp_path: Path) -> None:
    read_back = ReadBack(FolderDigests())
    assert read_back.check(folders[0], opaque(model(0)), server="one") == 6 and not read_back.exact
    with pytest.raises(EngineError, match=r"holds other weights: 6 of 6"):
        read_back.check(folders[1], opaque(model(0)), server="one")
    read_back.check(folders[0], opaque(model(0)), server="one")  # it was given the old ones again
    read_back.check(folders[1], opaque(model(1)), server="one")
    only_norm = {**model(1), NORM: model(2)[NORM]}
    folder = saved(only_norm, tmp_path / "norm")
    with pytest.raises(EngineError, match=rf"1 of 6 .* the first is '{DOWN}'"):
        found = {**opaque(only_norm), ("tp0", DOWN): "something"}
        read_back.check(folder, found, server="one")
    with pytest.raises(EngineError, match=rf"1 of 6 .* the first is '{NORM}'"):
        read_back.check(folder, opaque(model(1)), server="one")
    read_back.check(folder, opaque(only_norm), server="one")


def test_a_change_that_a_format_rounds_away_is_none_if_others_are_seen(folders: list[Path]) -> None:
    read_back = ReadBack(FolderDigests())
    read_back.check(folders[0], opaque(model(0)), server="one")
    rounded = {**opaque(model(1)), ("tp0", NORM): opaque(model(0))["tp0", NORM]}
    assert read_back.check(folders[1], rounded, server="one") == 6


def test_what_nothing_is_known_of_is_counted(folders: list[Path]) -> None:
    found: Mapping[HeldTensor, str] = {
        ("tp0", "rotary.inv_freq"): "0" * 64,
        ("tp0", NORM): hashlib.sha256(b"").hexdigest(),  # packed away
    }
    assert ReadBack(FolderDigests()).check(folders[0], found, server="one") == 0


def test_servers_of_one_pool_share_the_digests_of_a_folder(folders: list[Path]) -> None:
    digests = FolderDigests()
    one, two = ReadBack(digests), ReadBack(digests)
    one.check(folders[0], whole(model(0)), server="one")
    (folders[0] / "model.safetensors").unlink()
    assert two.check(folders[0], whole(model(0)), server="two") == len(two.exact) == 6
