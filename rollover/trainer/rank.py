"""One rank of a sharded trainer: ``python -m rollover.trainer.rank DESCRIPTOR``, started by ``ranks``
or, on a node of a cluster, by its host there.

It communicates with the process of the run over the socket ``DESCRIPTOR``: a task, then commands, each with one answer.
All ranks are given the same commands in the same order. Any failure is reported in an answer, and the process ends: the
other ranks cannot continue without it, and the process that leads them ends them too. Large values go through files.
The ranks meet through a file on one machine, and over the network on several.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from fcntl import ioctl
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rollover import errors
from rollover.errors import RolloverError, is_full, refusal, system_error
from rollover.trainer.checkpoint import sum_of_file
from rollover.trainer.local import LocalTrainer
from rollover.trainer.messages import LOGITS, Done, Failed, NetworkMeeting, RankTask
from rollover.trainer.rank_process import PROGRESS
from rollover.trainer.sending import RankSender
from rollover.trainer.setup import SFTSetup, TrainingSetup
from rollover.trainer.sft import SFTTrainer
from rollover.trainer.shares import part_name
from rollover.trainer.world import PeerLost, World, is_of_collective
from rollover.weights.base import specs_of

_PARENT_CHECK_S = 1.0


class _Rank:
    """Carries out the commands of a run."""

    def __init__(self, task: RankTask, world: World) -> None:
        self._task = task
        self._world = world
        setup = task.setup
        assert isinstance(setup, TrainingSetup)
        self._trainer = LocalTrainer(
            replace(setup, config=replace(setup.config, device=task.device)),
            task.model,
            resume_from=task.resume_from,
            world=world,
        )
        self._sender = RankSender(world, {}, device=task.device)

    def carry_out(self, command: str, arguments: Mapping[str, Any]) -> Any:
        commands: dict[str, Callable[..., Any]] = {
            "step": self._step,
            "skip": lambda batch: self._trainer.skip(_unpickled(batch)),
            "logits": self._logits,
            "write": self._trainer.write_weights,
            "send": self._send,
            "save": self._save,
            "rest": self._trainer.rest,
        }
        return commands[command](**arguments)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the trainer that the process leading the ranks needs."""
        trainer = self._trainer
        specs = specs_of(trainer.weights())
        return {"version": trainer.version, "vocab_size": trainer.vocab_size, "weights": specs}

    def _step(self, batch: Path) -> Any:
        trained = self._trainer.step(_unpickled(batch))
        return trained if self._world.rank == 0 else None

    def _logits(self, prompts: Path, folder: Path) -> None:
        logits_PV = self._trainer.next_logits(_unpickled(prompts))
        if self._world.rank == 0:
            np.save(folder / LOGITS, logits_PV)

    def _send(self, do: str, what: Any = None) -> Any:
        """Perform this rank's part of sending weights to servers; ``do`` is a method of ``RankSender``."""
        if do == "open":
            self._sender.close()
            self._sender = RankSender(self._world, self._trainer.weights(), device=self._task.device)
        return getattr(self._sender, do)(*(() if what is None else (what,)))

    def _save(self, folder: Path) -> dict[str, str]:
        """Return the checksums of the files that this rank has written."""
        self._trainer.write_share(folder)
        size = self._task.size
        own = folder.rglob("*.safetensors" if size == 1 else part_name("*", self._task.rank, size))
        return {str(path.relative_to(folder)): sum_of_file(path, self._world.tick) for path in own}


class _WarmupRank:
    """Carries out the commands of a supervised warm-up."""

    def __init__(self, task: RankTask, world: World) -> None:
        assert isinstance(task.setup, SFTSetup)
        self._trainer = SFTTrainer(task.setup, task.model, world=world, device=task.device)

    def carry_out(self, command: str, arguments: Mapping[str, Any]) -> Any:
        if command == "step":
            return self._trainer.step(*_unpickled(arguments["batch"]))
        assert command == "save", command
        return self._trainer.save(**arguments)

    def facts(self) -> dict[str, Any]:
        return {}


def main() -> None:
    serve(Connection(int(sys.argv[1])))


def serve(connection: Connection) -> NoReturn:
    """Serve as the rank that the other end of ``connection`` describes, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to the whole job, whose first process ends ranks
        signal.signal(number, lambda *_: None)
    task: RankTask = connection.recv()
    _end_with(os.getppid())
    torch.set_num_threads(task.num_threads)
    try:
        # A rank alone trains as the process of a run would, unless its weights are kept elsewhere.
        mesh = meet(task) if task.size > 1 or task.setup.config.offload else None
        progress = np.memmap(task.folder / PROGRESS, dtype=np.uint64, mode="r+", shape=(task.size,))
        world = World(task.rank, task.size, progress=progress, mesh=mesh, timeout_s=task.timeout_s)
        rank = (_WarmupRank if isinstance(task.setup, SFTSetup) else _Rank)(task, world)
        world.tick()
        connection.send(Done(rank.facts()))
        while True:
            try:
                command, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(Done(rank.carry_out(command, arguments)))
    except BaseException as error:
        traceback.print_exception(error)
        try:
            connection.send(_refused(error))
        finally:
            sys.stderr.flush()
            os._exit(1)


def _refused(error: BaseException) -> Failed:
    if is_full(error) and (cause := system_error(error)) is not None:
        return Failed("ResourceError", refusal(cause), is_secondary=False)
    known = (cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    found = next(known, None)
    message = str(error) if isinstance(error, RolloverError) else f"{type(error).__name__}: {error}"
    is_secondary = isinstance(error, PeerLost) or is_of_collective(error)
    return Failed(found.__name__ if found is not None else "", message, is_secondary=is_secondary)


def _unpickled(path: Path) -> Any:
    """Read a value that the process of the run wrote for its ranks, in a folder that only its user can enter."""
    with path.open("rb") as file:
        return pickle.load(file)


def _end_with(parent: int) -> None:
    """Arrange that this process ends with its parent, even in the middle of a collective."""

    def watch() -> NoReturn:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
    address of the machine's name, and NCCL the first interface that it finds; other machines often cannot reach it."""
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


if __name__ == "__main__":
    main()
