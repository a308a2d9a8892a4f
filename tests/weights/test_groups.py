"""Groups over NCCL without a GPU: what of PyTorch and of NCCL is called, on which device, and who learns of an error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed

from rollover.engine.servers.embedded.messages import GroupAddress
from rollover.engine.servers.embedded.receiving import ReceivingGroup
from rollover.errors import EngineError, EngineTimeout
from rollover.trainer.sending import RankSender
from rollover.trainer.world import World
from rollover.weights.groups import GroupPlan, NCCLGroup, TorchGroup, open_group
from rollover.weights.sending import BucketQueue, Lease, in_thread, own_weights
from rollover.weights.sources import MemoryWeights
from tests.engine.servers.meetings import Meetings
from tests.speed import within

DEADLINE_S = within(60.0)
PLAN = GroupPlan(
    meets="torch", backend="nccl", towards="http://127.0.0.1:8000", name="run/7", num_workers=1, timeout_s=30.0
)


# -- what is missing ---------------------------------------------------------------------------------------------


def with_gpus_but_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)


@pytest.mark.parametrize("meets", ["torch", "nccl"])
def test_a_sender_without_a_gpu_or_without_nccl_says_what_to_set(meets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, meets=meets)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"engine\.weight_transfer 'nccl' needs a GPU .*: set it to 'folder'"):
        open_group(plan)
    with_gpus_but_no_nccl(monkeypatch)
    with pytest.raises(EngineError, match=r"engine\.weight_transfer 'nccl' needs a PyTorch with NCCL"):
        open_group(plan)


def test_a_server_whose_pytorch_has_no_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus_but_no_nccl(monkeypatch)
    address = GroupAddress(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="run/7", backend="nccl"
    )
    with pytest.raises(EngineError, match="needs a PyTorch with NCCL"):
        ReceivingGroup(address, torch.device("cuda"))


# -- which device ------------------------------------------------------------------------------------------------


def test_weights_on_no_gpu_are_sent_by_the_first_gpu_or_gloo_on_the_cpu() -> None:
    assert (PLAN.sends_from, replace(PLAN, device="cpu").sends_from) == ("cuda:0", "cuda:0")
    assert replace(PLAN, device="cuda:1").sends_from == "cuda:1"
    assert replace(PLAN, backend="gloo", device="cuda:1").sends_from == "cpu"


def test_weights_in_memory_are_sent_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    meetings, weights = Meetings(), {"w": torch.ones(2)}
    monkeypatch.setattr("rollover.weights.sending.open_group", meetings.open_group)
    monkeypatch.setattr("rollover.trainer.sending.open_group", meetings.open_group)
    source = own_weights(MemoryWeights(0, weights), weights, Lease(), current=lambda: 0, device="cuda:2")
    source.open_sender(PLAN, []).close()
    rank = RankSender(World(), weights, device="cuda:3")
    rank.open(PLAN)
    rank.close()
    assert [meeting.plan.sends_from for meeting in meetings.all] == ["cuda:2", "cuda:3"]


# -- NCCL through PyTorch ----------------------------------------------------------------------------------------


class RecordedGroup:
    """Stands in for ``ProcessGroupNCCL``: records how it is made and used, and does ``on_wait`` when it is waited for.
    Tensors are on PyTorch's device without memory, which stands for a GPU."""

    Options = SimpleNamespace

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[], None] = lambda: None) -> None:
        self.settings: list[str | None] = []
        self.devices: list[str] = []
        self.limits: list[timedelta] = []
        self.num_aborts = 0
        self._on_wait = on_wait
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", self, raising=False)

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> RecordedGroup:
        self.settings.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.devices.extend(str(tensor.device) for tensor in tensors)
        return SimpleNamespace(wait=self._wait)

    def abort(self) -> None:
        self.num_aborts += 1

    def _wait(self, limit: timedelta) -> None:
        self.limits.append(limit)
        self._on_wait()


def torch_group(timeout_s: float = 30.0) -> TorchGroup:
    return TorchGroup("nccl", "127.0.0.1", "run/7", num_workers=1, timeout_s=timeout_s, device="meta")


@pytest.mark.parametrize("own", [None, "0"])
def test_only_groups_for_weights_give_errors_to_who_waits(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedGroup(monkeypatch)
    if own is None:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", own)
    group = torch_group()
    group.join()
    group.close()
    assert recorded.settings == ["1"]
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == own


def test_tensors_are_broadcast_from_the_named_device_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedGroup(monkeypatch)
    group = torch_group(timeout_s=30.0)
    group.join()
    group.broadcast(torch.ones(3))
    group.broadcast(torch.ones(4))
    group.close()
    assert recorded.devices == ["meta", "meta"]
    first, second = recorded.limits
    assert timedelta(seconds=30) > first > second > timedelta(0)


def test_a_lost_server_is_an_error_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=torch.distributed.DistBackendError("NCCL error: remote process exited"))
    RecordedGroup(monkeypatch, fail)
    queue = BucketQueue(torch_group(), PLAN)
    queue.put([torch.ones(3)])
    with pytest.raises(EngineError, match="the group through which weights were sent has failed: NCCL error: remote"):
        queue.drain()
    queue.close()


