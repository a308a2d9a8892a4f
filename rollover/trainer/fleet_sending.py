"""The sender of a sharded trainer: its ranks send the weights to engines; they do not pass through this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollover.trainer.sending import SendFailed
from rollover.weights.buckets import Bucket
from rollover.weights.groups import GroupPlan
from rollover.weights.sending import SenderLost, SendReport

if TYPE_CHECKING:
    from rollover.trainer.leading import LedRanks

Ask = Callable[["LedRanks | None", str, Any], "tuple[LedRanks, Any]"]
"""Asks ranks to perform a step of sending; see ``FleetTrainer._send``."""


class FleetSender:
    """Leads the ranks through the buckets. Implements ``Sender``.

    Example: ``FleetSender(trainer._send, plan, pieces, give_back).address`` is an address of the first rank.
    """

    def __init__(self, ask: Ask, plan: GroupPlan, buckets: Sequence[Bucket], on_close: Callable[[], None]) -> None:
        self._ask = ask
        self._buckets = buckets
        self._ranks: LedRanks | None = None
        self._on_close = on_close
        self.address: Mapping[str, Any] = self._answer("open", plan)

    def send(self, number: int) -> None:
        self._answer("send", self._buckets[number])

    def finish(self) -> SendReport:
        report = self._answer("finish")
        assert isinstance(report, SendReport)
        return report

    def close(self) -> None:
        try:
            with suppress(SenderLost):  # the ranks have ended, and the group with them
                self._answer("close")
        finally:
            self._on_close()

    def _answer(self, do: str, what: Any = None) -> Any:
        self._ranks, answer = self._ask(self._ranks, do, what)
        if isinstance(answer, SendFailed):
            raise answer.error()
        return answer
