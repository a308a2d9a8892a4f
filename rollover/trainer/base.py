"""The ``Trainer`` protocol: what a run asks of training, whatever devices it takes. ``local`` implements it on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollover.types import Batch, TrainedStep
from rollover.weights.base import WeightSource
from rollover.weights.sending import SentByHolder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Trainer(Protocol):
    """Weights of version ``v`` and a batch become weights of version ``v + 1``.

    Example: a trainer at version 6 that is given ``step(batch)`` with ``batch.step == 6`` is at version 7, and
    ``weight_source().manifest.version`` is 7.
    """

    @property
    def version(self) -> int:
        """Batches trained so far: the ``policy_version`` of its weights."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        ...

    def step(self, batch: Batch) -> TrainedStep:
        """Train one batch and count it. A batch in which no token has a gradient is counted without an update.

        Raises ``RolloverError`` when the batch cannot be trained; then go on from the last checkpoint.
        """
        ...

    def skip(self, batch: Batch) -> TrainedStep:
        """Count one batch without training it: the next version has the weights and the optimizer state of this one."""
        ...

    def weight_source(self) -> WeightSource:
        """Return the weights of ``version``, to be published. The next step changes them in place."""
        ...

    def weights_to_send(self) -> SentByHolder | None:
        """Return the same, for engines to which they are sent by whoever holds them; ``None`` where adapters are
        published alone. They can be sent until the next step begins, which waits while they are."""
        ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the logits ``[num_prompts, vocab_size]`` of the token after each prompt, as ``step`` would."""
        ...

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint from which training goes on bit for bit; ``extra`` is JSON kept in its manifest.

        Raises ``ResourceError`` when the disk is full; whatever stood there before is then intact.
        """
        ...

    def rest(self) -> None:
        """Give back what only a step takes of the device: its gradients and what the allocator keeps. Weights and the
        optimizer's moments stay."""
        ...

    def close(self) -> None:
        """End what it has started. Nothing else may be asked of it then."""
        ...
