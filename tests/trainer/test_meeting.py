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


def task(own: str) -> Any:
    where = NetworkMeeting(host="127.0.0.1", port=1, own=own)
    return SimpleNamespace(device="cpu", timeout_s=1.0, rank=1, size=2, meeting=where)


def test_ranks_use_the_interface_of_the_address_that_reaches_them() -> None:
    rank.meet(task("127.0.0.1"))
    assert [os.environ[name] for name in NAMES] == ["lo", "=lo"]


def test_an_interface_that_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    rank.meet(task("127.0.0.1"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_without_an_interface_of_that_address_the_libraries_choose() -> None:
    rank.meet(task("203.0.113.7"))
    assert not {*NAMES} & {*os.environ}
