"""Live progress on the terminal, and plain lines where there is none: means over the steps since the last line.

It may be called at any rate and draws at most ``_REFRESH_HZ`` times a second, so its cost is negligible. It only
displays; nothing depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from rollover.privacy import redacted_text
from rollover.report.config import Mode
from rollover.report.metrics import standard_error_of
from rollover.report.throughput import TRAINED, means

_REFRESH_HZ = 8.0


class Progress:
    """Bars for warm-up, rollout, training and evaluation; one plain line per N steps without a terminal."""

    def __init__(
        self,
        *,
        total_steps: int,
        mode: Mode = "auto",
        plain_every_steps: int = 10,
        console: Console | None = None,
        now_s: Callable[[], float] = time.monotonic,
        redact: Callable[[str], str] = redacted_text,
    ) -> None:
        self.total_steps = total_steps
        self.console = console if console is not None else Console()
        self._mode: Mode = mode if mode != "auto" else ("bars" if self.console.is_terminal else "plain")
        self._every = plain_every_steps
        self._now_s = now_s
        self._redact = redact
        self._drawn_s = -float("inf")
        self._started_s = now_s()
        self._recent: list[Mapping[str, float]] = []
        """Steps since the last plain line; with bars, the last few."""
        self._rollout_from: tuple[float, int] | None = None
        """Time and decoded tokens when this step's rollout began."""
        self._bars = _bars(self.console, now_s)
        self._tasks: dict[str, TaskID] = {}

    # -- what the loop reports ------------------------------------------------------------------------------

    def warmup(self, step: int, total: int, loss: float) -> None:
        """Show that ``step`` of ``total`` supervised steps are done."""
        if self._mode == "plain" and (step % max(1, total // 10) == 0 or step == total):
            self._line(f"warm-up {step}/{total}  loss {loss:.3f}")
        self._update("warm-up", step, total, f"loss {loss:.3f}")
        if step == total:
            self._finish("warm-up")

    def rollout(self, ready: int, needed: int, running: int, parked: int, decoded_tokens: int) -> None:
        """Show that ``ready`` of ``needed`` groups are complete; ``decoded_tokens`` counts over the whole run."""
        now = self._now_s()
        if self._rollout_from is None:
            self._rollout_from = (now, decoded_tokens)
        if self._mode != "bars" or now - self._drawn_s < 1 / _REFRESH_HZ:
            return  # it is called after every event
        since_s, before = self._rollout_from
        rate = (decoded_tokens - before) / (now - since_s) if now > since_s else 0.0
        text = f"{running} running · {parked} parked · {rate:,.0f} tok/s"
        self._update("rollout", min(ready, needed), needed, text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show that one training step is done. ``metrics`` is the row that was logged. What is shown are means since
        the last line, or over as many steps: where several batches are trained from one round, a single step is fast or
        slow, and its answers long or short, by its place among them."""
        self._rollout_from = None
        done = 1 + (int(self._bars.tasks[self._tasks["train"]].completed) if "train" in self._tasks else 0)
        self._recent = [*self._recent, metrics][-self._every :]
        late = sum(step.get("reward/late", 0.0) for step in self._recent)
        text = "  ".join([*_step_parts(means(self._recent)), *([f"{late:.0f} rewards late"] if late else [])])
        if self._mode == "plain" and (done % self._every == 0 or done in (1, self.total_steps)):
            self._line(f"step {done}/{self.total_steps}  {text}")
            self._recent = []
        self._update("train", done, self.total_steps, text, draw=True)

    def resumed(self, step: int) -> None:
        """Show that the run resumes at ``step``."""
        self._recent = []
        self._update("train", step, self.total_steps, f"resumed at step {step}", draw=True)
        if self._mode == "plain":
            self._line(f"resumed at step {step}/{self.total_steps}")

    def evaluating(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` evaluation samples are decoded."""
        self._update("eval", done, total, "")
        if done >= total:
            self._finish("eval")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the result of an evaluation before training step ``step``."""
        self.message(f"eval at step {step}  " + "  ".join(_eval_parts(metrics)))

    def result(self, text: str) -> None:
        """Print a line that answers a request, literally; it is shown in every mode."""
        self._print(text)

    def message(self, text: str) -> None:
        """Print a line above the bars, literally."""
        if self._mode != "off":
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(self._redact(text), markup=False, highlight=False, soft_wrap=True)

    # -- drawing --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._mode == "bars":
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._mode == "bars":
            self._bars.stop()

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(self._now_s() - self._started_s), 60)
        self.message(f"[{minutes // 60}:{minutes % 60:02d}:{seconds:02d}] {text}")

    def _update(self, name: str, done: int, total: int, text: str, *, draw: bool = False) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, text="")
        self._bars.update(self._tasks[name], completed=done, total=total, text=text)
        now = self._now_s()
        if self._mode == "bars" and (draw or now - self._drawn_s >= 1 / _REFRESH_HZ):
            self._drawn_s = now
            self._bars.refresh()

    def _finish(self, name: str) -> None:
        """Take a bar down; the next phase gets its place."""
        self._bars.update(self._tasks[name], visible=False)
        self._bars.stop_task(self._tasks[name])
        del self._tasks[name]


class _TimeLeft(TimeRemainingColumn):
    """Time to the end of a phase; a rollout starts over with every step, so it has none."""

    def render(self, task: Task) -> Text:
        return Text("") if task.description == "rollout" else super().render(task)


def _bars(console: Console, now_s: Callable[[], float]) -> Bars:
    """Draw the bars. Where the terminal is narrow, they are shorter and the text at the end is cut, never a count or a
    time."""
    whole = Column(no_wrap=True)
    rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Bars(
        TextColumn("[bold]{task.description:>8}", table_column=whole),
        BarColumn(bar_width=max(8, min(24, console.width // 10))),
        MofNCompleteColumn(table_column=whole),
        _TimeLeft(compact=True, table_column=whole),
        TextColumn("{task.fields[text]}", markup=False, table_column=rest),
        console=console,
        auto_refresh=False,
        expand=True,
        get_time=now_s,
        speed_estimate_period=math.inf,  # of the last thousand steps, however long they take
    )


def _step_parts(metrics: Mapping[str, float]) -> list[str]:
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("staleness/mean", "lag {:.2f}"),
        (TRAINED.name, "{:,.0f} tok/s trained"),
        ("loss", "loss {:.3f}"),
    )
    return [text.format(metrics[name]) for name, text in shown if math.isfinite(metrics.get(name, math.nan))]


def _eval_parts(metrics: Mapping[str, float]) -> list[str]:
    """List ``accuracy`` first, then its parts by dataset, then pass@k, and how many samples were scored."""
    errors = {standard_error_of(name) for name in metrics}
    parts = []
    for name, value in metrics.items():
        if name.startswith(("accuracy", "pass@")) and name not in errors:
            se = metrics.get(standard_error_of(name))
            parts.append(f"{name} {value:.3f}" + (f" ± {se:.3f}" if se is not None else ""))
    if (samples := metrics.get("eval/samples")) is not None:
        parts.append(f"{metrics['eval/scored']:.0f} of {samples:.0f} scored")
    if late := metrics.get("eval/late"):
        parts.append(f"{late:.0f} late")
    return parts
