"""The ways of dividing a training step that this trainer supports: for planners, which import no torch.

The trainer is data parallel and shards weights, gradients and optimizer state over devices of one type.
"""

from __future__ import annotations


def unsupported(*, dp: int, tp: int, pp: int, sharded: bool) -> str | None:
    """Return why the trainer cannot divide its work like this; ``None`` if it can.

    Args:
        dp: number of data-parallel ranks.
        tp: number of devices that share each matrix (tensor parallel).
        pp: number of pipeline stages.
        sharded: whether weights, gradients and optimizer state are sharded over the ranks.

    Example: ``unsupported(dp=8, tp=1, pp=1, sharded=True)`` is ``None``; with ``tp=2`` it is ``"the trainer supports
    only data parallelism, not tensor parallel 2"``.
    """
    if tp > 1 or pp > 1:
        ways = " and ".join(f"{name} parallel {n}" for name, n in (("tensor", tp), ("pipeline", pp)) if n > 1)
        return f"the trainer supports only data parallelism, not {ways}"
    if dp > 1 and not sharded:
        return f"the trainer shards its optimizer state instead of keeping it whole on each of {dp} devices"
    return None
