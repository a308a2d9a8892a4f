"""Weights into a vLLM server over NCCL, by its calls for weight transfer.

What is peculiar to it: the workers are given the id of the NCCL group, without a meeting place, so all must enter at
the same time; right after that each takes part in a sum of one number, and so must we. The weights follow one by one,
in the order in which they were announced.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import CDLL, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_void_p, string_at
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.engine.servers.broadcast import Bucket, ProcessGroup, buckets, together
from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.vllm.answers import WorldSize
from rollover.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

_ID_BYTES = 128
_DATA_TYPES = {"torch.float16": 6, "torch.float32": 7, "torch.bfloat16": 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t


async def send_weights(
    client: HTTPClient,
    folder: Path,
    label: str,
    *,
    open_group: Callable[[int], ProcessGroup],
    limit_s: float,
) -> None:
    """Replace the weights of a paused server by those in ``folder``. ``open_group`` is given the number of its workers.

    Raises ``EngineError``; the server's weights are then neither the old nor the new ones.
    """

    async def ask(path: str, body: Any = None) -> None:
        await client.call("POST", path, body=body, timeout_s=limit_s)

    answer = await client.ask(WorldSize, "GET", "/get_world_size", params={"include_dp": "true"})
    group = open_group(answer.world_size)
    run = partial(together, limit_s=limit_s)
    try:
        meet = ask("/init_weight_transfer_engine", {"init_info": dict(group.address)})
        await run(meet, group.join, what=f"meeting {client}")
        try:
            await ask("/start_weight_update")
            for piece in buckets(folder):
                announced = ask("/update_weights", {"update_info": _described(piece)})
                await run(announced, partial(_send, group, piece), what=f"sending weights to {client}")
            await ask("/finish_weight_update", {"weight_version": label})
        finally:
            with suppress(EngineError):  # the group is of no use to anybody any more
                await ask("/shutdown_weight_transfer_engine")
    finally:
        group.close()


def _described(piece: Bucket) -> dict[str, Any]:
    infos = piece.infos
    return {
        "names": list(infos),
        "dtype_names": [info.dtype for info in infos.values()],
        "shapes": [list(info.shape) for info in infos.values()],
    }


def _send(group: ProcessGroup, piece: Bucket) -> None:
    for tensor in piece.tensors():
        group.broadcast(tensor)


class _UniqueId(Structure):
    _fields_ = (("bytes", c_char * _ID_BYTES),)


class NCCLGroup:
    """A group of NCCL itself, on this process's current GPU; the library is the one that PyTorch has loaded.

    Raises ``EngineError`` where there is no GPU or no NCCL.
    """

    def __init__(self, num_workers: int) -> None:
        import torch

        if not torch.cuda.is_available():
            raise EngineError("engine.weight_transfer 'nccl' needs a GPU in this machine: set it to 'folder'")
        try:
            self._nccl = CDLL("libnccl.so.2")
        except OSError as e:
            raise EngineError(f"engine.weight_transfer 'nccl' needs NCCL: {e}") from None
        self._nccl.ncclGetErrorString.restype = c_char_p
        self._nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, _UniqueId, c_int]
        self._size = 1 + num_workers
        self._device = torch.cuda.current_device()
        self._communicator = c_void_p()
        self._id = _UniqueId()
        self._call("ncclGetUniqueId", byref(self._id))

    @property
    def address(self) -> Mapping[str, Any]:
        return {
            "nccl_unique_id_b64": base64.b64encode(string_at(byref(self._id), _ID_BYTES)).decode(),
            "rank_offset": 1,
            "world_size": self._size,
            "packed": False,
        }

    def join(self) -> None:
        import torch

        torch.cuda.set_device(self._device)  # this is another thread
        self._call("ncclCommInitRank", byref(self._communicator), c_int(self._size), self._id, c_int(0))
        one = torch.zeros(1, device="cuda")
        here, stream = c_void_p(one.data_ptr()), c_void_p(torch.cuda.current_stream().cuda_stream)
        kind, operation = c_int(_DATA_TYPES[str(one.dtype)]), c_int(_SUM)
        self._call("ncclAllReduce", here, here, c_size_t(1), kind, operation, self._communicator, stream)
        torch.cuda.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        import torch

        torch.cuda.set_device(self._device)
        if (kind := _DATA_TYPES.get(str(tensor.dtype))) is None:
            raise EngineError(f"weights in {tensor.dtype} cannot be sent: set engine.weight_transfer to 'folder'")
        tensor = tensor.to("cuda").contiguous()
        here, stream = c_void_p(tensor.data_ptr()), c_void_p(torch.cuda.current_stream().cuda_stream)
        count = c_size_t(tensor.numel())
        self._call("ncclBroadcast", here, here, count, c_int(kind), c_int(0), self._communicator, stream)
        torch.cuda.synchronize()

    def close(self) -> None:
        if self._communicator:
            self._nccl.ncclCommAbort(self._communicator)
            self._communicator = c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nccl, name)(*arguments):
            raise EngineError(f"{name}: {self._nccl.ncclGetErrorString(code).decode()}")
