"""Where ranks meet, and the network over which they exchange tensors."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.trainer import rank
from rollover.trainer.messages import NetworkMeeting

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def met(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group is made, and the environment is as before after each test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setattr(rank.dist, "init_process_group", lambda backend, **where: None)
    monkeypatch.setattr(rank, "init_device_mesh", lambda kind, shape: None)
    monkeypatch.setattr(rank, "_store", lambda where, size, timeout: None)


@pytest.mark.parametrize(
    ("own", "chosen", "expected"),
    [
        pytest.param("127.0.0.1", {}, ["lo", "=lo"], id="of the address that reaches them"),
        pytest.param("127.0.0.1", {NAMES[1]: "ib0"}, ["lo", "ib0"], id="as the user has chosen"),
        pytest.param("203.0.113.7", {}, [None, None], id="as the libraries choose"),
    ],
)
def test_ranks_use_an_interface(
    monkeypatch: pytest.MonkeyPatch, own: str, chosen: dict[str, str], expected: list[str | None]
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    where = NetworkMeeting(host="127.0.0.1", port=1, own=own)
    task: Any = SimpleNamespace(device="cpu", timeout_s=1.0, rank=1, size=2, meeting=where)
    rank.meet(task)
    assert [os.environ.get(name) for name in NAMES] == expected
