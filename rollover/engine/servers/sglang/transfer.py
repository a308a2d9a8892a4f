"""Weights into an SGLang server through a process group, over NCCL or gloo.

What is peculiar to it: weights are taken between ``/begin_weight_update`` and ``/end_weight_update`` only, and a
session that was left open refuses the next one; a group and a session are therefore closed whatever happens. The
version and the flushed cache go with the last piece: until then the server calls its weights by their old name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollover.engine.servers.broadcast import Bucket, ProcessGroup, buckets, together
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.sglang.answers import SGLangServerInfo, UpdateOutcome
from rollover.errors import EngineError


async def send_weights(
    client: HTTPClient,
    folder: Path,
    label: str,
    *,
    open_group: Callable[[int], ProcessGroup],
    flush_cache: bool,
    limit_s: float,
) -> None:
    """Replace the weights of a paused server by those in ``folder``. ``open_group`` is given the number of its workers.

    Raises ``EngineError``; the server's weights are then neither the old nor the new ones.
    """
    settings = await client.ask(SGLangServerInfo, "GET", "/server_info")
    if settings.dp_size != 1 or settings.pp_size != 1:
        raise EngineError(
            f"{client} is data or pipeline parallel and takes weights from folders only: set engine.weight_transfer to"
            " 'folder'"
        )

    async def ask(path: str, body: Any) -> None:
        answer = await client.ask(UpdateOutcome, "POST", path, body=body, timeout_s=limit_s)
        if not answer.success:
            raise EngineError(f"{client} refused POST {path}: {answer.message or 'no reason given'}")

    group = await asyncio.to_thread(open_group, settings.tp_size)
    name = {"group_name": group.address["group_name"]}
    run = partial(together, limit_s=limit_s)
    try:
        await run(ask("/init_weights_update_group", dict(group.address)), group.join, what=f"meeting {client}")
        try:
            await ask("/begin_weight_update", {})
            pieces = buckets(folder)
            for piece in pieces:
                last = {"weight_version": label, "flush_cache": flush_cache} if piece is pieces[-1] else {}
                body = {"flush_cache": False, "abort_all_requests": False, **_described(piece), **name, **last}
                await run(
                    ask("/update_weights_from_distributed", body),
                    partial(_send, group, piece),
                    what=f"sending weights to {client}",
                )
            await ask("/end_weight_update", {})
        except EngineError:
            with suppress(EngineError):  # there may be no session
                await ask("/end_weight_update", {})
            raise
        finally:
            with suppress(EngineError):  # the group is of no use to anybody any more
                await ask("/destroy_weights_update_group", name)
    finally:
        group.close()


def _described(piece: Bucket) -> dict[str, Any]:
    infos = piece.infos
    return {
        "names": list(infos),
        "dtypes": [info.dtype for info in infos.values()],
        "shapes": [list(info.shape) for info in infos.values()],
    }


def _send(group: ProcessGroup, piece: Bucket) -> None:
    for tensor in piece.tensors():
        group.broadcast(tensor)
