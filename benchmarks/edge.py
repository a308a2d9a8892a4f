"""An edge machine in a process of its own: the embedded engine, held back by the clock to the speed of a slow one.

An iteration over B sequences ends ``c0_s (1 + B / b0)`` after it began, the law by which ``rollover simulate`` counts
too, and a prefilled token takes its share of ``prefill_tokens_per_s``. What is computed is computed for real: tokens
and log-probs are those of the embedded engine. The rest of the time the thread sleeps, so that many such machines share
two cores with a trainer and do not feel each other, as long as the cores have room. Whether they had is counted.

What it keeps true: no iteration ends before its time; those that end later than it, by more than a tenth, are counted.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SLACK_S = 0.002
"""By so much an iteration may begin after the end of the last one and count as begun there: sleeping is not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMachine:
    """A machine of a swarm.

    Example: ``EdgeMachine(name="phone", tokens_per_s=25.0, b0=16.0, max_running=8, prefill_tokens_per_s=4000.0)`` takes
    40 ms for an iteration over next to nothing, and 60 ms over 8 sequences.
    """

    name: str
    tokens_per_s: float
    """Of a call that has the machine for itself."""
    b0: float
    """Sequences with which an iteration takes twice as long as with next to none."""
    max_running: int
    prefill_tokens_per_s: float

    @property
    def c0_s(self) -> float:
        return 1 / self.tokens_per_s

    def iteration_s(self, num_decoded: int, num_prefilled: int) -> float:
        decode_s = self.c0_s * (1 + num_decoded / self.b0) if num_decoded else 0.0
        return decode_s + num_prefilled / self.prefill_tokens_per_s

    @property
    def most_tokens_per_s(self) -> float:
        """With all its places taken."""
        return self.max_running / self.iteration_s(self.max_running, 0)


def hold_back(machine: EdgeMachine, report: Path) -> None:
    """From now on embedded engines that are opened in this process are as slow as ``machine``; ``report`` says in the
    end, and every few seconds, how well that went."""
    from rollover.engine.embedded import engine

    base = engine.EngineCore

    class EdgeCore(base):  # type: ignore[misc, valid-type]
        """Sleeps after each iteration for as long as it should have taken."""

        due_s = 0.0
        num_iterations = num_late = 0
        slept_s = due_sum_s = written_s = 0.0

        def step(self):  # type: ignore[no-untyped-def]
            now_s = time.monotonic()
            began_s = self.due_s if 0 <= now_s - self.due_s < SLACK_S else now_s
            before = self.stats()
            outputs = super().step()
            after = self.stats()
            took_s = machine.iteration_s(
                after.decoded_tokens - before.decoded_tokens, after.prefilled_tokens - before.prefilled_tokens
            )
            self.due_s = began_s + took_s
            left_s = self.due_s - time.monotonic()
            self.num_iterations += 1
            self.num_late += left_s < -0.1 * took_s
            self.due_sum_s += took_s
            if left_s > 0:
                self.slept_s += left_s
                time.sleep(left_s)
            if self.due_s - self.written_s > 2.0:
                self.written_s = self.due_s
                self.write()
            return outputs

        def write(self) -> None:
            found = {
                **asdict(machine),
                "iterations": self.num_iterations,
                "late": self.num_late,
                "slept_s": self.slept_s,
                "due_s": self.due_sum_s,
                "cpu_s": sum(os.times()[:2]),
            }
            partial = report.with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.replace(report)

    engine.EngineCore = EdgeCore  # type: ignore[misc]
