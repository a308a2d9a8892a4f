"""The supervised warm-up on several devices of one machine, with a process for each (``ranks``, ``rank``).

A warm-up that loses a rank has failed: it has no checkpoints, and the run starts it from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollover.trainer.leading import ForRanks, FromRanks, collective_timeout_s
from rollover.trainer.messages import RankTask
from rollover.trainer.packing import TrainingSample
from rollover.trainer.ranks import LocalLauncher
from rollover.trainer.setup import SFTSetup
from rollover.trainer.shares import write_index
from rollover.trainer.staging import Staging

_BATCH_BYTES = 2**28


class SFTRanks:
    """Leads the ranks, with the interface of ``SFTTrainer``.

    Args:
        timeout_s, logs: see ``LocalLauncher``.
        fallback: a folder for passing examples on when shared memory is too small for them.

    Example: ``SFTRanks(SFTSetup(config=SFTConfig(num_devices=2)), folder, ...).step(0, samples)``
    """

    def __init__(self, setup: SFTSetup, folder: Path, *, timeout_s: float, logs: Path | None, fallback: Path) -> None:
        launcher = LocalLauncher(setup.config, timeout_s=timeout_s, logs=logs)
        self._staging = Staging(_BATCH_BYTES, fallback=fallback)
        try:
            task = RankTask(
                rank=0,
                size=len(launcher.devices),
                device=launcher.devices[0],
                num_threads=launcher.num_threads,
                folder=self._staging.meeting(),
                timeout_s=collective_timeout_s(timeout_s),
                setup=setup,
                model=folder,
                resume_from=None,
            )
            self._ranks = launcher.launch(task)
        except BaseException:
            self._staging.close()
            raise

    def step(self, step: int, samples: Sequence[TrainingSample]) -> tuple[float, float]:
        """Implement ``SFTTrainer.step``."""
        batch = ForRanks((step, list(samples)))
        loss, grad_norm = self._ranks.ask(f"step {step} of the warm-up", "step", batch=batch)[0]
        return loss, grad_norm

    def save(self, folder: Path) -> None:
        """Let each rank write its part of the model."""
        self._ranks.ask("writing the model", "save", folder=FromRanks(folder))
        write_index(folder)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.end()
        self._staging.close()
