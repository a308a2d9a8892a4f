"""Weights sent from this process into a server's memory, tensor by tensor; the same flow for every kind of server.

What it keeps true: a group lives for one update, so a server that has been started anew, or that failed in the middle,
needs no special case; the server's answer and our share are waited for together, and when one of the two fails nobody
waits for the other; a session and a group that were begun are ended, whatever happens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.engine.servers.background import within
from rollover.engine.servers.process_groups import ProcessGroup
from rollover.errors import EngineError
from rollover.hf.weights import TensorInfo, read_weight_infos
from rollover.weights.sources import FolderWeights

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 1 << 30
"""Announced to a server, and held by it, at a time."""

Call = tuple[str, Any]
"""The path and the body of a POST."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Weights that are sent in one go, in the order of ``infos``."""

    folder: Path
    infos: Mapping[str, TensorInfo]

    def described(self, dtypes: str) -> dict[str, Any]:
        """Describe the bucket as servers are told of it; ``dtypes`` is their name for the number formats."""
        infos = self.infos.values()
        return {
            "names": list(self.infos),
            dtypes: [info.dtype for info in infos],
            "shapes": [list(info.shape) for info in infos],
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return FolderWeights(0, self.folder).tensors(self.infos)


def buckets(folder: Path, *, limit_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """All weights of a folder, in pieces of ``limit_bytes`` or a single tensor."""
    pieces: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in read_weight_infos(folder).items():
        if pieces[-1] and size + info.num_bytes > limit_bytes:
            pieces.append({})
            size = 0
        pieces[-1][name] = info
        size += info.num_bytes
    return [Bucket(folder=folder, infos=infos) for infos in pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCalls:
    """The calls by which one kind of server takes weights, in the order in which they are made.

    Example: vLLM's ``begin`` is ``("/start_weight_update", None)``, SGLang's ``("/begin_weight_update", {})``.
    """

    meet: Call
    """Join the group; answered when all have joined."""
    begin: Call
    announce: Callable[[Bucket, bool], Call]
    """Receive the tensors of a bucket, which is the last one where the flag says so."""
    finish: Call
    cancel: Call | None = None
    """End a session that has failed."""
    leave: Call
    """Give up the group."""


async def send_weights(
    buckets: list[Bucket],
    calls: TransferCalls,
    group: ProcessGroup,
    post: Callable[[str, Any], Awaitable[None]],
    *,
    server: object,
    limit_s: float,
) -> None:
    """Replace the weights of a paused server; ``post`` makes one call and raises ``EngineError`` when it is refused.

    Raises ``EngineError``; the server's weights are then neither the old nor the new ones.
    """
    both = partial(together, limit_s=limit_s)
    try:
        await both(post(*calls.meet), group.join, what=f"meeting {server}")
        try:
            await post(*calls.begin)
            for number, bucket in enumerate(buckets, 1):
                answer = post(*calls.announce(bucket, number == len(buckets)))
                await both(answer, partial(_broadcast, group, bucket), what=f"sending weights to {server}")
            await post(*calls.finish)
        except EngineError:
            if calls.cancel is not None:
                with suppress(EngineError):  # there may be no session
                    await post(*calls.cancel)
            raise
        finally:
            with suppress(EngineError):  # the group is of no use to anybody any more
                await post(*calls.leave)
    finally:
        group.close()


def _broadcast(group: ProcessGroup, bucket: Bucket) -> None:
    for _, tensor in bucket.tensors():
        group.broadcast(tensor)


async def together(answer: Awaitable[Any], share: Callable[[], None], *, limit_s: float, what: str) -> Any:
    """Return the server's answer to a call during which ``share``, which blocks, does our part of it.

    Raises ``EngineError`` when either fails, ``EngineTimeout`` after ``limit_s``. Our part is then left to its own
    deadline: what it waits for will not come, and the group is not used again.
    """
    asked = asyncio.ensure_future(answer)
    ours = _in_thread(share)
    try:
        async with within(limit_s, f"{what} took longer than {limit_s:g} s (engine.load_timeout_s)"):
            await asyncio.wait([asked, ours], return_when=asyncio.FIRST_EXCEPTION)
            return (await asyncio.gather(asked, ours))[0]
    except EngineError:
        raise
    except RuntimeError as e:  # torch.distributed raises nothing more special
        raise EngineError(f"{what} failed: {e}") from e
    finally:
        asked.cancel()
        ours.cancel()
        await asyncio.gather(asked, ours, return_exceptions=True)


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Do it in a daemon thread: one that hangs must not keep this process from ending."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # whoever waits for it may leave, and the thread go on

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return asyncio.wrap_future(done)
