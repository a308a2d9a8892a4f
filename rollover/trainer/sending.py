"""The ranks of a sharded trainer send their weights into a process group, straight from the memory in which they are
trained.

The first rank is rank 0 of the group; all take part in gathering each tensor, and all but the first free it at once. So
no rank has more than two buckets, however large the model. No rank waits for a server inside a collective: a bucket is
gathered by all, and only then does the first rank wait until the previous bucket has arrived. The failure of a server
is an answer like any other, and the ranks keep running.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from rollover.errors import EngineError, EngineTimeout
from rollover.trainer.world import World
from rollover.weights.buckets import Bucket, cast
from rollover.weights.groups import GroupPlan, open_group
from rollover.weights.sending import BucketQueue, SendReport, gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A rank's answer that the group has failed, though no rank has."""

    message: str
    is_late: bool

    def error(self) -> EngineError:
        return (EngineTimeout if self.is_late else EngineError)(self.message)


class RankSender:
    """One rank's part in sending the weights of one version.

    Args:
        weights: the weights that engines serve, by Hugging Face name, sharded over the ranks of ``world``.
        device: the rank's own, by PyTorch's name.
    """

    def __init__(self, world: World, weights: Mapping[str, Tensor], *, device: str) -> None:
        self._world = world
        self._weights = weights
        self._device = device
        self._plan: GroupPlan | None = None
        self._queue: BucketQueue | None = None

    def open(self, plan: GroupPlan) -> Mapping[str, Any] | SendFailed | None:
        """Return where the group meets; only the first rank knows it."""
        self.close()
        self._plan = plan = replace(plan, device=self._device)
        if self._world.rank:
            return None
        try:
            group = open_group(plan)
        except EngineError as e:
            return _failed(e)
        self._queue = BucketQueue(group, plan, on_wait=self._world.tick)
        return dict(group.address)

    def send(self, bucket: Bucket) -> SendFailed | None:
        """Gather a bucket; the first rank sends it as soon as the previous one has arrived."""
        assert self._plan is not None, "nothing was opened"
        if self._queue is None:
            for _ in self._whole(bucket):
                pass
            return None
        tensors = gathered(bucket, self._whole(bucket), self._plan)
        try:
            self._queue.put(tensors)
        except EngineError as e:
            return _failed(e)
        return None

    def finish(self) -> SendReport | SendFailed | None:
        """Return the measurements of the transfer once the last bucket has arrived."""
        try:
            return self._queue.drain() if self._queue is not None else None
        except EngineError as e:
            return _failed(e)

    def close(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()

    def _whole(self, bucket: Bucket) -> Iterator[Tensor]:
        for spec in bucket.tensors:
            yield _whole(cast(self._weights, spec))
            self._world.tick()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _failed(error: EngineError) -> SendFailed:
    return SendFailed(message=str(error), is_late=isinstance(error, EngineTimeout))
