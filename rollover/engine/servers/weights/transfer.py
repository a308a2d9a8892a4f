"""Weights sent into the memory of servers, by whoever holds them; the same flow for every kind of server.

Sender and servers work through the same buckets, each at its own pace: the sender gathers a bucket and broadcasts it to
all, a server is told of it and receives it. Invariants: a group lives for one update, so a server that has been started
again, or that failed in the middle, needs no special case; all sides are waited for together, and when one fails the
others are not waited for; a session and a group that were begun are ended, whatever happens; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollover.engine.background import within
from rollover.engine.servers.config import ServerConfig
from rollover.errors import EngineError, EngineTimeout
from rollover.weights.buckets import Bucket, as_served, buckets
from rollover.weights.groups import GroupPlan, is_loopback
from rollover.weights.sending import OwnSender, Sender, SenderLost, SendReport, SentByHolder, in_thread
from rollover.weights.sources import FolderWeights

Call = tuple[str, Any]
"""The path and the body of a POST."""
OpenSender = Callable[[GroupPlan], Sender]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCalls:
    """The calls by which one kind of server takes weights, in the order in which they are made.

    Example: vLLM's ``begin`` is ``("/start_weight_update", None)``, SGLang's ``("/begin_weight_update", {})``.
    """

    meet: Call
    """Join the group; answered when all have joined."""
    begin: Call
    announce: Callable[[Bucket, bool], Call]
    """Receive the tensors of a bucket, which is the last one if the flag says so."""
    finish: Call
    cancel: Call | None = None
    """End a session that has failed."""
    leave: Call
    """Give up the group."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receiver:
    """A server that is ready to take weights through a group.

    Example: of two servers with two workers each, the address that the second is told has ``rank_offset`` 3.
    """

    name: str
    plan: GroupPlan
    """The group in which it would be alone, with its ``num_workers``."""
    calls: Callable[[Mapping[str, Any]], TransferCalls]
    """The calls for a group that meets at an address."""
    post: Callable[[str, Any], Awaitable[None]]
    """Makes one call. Raises ``EngineError`` when it is refused."""
    ping: Callable[[], Awaitable[object]]
    """Raises ``EngineError`` unless the server answers."""


class TransferFailed(EngineError):
    """A transfer that came to nothing: the weights of its servers are neither the old nor the new ones."""

    def __init__(self, message: str, errors: Mapping[Receiver, EngineError], gone: Mapping[Receiver, EngineError]):
        super().__init__(message)
        self.errors = errors
        """Errors of the servers that failed; the fault need not be theirs."""
        self.gone = gone
        """Servers that did not even leave the group in time: they cannot be in the next one."""


async def send_folder(folder: Path, receiver: Receiver, config: ServerConfig) -> SendReport:
    """Send the weights in a folder, which this process reads, to one server. Raises as ``send_weights``, and
    ``ModelError`` when the folder cannot be read."""
    source = FolderWeights(0, folder)
    pieces = buckets(source.manifest.tensors)

    def open_sender(plan: GroupPlan) -> Sender:
        from torch.cuda import empty_cache

        # The process that trains may be another one, and needs the memory of the buckets.
        return OwnSender(plan, pieces, lambda spec: next(source.tensors([spec.name]))[1], on_close=empty_cache)

    limits = {"limit_s": config.load_timeout_s, "part_s": config.control_timeout_s}
    return await send_weights(open_sender, pieces, [receiver], **limits)


async def send_weights(
    open_sender: OpenSender, pieces: Sequence[Bucket], receivers: Sequence[Receiver], *, limit_s: float, part_s: float
) -> SendReport:
    """Replace the weights of paused servers of one kind, which are in one group.

    Args:
        limit_s: of the whole transfer.
        part_s: how long a server may take to leave a group that has failed.

    Raises:
        TransferFailed: a server has failed, or the deadline has passed.
        SenderLost, WeightsGone: the holder of the weights cannot send them.
    """
    names = ", ".join(receiver.name for receiver in receivers)
    sender = await _opened(open_sender, [receiver.plan for receiver in receivers])
    calls = _calls(receivers, sender.address)
    sending = _Sending(sender)
    works: dict[asyncio.Task[Any], Receiver | None] = {asyncio.create_task(sending.all(pieces)): None}
    works |= {asyncio.create_task(_receive(r, calls[r], pieces)): r for r in receivers}
    failed: dict[asyncio.Task[Any], BaseException] | None = None
    try:
        async with within(
            limit_s, f"sending weights to {names} took longer than {limit_s:g} s (engine.load_timeout_s)"
        ):
            await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
        failed = {work: error for work in works if work.done() and (error := work.exception()) is not None}
    except EngineTimeout as late:
        failed = {work: late for work in works if not work.done()}
    finally:
        for work in works:
            work.cancel()
        closing = in_thread(sender.close)
        await asyncio.gather(*works, return_exceptions=True)
        if failed is None:  # cancelled: a server in whose session nothing comes would refuse the next one
            await _part(receivers, calls, part_s)
    # The sender may wait for a server that has failed, and is released when that one leaves; so both end together.
    gone = await _part(receivers, calls, part_s) if failed else {}
    await asyncio.wrap_future(closing)
    if not failed:
        return next(work.result() for work, receiver in works.items() if receiver is None)
    for error in (await sending.last_error(), *failed.values()):
        if isinstance(error, SenderLost) or not isinstance(error, EngineError | None):
            raise error
    errors = {r: e for work, e in failed.items() if (r := works[work]) is not None and isinstance(e, EngineError)}
    first = next(iter({**gone, **errors}.values()), None) or next(iter(failed.values()))
    raise TransferFailed(f"sending weights to {names} failed: {first}", errors, gone)


