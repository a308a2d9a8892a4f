"""The supervised warm-up in processes of its own (``leading``, ``rank``): one for each device, here or on a cluster.

A warm-up that loses a rank begins again: it has no checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollover.trainer.leading import ForRanks, FromRanks, RankLauncher, collective_timeout_s
from rollover.trainer.messages import RankTask
from rollover.trainer.packing import TrainingSample
from rollover.trainer.setup import SFTSetup
from rollover.trainer.shares import write_index
from rollover.trainer.staging import Staging

_BATCH_BYTES = 2**28


class SFTRanks:
    """Leads the ranks, with the interface of ``SFTTrainer``.

    Args:
        launcher: starts them.
        timeout_s: ranks that do nothing for so long are given up.
        fallback: a folder for passing examples on when shared memory is too small for them.

    Example: ``SFTRanks(SFTSetup(config=SFTConfig(num_devices=2)), folder, launcher, ...).step(0, samples)``
    """

    def __init__(
        self, setup: SFTSetup, folder: Path, launcher: RankLauncher, *, timeout_s: float, fallback: Path
    ) -> None:
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
