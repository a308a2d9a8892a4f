"""The ``Trainer`` protocol: the interface of training to a run, whatever devices it uses. ``local`` implements it on
one, ``fleet`` on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollover.batch import Batch, TrainedStep
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
        """Return the number of batches trained so far, which is the ``policy_version`` of the weights."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output matrix."""
        ...

    def step(self, batch: Batch) -> TrainedStep:
        """Train one batch and count it. A batch in which no token has a gradient is counted without an update. Raises
        ``RolloverError`` when the batch cannot be trained; then continue from the last checkpoint."""
        ...

    def skip(self, batch: Batch) -> TrainedStep:
        """Count one batch without training it: the next version has the weights and the optimizer state of this one."""
        ...

    def weight_source(self) -> WeightSource:
        """Return the weights of ``version``, to be published. The next step changes them in place."""
        ...

    def weights_to_send(self) -> SentByHolder | None:
        """Return the same weights, for engines to which the processes that hold them send them; ``None`` if only
        adapters are published. They can be sent until the next step begins, which waits while they are."""
        ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the logits ``[num_prompts, vocab_size]`` of the token after each prompt, as ``step`` would."""
        ...

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint from which training continues bit for bit; ``extra`` is JSON kept in its manifest. Raises
        ``ResourceError`` when the disk is full; an earlier folder in its place is then intact."""
        ...

    def rest(self) -> None:
        """Release the device memory that only a step needs: its gradients and the allocator's cache. Weights and the
        optimizer's moments stay."""
        ...

    def close(self) -> None:
        """End everything that it has started. It must not be used afterwards."""
        ...
