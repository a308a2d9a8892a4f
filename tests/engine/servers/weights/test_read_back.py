"""Digests of a server's tensors are compared with the folder that it was given, whatever its layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from rollover.engine.servers.weights.read_back import Confirmation, FolderDigests, HeldTensor, ReadBack
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
    return {HeldTensor(name=name): digest(*parts) for name, parts in held.items()}


def over_two(t: Tensors) -> dict[HeldTensor, str]:
    """As two workers hold them."""
    padded = np.concatenate([t[EMBEDDING], np.zeros((58, 6), np.float32)])
    found = {}
    for n in range(2):
        rows = {name: np.split(tensor, 2)[n] for name, tensor in t.items()}
        held = {JOINED: (rows[QUERY], rows[KEY], rows[VALUE]), GATED: (rows[GATE], rows[UP]), NORM: (t[NORM],)}
        held |= {DOWN: (np.split(t[DOWN], 2, axis=1)[n],), EMBEDDING: (np.split(padded, 2)[n],)}
        found |= {HeldTensor(name=name, part=n, num_parts=2): digest(*parts) for name, parts in held.items()}
    return found


def opaque(t: Tensors) -> dict[HeldTensor, str]:
    """Digests of a kind of its own."""
    return {place: found[:8] for place, found in whole(t).items()}


@pytest.mark.parametrize(("layout", "num_exact"), [(whole, 6), (over_two, 10)])
def test_every_layout_is_recognised_and_must_be_there_after_each_load(
    layout: Callable[[Tensors], dict[HeldTensor, str]], num_exact: int, folders: list[Path]
) -> None:
    read_back = ReadBack(FolderDigests())
    for version, folder in enumerate(folders[:2]):
        found = read_back.check(folder, layout(model(version)), server="one")
        assert found == Confirmation(num_exact=num_exact, num_followed=0, num_silent=0)
    with pytest.raises(EngineError, match=rf"one was given \S+v2 and holds other weights: {num_exact} of {num_exact} "):
        read_back.check(folders[2], layout(model(1)), server="one")
    one_is_old = {**layout(model(2)), next(iter(layout(model(2)))): next(iter(layout(model(1)).values()))}
    with pytest.raises(EngineError, match=rf"1 of {num_exact} tensors .* the first is '{JOINED}'"):
        read_back.check(folders[2], one_is_old, server="one")
    read_back.check(folders[2], layout(model(2)), server="one")


def test_digests_of_another_kind_must_follow_the_changes(folders: list[Path], tmp_path: Path) -> None:
    read_back = ReadBack(FolderDigests())
    assert read_back.check(folders[0], opaque(model(0)), server="one").num_followed == 6
    with pytest.raises(EngineError, match=r"holds other weights: 6 of 6"):
        read_back.check(folders[1], opaque(model(0)), server="one")
    read_back.check(folders[0], opaque(model(0)), server="one")  # it was given the old ones again
    read_back.check(folders[1], opaque(model(1)), server="one")
    only_norm = {**model(1), NORM: model(2)[NORM]}
    folder = saved(only_norm, tmp_path / "norm")
    with pytest.raises(EngineError, match=rf"1 of 6 .* the first is '{DOWN}'"):
        found = {**opaque(only_norm), HeldTensor(name=DOWN): "something"}
        read_back.check(folder, found, server="one")
    with pytest.raises(EngineError, match=rf"1 of 6 .* the first is '{NORM}'"):
        read_back.check(folder, opaque(model(1)), server="one")
    read_back.check(folder, opaque(only_norm), server="one")


def test_a_change_that_a_format_rounds_away_is_none_if_others_are_seen(folders: list[Path]) -> None:
    read_back = ReadBack(FolderDigests())
    read_back.check(folders[0], opaque(model(0)), server="one")
    rounded = {**opaque(model(1)), HeldTensor(name=NORM): opaque(model(0))[HeldTensor(name=NORM)]}
    assert read_back.check(folders[1], rounded, server="one").num_followed == 6


def test_zeros_that_look_alike_in_several_layouts_do_not_choose_one(tmp_path: Path) -> None:
    zeros = saved({"w": np.zeros((4, 4), np.float32)}, tmp_path / "zeros")
    counted = np.arange(16, dtype=np.float32).reshape(4, 4)
    read_back = ReadBack(FolderDigests())
    for folder, tensor in (
        (zeros, np.zeros((4, 4), np.float32)),
        (saved({"w": counted}, tmp_path / "counted"), counted),
    ):
        cut = np.split(tensor, 2, axis=1)
        found = {HeldTensor(name="w", part=n, num_parts=2): digest(cut[n]) for n in range(2)}
        assert read_back.check(folder, found, server="one").num_exact == 2


def test_what_nothing_is_known_of_is_counted(folders: list[Path]) -> None:
    found: Mapping[HeldTensor, str] = {
        HeldTensor(name="rotary.inv_freq"): "0" * 64,
        HeldTensor(name=NORM): hashlib.sha256(b"").hexdigest(),  # packed away
    }
    confirmed = ReadBack(FolderDigests()).check(folders[0], found, server="one")
    assert confirmed.says_nothing and confirmed.num_silent == 2


def test_servers_of_one_pool_share_the_digests_of_a_folder(folders: list[Path]) -> None:
    digests = FolderDigests()
    one, two = ReadBack(digests), ReadBack(digests)
    one.check(folders[0], whole(model(0)), server="one")
    (folders[0] / "model.safetensors").unlink()
    assert two.check(folders[0], whole(model(0)), server="two").num_exact == 6