async def _opened(open_sender: OpenSender, plans: Sequence[GroupPlan]) -> Sender:
    """Open the sender; a sender that comes too late, when it is no longer waited for, is closed again."""

    def work() -> Sender:  # also resolves names
        shared = min(plans, key=lambda plan: is_loopback(plan.towards))  # all have to reach the address towards it
        return open_sender(replace(shared, num_workers=sum(plan.num_workers for plan in plans)))

    opening = in_thread(work)
    try:
        return await asyncio.shield(asyncio.wrap_future(opening))
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opened: Future[Sender]) -> None:
    if opened.exception() is None:
        opened.result().close()


def _calls(receivers: Sequence[Receiver], address: Mapping[str, Any]) -> dict[Receiver, TransferCalls]:
    """Tell each server which ranks are its own: those after the ranks of the servers before it."""
    calls, offset = {}, 1
    for receiver in receivers:
        calls[receiver] = receiver.calls({**address, "rank_offset": offset})
        offset += receiver.plan.num_workers
    return calls


class _Sending:
    """The sender at work, in threads that continue when they are no longer waited for."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._last: Future[Any] | None = None

    async def all(self, pieces: Sequence[Bucket]) -> SendReport:
        for number in range(len(pieces)):
            await self._do(partial(self._sender.send, number))
        report: SendReport = await self._do(self._sender.finish)
        return report

    async def last_error(self) -> BaseException | None:
        """Return the error of the piece of work that was begun last, if it failed. A server may have reported the same
        failure earlier."""
        if self._last is None:
            return None
        ended = asyncio.wrap_future(self._last)
        await asyncio.wait([ended])
        return ended.exception()  # asked of this future, which would otherwise report an error that nobody looked at

    async def _do(self, work: Callable[[], Any]) -> Any:
        self._last = in_thread(work)
        return await asyncio.wrap_future(self._last)


async def _receive(receiver: Receiver, calls: TransferCalls, pieces: Sequence[Bucket]) -> None:
    await receiver.post(*calls.meet)
    await receiver.post(*calls.begin)
    for number, bucket in enumerate(pieces, 1):
        await receiver.post(*calls.announce(bucket, number == len(pieces)))
    await receiver.post(*calls.finish)
    with suppress(EngineError):  # the group is of no use to anybody any more
        await receiver.post(*calls.leave)


async def _part(
    receivers: Sequence[Receiver], calls: Mapping[Receiver, TransferCalls], limit_s: float
) -> dict[Receiver, EngineError]:
    """Have all leave a group that has failed. Returns the members that did not, and why: a server that is stopped,
    hangs or is gone."""

    async def leave(receiver: Receiver) -> None:
        own = calls[receiver]
        late = f"{receiver.name} failed while it received weights, and does not answer {limit_s:g} s later"
        async with within(limit_s, late):
            for call in (own.cancel, own.leave):
                if call is not None:
                    with suppress(EngineError):  # there may be no session, or no group
                        await receiver.post(*call)
            await receiver.ping()

    ends = await asyncio.gather(*map(leave, receivers), return_exceptions=True)
    found = {}
    for receiver, end in zip(receivers, ends, strict=True):
        if isinstance(end, EngineError):
            found[receiver] = end
        elif end is not None:
            raise end
    return found


class GroupMember(Protocol):
    """An engine that can receive weights in a group with others."""

    @property
    def formats(self) -> Mapping[str, str]:
        """Return the number format of each tensor that it serves."""
        ...

    async def prepare(self, version: int, source: SentByHolder) -> Receiver: ...

    async def settle(self, version: int) -> None: ...


async def send_to_all(
    receivers: Sequence[Receiver], source: SentByHolder, formats: Mapping[str, str], config: ServerConfig
) -> SendReport:
    """Have the holder of weights send them to paused servers. Raises as ``send_weights``."""
    pieces = buckets(as_served(source.manifest.tensors, formats))
    return await send_weights(
        lambda plan: source.open_sender(plan, pieces),
        pieces,
        receivers,
        limit_s=config.load_timeout_s,
        part_s=config.control_timeout_s,
    )
