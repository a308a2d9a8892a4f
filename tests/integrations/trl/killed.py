"""A run of TRL's trainer that is killed at named points, again and again, by a process that has imported all once.

``python -m tests.integrations.trl.killed MODEL FOLDER`` forks a child for each point, which trains, or goes on
training, until it gets there and kills itself with SIGKILL; the last child trains to the end. Each child writes down
which batch it was given, in ``FOLDER/given.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollover.batch import Batch
from rollover.integrations.trl.answers import Answers
from rollover.rollout.events import SegmentEnded, VersionPublished
from tests.integrations.trl.kit import WatchedTrainer, trainer

STEPS = 8
POINTS = ("decoding", "handed out", "stepped", "torn checkpoint", "rotated", "published")
"""In a run of one checkpoint per two steps, of which one is kept, each from where the point before left it:

while the first batch is decoded; when a batch is handed out and not trained; when it is trained and not saved; when a
checkpoint is half written; when the checkpoint before it is deleted and the journal does not know; when weights are
published and their batch is not complete.
"""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Victim(WatchedTrainer):
    """Dies at ``point`` of its own process."""

    point = ""
    folder = Path()

    def _look_at(self, output: Mapping[str, Any], answers: Answers, batch: Batch) -> None:
        super()._look_at(output, answers, batch)
        given = {
            "point": self.point,
            "step": batch.step,
            "groups": [group.group_id for group in batch.groups],
            "tokens": [list(t.token_ids) for t in batch.trajectories],
        }
        with (self.folder / "given.jsonl").open("a") as file:
            file.write(json.dumps(given) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.point == "handed out" and len(self.seen) == 2:
            kill()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.point == "stepped" and len(self.seen) == 2:
            kill()
        return loss

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        if self.point == "torn checkpoint":
            kill()
        super()._save_rng_state(*args, **kwargs)

    def _saved(self) -> None:
        if self.point == "rotated" and self.state.global_step >= 4:
            kill()
        super()._saved()


def train(model: Path, folder: Path, point: str) -> None:
    published, segments = 0, 0

    def observe(event: Any) -> None:
        nonlocal published, segments
        published += isinstance(event, VersionPublished)
        segments += isinstance(event, SegmentEnded)
        if point == "decoding" and segments == 7:
            kill()
        if point == "published" and published == 2 and isinstance(event, SegmentEnded):
            kill()

    Victim.point, Victim.folder = point, folder
    made = trainer(
        model,
        folder,
        made_by=Victim,
        observer=observe,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
    )
    made.train(resume_from_checkpoint=(folder / "out" / "_rollover").exists())


def main(model: Path, folder: Path) -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for point in (*POINTS, ""):
        pid = os.fork()
        if pid == 0:
            try:
                train(model, folder, point)
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        expected = signal.SIGKILL if point else 0
        if status != expected:
            print(f"the child of point {point!r} ended with status {status}, not {int(expected)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
