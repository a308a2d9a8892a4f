"""The weights of a sharded trainer, which its ranks send to engines; they do not pass through this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollover.trainer.sending import SendFailed
from rollover.weights.base import Manifest, TensorSpec, WeightSource
from rollover.weights.buckets import Bucket
from rollover.weights.groups import GroupPlan
from rollover.weights.sending import Lease, Sender, SenderLost, SendReport

if TYPE_CHECKING:
    from torch import Tensor

    from rollover.trainer.leading import LedRanks

Ask = Callable[["LedRanks | None", str, Any], "tuple[LedRanks, Any]"]
"""Asks ranks to perform a step of sending; see ``FleetTrainer._send``."""


class FleetWeights:
    """Weights that the ranks of a trainer hold, each a part. Implements ``SentByHolder``.

    Args:
        specs: of all tensors.
        read: makes them readable in this process, for callers of ``tensors``.
        current: returns the version of the trainer.

    Example: ``trainer.weights_to_send()`` of a trainer at version 7 sends version 7.
    """

    folder = None

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        lease: Lease,
        ask: Ask,
        read: Callable[[], WeightSource],
        *,
        current: Callable[[], int],
    ) -> None:
        self.manifest = Manifest(version=current(), tensors=tuple(specs))
        self._lease = lease
        self._ask = ask
        self._read = read
        self._current = current

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._read().tensors(names)

    def open_sender(self, plan: GroupPlan, buckets: Sequence[Bucket]) -> Sender:
        """Implement ``SentByHolder.open_sender``."""
        give_back = self._lease.lend(self.manifest.version, self._current, timeout_s=plan.timeout_s)
        try:
            return FleetSender(self._ask, plan, buckets, give_back)
        except BaseException:
            give_back()
            raise


class FleetSender:
    """Leads the ranks through the buckets. Implements ``Sender``.

    Example: ``FleetSender(trainer._send, plan, pieces, give_back).address`` is an address of the first rank.
    """

    def __init__(self, ask: Ask, plan: GroupPlan, buckets: Sequence[Bucket], on_close: Callable[[], None]) -> None:
        self._ask = ask
        self._buckets = buckets
        self._ranks: LedRanks | None = None
        self._on_close: Callable[[], None] | None = on_close
        self.address: Mapping[str, Any] = self._answer("open", plan)

    def send(self, number: int) -> None:
        self._answer("send", self._buckets[number])

    def finish(self) -> SendReport:
        report = self._answer("finish")
        assert isinstance(report, SendReport)
        return report

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            with suppress(SenderLost):  # the ranks have ended, and the group with them
                self._answer("close")
        finally:
            if on_close is not None:
                on_close()

    def _answer(self, do: str, what: Any = None) -> Any:
        self._ranks, answer = self._ask(self._ranks, do, what)
        if isinstance(answer, SendFailed):
            raise answer.error()
        return answer
