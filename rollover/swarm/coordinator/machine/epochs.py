"""Starts of a run: what a worker holds from before may come from weights that are not those of the same number now.

A run that starts again goes on from a checkpoint of version *r*. Versions up to *r* are what they were; those above are
made anew, from other batches, and a worker may have tokens of the first ones.
"""

from __future__ import annotations

from rollover.swarm.wire.messages import Head, Hello


def holds_foreign_tokens(hello: Hello, run_epoch: int, first_version: int, head: Head) -> bool:
    """Return whether tokens that a worker offers may come from weights that this run does not have.

    A worker that was with the start before this one has let go of what was foreign then; so only versions above
    ``first_version``, from which this start went on, are. Of one that has missed a start nothing is known.

    Example: the run went on from version 5 in epoch 2. A worker of epoch 1 that has served 5 may hand over its tokens,
    one that has served 6 may not.
    """
    newest = max((served.version for served in hello.served), default=-1)
    if hello.run_epoch == run_epoch:
        return newest > head.version
    return hello.run_epoch != run_epoch - 1 or newest > first_version
