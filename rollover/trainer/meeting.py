"""The ranks of a sharded trainer meet through a file on one machine, and over the network on several."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta
from fcntl import ioctl
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rollover.trainer.messages import NetworkMeeting, RankTask

_SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""


def meet(task: RankTask) -> Any:
    """Return the mesh of all ranks. Blocks until they have joined, for ``task.timeout_s`` at most."""
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=task.timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if task.meeting is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one machine
        where = (task.folder / "meeting").as_uri()
        dist.init_process_group(backend, init_method=where, rank=task.rank, world_size=task.size, timeout=timeout)
    else:
        if (interface := interface_of(task.meeting.own)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # and none whose name only begins so
        store = _store(task.meeting, task.size, timeout)
        dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.size, timeout=timeout)
    return init_device_mesh(device.type, (task.size,))


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; ``None`` if there is none. Without it gloo uses the
    address of the machine's name, and NCCL the first interface that it finds; other machines often cannot reach them.

    Example: "lo" has 127.0.0.1.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def _store(meeting: NetworkMeeting, size: int, timeout: timedelta) -> dist.TCPStore:
    if meeting.descriptor is None:
        return dist.TCPStore(meeting.host, meeting.port, size, is_master=False, timeout=timeout)
    return dist.TCPStore(
        meeting.host, meeting.port, size, is_master=True, timeout=timeout, master_listen_fd=meeting.descriptor
    )