def test_a_queue_shows_that_it_lives_and_how_much_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedGroup(monkeypatch)
    signs: list[str] = []
    queue = BucketQueue(torch_group(), PLAN, on_wait=lambda: signs.append("alive"))
    assert queue.peak_bytes == 0
    for size in (3, 5, 1):
        queue.put([torch.ones(size)])
    queue.drain()
    queue.close()
    assert len(signs) >= 4, "once for the meeting and once for each transfer"
    assert queue.peak_bytes == 4 * (3 + 5), "a transfer waits for the one before it"


def test_a_broadcast_that_was_aborted_is_none_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedGroup(monkeypatch, lambda: group.close())
    group = torch_group()
    group.join()
    with pytest.raises(RuntimeError, match="the group was closed"):
        group.broadcast(torch.ones(3))
    assert recorded.num_aborts == 1


# -- who does not come -------------------------------------------------------------------------------------------


class HalfJoined:
    """A group with a peer that was killed while it connected: it goes on waiting, whatever happens, like gloo's."""

    address: ClassVar = {"master_port": 1}

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.num_closed = 0

    def join(self) -> None:
        self.is_over.wait()

    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def half_joined() -> Iterator[HalfJoined]:
    group = HalfJoined()
    yield group
    group.is_over.set()


def test_a_closed_sender_does_not_wait_for_a_killed_receiver(half_joined: HalfJoined) -> None:
    queue = BucketQueue(half_joined, replace(PLAN, timeout_s=3600.0))
    sending = in_thread(lambda: queue.put([torch.ones(3)]))
    queue.close()
    with pytest.raises(EngineError, match="the group through which weights were sent was closed"):
        sending.result(DEADLINE_S)
    assert half_joined.num_closed == 1


def test_a_receiver_killed_while_joining_costs_a_third_of_the_deadline(half_joined: HalfJoined) -> None:
    begun_s = time.monotonic()
    queue = BucketQueue(half_joined, replace(PLAN, timeout_s=0.3))
    with pytest.raises(EngineTimeout, match=r"not all joined .* within 0\.1 s,.* a third of engine\.load_timeout_s"):
        queue.put([torch.ones(3)])
    assert time.monotonic() - begun_s >= 0.1


def test_a_group_that_met_may_get_its_bucket_late(half_joined: HalfJoined, monkeypatch: pytest.MonkeyPatch) -> None:
    half_joined.is_over.set()
    queue = BucketQueue(half_joined, replace(PLAN, timeout_s=300.0))
    queue._work.result(DEADLINE_S)
    monkeypatch.setattr(queue, "_begun_s", time.monotonic() - 150.0)  # gathering it took as long
    queue.put([torch.ones(3)])
    assert queue.drain().num_bytes == 12


# -- NCCL itself -------------------------------------------------------------------------------------------------


class RecordedNCCL:
    """Stands in for the library: records which function was called while which device was the current one.

    Args:
        on_call: what else the functions of these names do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **on_call: Callable[[], object]) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self._on_call = on_call
        self._current: str | None = None
        monkeypatch.setattr("rollover.weights.groups.CDLL", lambda name: self)
        monkeypatch.setattr(torch.cuda, "device", self._as_current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.synchronize())

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, self._current))
            self._on_call.get(name, lambda: None)()
            return 0

        self.__dict__[name] = call
        return call

    @contextmanager
    def _as_current(self, device: str) -> Iterator[None]:
        before, self._current = self._current, device
        try:
            yield
        finally:
            self._current = before


def test_nccl_is_called_with_the_named_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordedNCCL(monkeypatch)
    group = NCCLGroup(1, device="meta")
    group.join()
    group.broadcast(torch.ones(3))
    group.close()
    of_device = ("ncclCommInitRank", "ncclAllReduce", "synchronize", "ncclBroadcast", "synchronize")
    assert nccl.calls == [("ncclGetUniqueId", None), *((name, "meta") for name in of_device), ("ncclCommAbort", None)]


def test_a_transfer_that_was_aborted_on_the_gpu_is_none_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordedNCCL(monkeypatch, ncclBroadcast=lambda: group.close())
    group = NCCLGroup(1, device="meta")
    group.join()
    with pytest.raises(EngineError, match="was closed"):
        group.broadcast(torch.ones(3))
    with pytest.raises(EngineError, match="was closed"):
        group.broadcast(torch.ones(3))
    names = [name for name, _ in nccl.calls]
    assert (names.count("ncclBroadcast"), names.count("ncclCommAbort")) == (1, 1)


def test_a_group_closed_before_all_joined_is_aborted_once_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordedNCCL(monkeypatch, ncclCommInitRank=lambda: group.close())
    group = NCCLGroup(1, device="meta")
    with pytest.raises(EngineError, match="was closed"):
        group.join()
    assert [name for name, _ in nccl.calls] == ["ncclGetUniqueId", "ncclCommInitRank", "ncclCommAbort"]
