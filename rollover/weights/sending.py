"""Weights are sent into a process group by the process that holds them, or by the first of several.

Invariants: a sender holds two buckets at most, one on its way and the next; every wait has a
deadline, the deadline of the whole transfer; a call that hangs is left to a thread of its own, for which nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import Manifest, TensorSpec, WeightSource
from rollover.weights.buckets import Bucket, cast, flattened
from rollover.weights.groups import GroupPlan, ProcessGroup, open_group

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_TICK_S = 0.2
_MEETING_SHARE = 1 / 3
"""Share of the deadline of a transfer within which all must have joined its group. gloo waits for a peer that is killed
while it connects for five times as long as it is told to, and cannot be interrupted."""
_CLOSE_S = 60.0
"""The time that closing a sender may take after it has failed at its deadline."""


class SenderLost(EngineError):
    """The sender of weights has failed, and no receiver has. Sending them again may work."""


class WeightsGone(EngineError):
    """The trainer has moved on: no process has the weights of this version any more, and later ones follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Measurements of sending one version of the weights."""

    num_bytes: int
    peak_bytes: int
    """The largest size of the whole tensors that the sender held at a time."""


class Sender(Protocol):
    """Sends the buckets of one version in their order. All methods block; ``close`` may be called at any time."""

    @property
    def address(self) -> Mapping[str, Any]:
        """Return where the group meets, for the workers; the sender joins by itself."""
        ...

    def send(self, number: int) -> None:
        """Gather a bucket and send it. Returns as soon as the previous one has arrived.

        Raises ``EngineError`` when the group fails, ``SenderLost`` when the sender does.
        """
        ...

    def finish(self) -> SendReport:
        """Return when the last bucket has arrived."""
        ...

    def close(self) -> None:
        """Give up the group, and let the weights change again."""
        ...


@runtime_checkable
class SentByHolder(WeightSource, Protocol):
    """Weights that are sent by the processes that hold them: no folder is written, and no process needs to have all of
    them."""

    def open_sender(self, plan: GroupPlan, buckets: Sequence[Bucket]) -> Sender:
        """Open our end of a group; the weights do not change before the sender is closed. Blocks.

        Raises ``WeightsGone`` when they are being changed or have changed, ``SenderLost`` when their holder fails.
        """
        ...


class BucketQueue:
    """Rank 0 of a group: joins it, and sends the tensors that it is given in threads of its own.

    Args:
        on_wait: called at least five times a second while it waits, to show that this process is alive.
    """

    def __init__(self, group: ProcessGroup, plan: GroupPlan, *, on_wait: Callable[[], None] = lambda: None) -> None:
        self._group = group
        self._timeout_s = plan.timeout_s
        self._begun_s = time.monotonic()
        self._on_wait = on_wait
        self._has_joined = self._is_closed = False
        self._num_bytes = self._on_its_way_bytes = self.peak_bytes = 0
        self._work = in_thread(group.join)

    def put(self, tensors: list[Tensor]) -> None:
        """Send these tensors next. Returns as soon as the previous ones have arrived."""
        own_bytes = sum(tensor.nbytes for tensor in tensors)
        self.peak_bytes = max(self.peak_bytes, self._on_its_way_bytes + own_bytes)
        self._wait()
        self._has_joined = True
        self._on_its_way_bytes = own_bytes
        self._num_bytes += own_bytes
        self._work = in_thread(partial(_broadcast, self._group, tensors))

    def drain(self) -> SendReport:
        self._wait()
        self._on_its_way_bytes = 0
        return SendReport(num_bytes=self._num_bytes, peak_bytes=self.peak_bytes)

    def close(self) -> None:
        """Give the group up. Whoever waits here fails at once, even where the group goes on waiting for others."""
        self._is_closed = True
        self._group.close()

    def _wait(self) -> None:
        is_meeting = not (self._has_joined or self._work.done())
        limit_s = self._timeout_s * (_MEETING_SHARE if is_meeting else 1.0)
        while (left_s := self._begun_s + limit_s - time.monotonic()) > 0:
            was_closed = self._is_closed
            self._on_wait()
            try:
                return self._work.result(min(left_s, _TICK_S))
            except NotYet:
                if self._work.done():  # it was a deadline of the group itself
                    break
                if was_closed:  # and the group has had a tick to say why it fails
                    raise EngineError("the group through which weights were sent was closed") from None
            except EngineError:
                raise
            except (RuntimeError, ValueError) as e:  # torch.distributed raises nothing more special
                reason = (str(e).splitlines() or [""])[0]
                raise EngineError(f"the group through which weights were sent has failed: {reason}") from e
        if is_meeting:
            raise EngineTimeout(
                f"the servers have not all joined the group through which weights are sent within {limit_s:g} s,"
                " which is a third of engine.load_timeout_s"
            )
        raise EngineTimeout(f"weights were not received within {self._timeout_s:g} s (engine.load_timeout_s)")


def _broadcast(group: ProcessGroup, tensors: list[Tensor]) -> None:
    while tensors:  # each is freed as soon as it has gone
        group.broadcast(tensors.pop(0))


class OwnSender:
    """Sends weights that this process can read, one tensor at a time. Implements ``Sender``.

    Args:
        take: returns the tensor that is asked for.
        on_close: called at the end.
    """

    def __init__(
        self,
        plan: GroupPlan,
        buckets: Sequence[Bucket],
        take: Callable[[TensorSpec], Tensor],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._buckets = buckets
        self._take = take
        self._on_close = on_close
        self._group = open_group(plan)
        self.address: Mapping[str, Any] = self._group.address
        self._queue = BucketQueue(self._group, plan)

    def send(self, number: int) -> None:
        bucket = self._buckets[number]
        self._queue.put(gathered(bucket, map(self._take, bucket.tensors), self._plan))

    def finish(self) -> SendReport:
        return self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        self._on_close()


def gathered(bucket: Bucket, tensors: Iterable[Tensor], plan: GroupPlan) -> list[Tensor]:
    """Return the tensors of a bucket in the form in which they are sent."""
    if plan.is_flat:
        return [flattened(tensors, bucket.num_bytes)]
    return list(tensors)


class Lease:
    """Keeps weights from changing while they are sent, and from being sent while they change."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._loans: dict[int, tuple[int, float]] = {}
        """Version and deadline of each loan, by its number."""
        self._num_lent = 0
        self._is_changing = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep the weights for changes within this context. Waits until none are lent; requests for them are refused.

        Raises ``EngineTimeout`` when they are not returned by the deadline of their transfer.
        """
        self._is_changing = True
        try:
            with self._state:
                last_s = max((deadline_s for _, deadline_s in self._loans.values()), default=0.0)
                left_s = max(0.0, last_s - time.monotonic()) + _CLOSE_S
                if not self._state.wait_for(lambda: not self._loans, left_s):
                    version = next(iter(self._loans.values()))[0]
                    raise EngineTimeout(
                        f"weights of version {version} have not been given back by whoever sends them, {_CLOSE_S:g} s"
                        " after their transfer should have ended (engine.load_timeout_s): resume the run"
                    )
            yield
        finally:
            self._is_changing = False

    def lend(self, version: int, current: Callable[[], int], *, timeout_s: float) -> Callable[[], None]:
        """Return a function that gives the weights back, which must be called within ``timeout_s``. Raises
        ``WeightsGone`` when they are changing, or no longer belong to ``version``."""
        with self._state:
            if self._is_changing or current() != version:
                raise WeightsGone(f"weights of version {version} can no longer be sent: later ones follow")
            self._num_lent += 1
            self._loans[number := self._num_lent] = version, time.monotonic() + timeout_s
        return partial(self._give_back, number)

    def _give_back(self, number: int) -> None:
        with self._state:
            self._loans.pop(number, None)
            self._state.notify_all()


class HeldWeights:
    """Weights that their holder lends for as long as they are sent. Implements ``SentByHolder``.

    Args:
        read: makes them readable in this process, for callers of ``tensors``.
        send: opens a sender, given a plan, the buckets and what gives the weights back.
        current: returns the version that their holder is at.
    """

    folder = None

    def __init__(
        self,
        manifest: Manifest,
        read: Callable[[], WeightSource],
        lease: Lease,
        send: Callable[[GroupPlan, Sequence[Bucket], Callable[[], None]], Sender],
        *,
        current: Callable[[], int],
    ) -> None:
        self.manifest, self._read, self._lease, self._send, self._current = manifest, read, lease, send, current

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._read().tensors(names)

    def open_sender(self, plan: GroupPlan, buckets: Sequence[Bucket]) -> Sender:
        """Implement ``SentByHolder.open_sender``."""
        give_back = self._lease.lend(self.manifest.version, self._current, timeout_s=plan.timeout_s)
        try:
            return self._send(plan, buckets, give_back)
        except BaseException:
            give_back()
            raise


def own_weights(
    source: WeightSource, weights: Mapping[str, Tensor], lease: Lease, *, current: Callable[[], int], device: str
) -> HeldWeights:
    """Return weights in this process's memory, for sending.

    Args:
        source: the same weights, for readers.
        weights: by Hugging Face name; tensors to send are read from here.
        device: of the weights, by PyTorch's name.
    """

    def send(plan: GroupPlan, buckets: Sequence[Bucket], give_back: Callable[[], None]) -> Sender:
        return OwnSender(replace(plan, device=device), buckets, partial(cast, weights), give_back)

    return HeldWeights(source.manifest, lambda: source, lease, send, current=current)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a daemon thread, so that a call that hangs does not keep this process from ending."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # a waiting caller may leave while the thread continues

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return done
