"""A coordinator, its members of unequal speed, and a relay, as real processes that anything may happen to.

::

    trainer ◀── proxy ◀── members "workstation", "laptop", "tablet", "phone"
       ▲          ▲              │
       │          └── nginx ◀────┘ blobs
       └── killed, stopped, started again, like everybody else
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.engine.servers.start.launch import free_port
from rollover.swarm.coordinator.status.snapshot import SwarmStatus, read_status
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.publication.keys import open_key
from tests import runs
from tests.runs import Cue
from tests.speed import within
from tests.swarm.chaos.disks import SmallDisk
from tests.swarm.chaos.faults import Blow
from tests.swarm.chaos.forked import Forked
from tests.swarm.chaos.proxy import FaultProxy
from tests.swarm.chaos.relay import Relay

SPEEDS: Mapping[str, float] = {"workstation": 2000.0, "laptop": 1000.0, "tablet": 300.0, "phone": 100.0}
"""Tokens per second of each member."""
LEASE_S = 3.0
DEADLINE_S = within(240.0)
"""Of a wait; beyond it, something has gone wrong."""


@dataclass
class Toll:
    """What was done to each of the cast."""

    kills: Counter[str] = field(default_factory=Counter)
    """By name and way: ``coordinator/event`` for a coordinator that died as an event went to the journal."""
    others: Counter[str] = field(default_factory=Counter)
    num_starts: int = 0
    """Of the coordinator."""
    num_full_disk_ends: int = 0
    """Processes that ended because their disk was full, and said so."""

    @property
    def num_kills(self) -> int:
        return self.kills.total()


class Stage:
    """The processes of one run in ``folder``, where ``run.toml`` and what it names are.

    Args:
        argv: settings of the run.
        seed: of the lots that the network draws.
        run: the run directory.
        caches: the folder of the members' caches.
        late: members that are not started with the others.
        with_relay: blobs go through nginx.
        disks: those of the coordinator and of the members, where they are to be filled.
        has_own_clock: wall clocks are what ``set_clocks`` makes them.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        seed: str,
        speeds: Mapping[str, float] = SPEEDS,
        late: Collection[str] = (),
        run: Path | None = None,
        caches: Path | None = None,
        with_relay: bool = False,
        disks: Mapping[str, SmallDisk] | None = None,
        has_own_clock: bool = False,
    ) -> None:
        self.folder, self.speeds, self.run = folder, speeds, run or folder / "out"
        self._late, self._caches = late, caches or folder
        self._with_relay, self._disks = with_relay, disks or {}
        self._argv, self._has_own_clock = tuple(argv), has_own_clock
        self.port = free_port()
        self.proxy = FaultProxy(self.port, seed)
        self.toll = Toll()
        self.cast: dict[str, Forked | Relay] = {}
        self.next_cue: Callable[[], Cue | None] = lambda: None
        """Says when the next coordinator is to kill itself, which it does at an event or a flush."""
        self._cue: Cue | None = None
        self._paused: set[str] = set()
        self._away: set[str] = set()
        """Killed, and to be started again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._full: set[str] = set()
        """Names of disks that are full."""
        self._may_end: set[str] = set()
        """Processes that started on a full disk, and a coordinator whose disk has been full."""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        """Start all processes, and kill them in the end."""
        async with self.proxy.listening():
            try:
                await self._begin()
                yield self
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                for process in self.cast.values():
                    process.kill()

    async def _begin(self) -> None:
        config = re.sub(r"\[engine\]\n.*?(?=\[trainer\])", "", runs.CONFIG, flags=re.DOTALL)
        engine = f'[engine]\nkind = "swarm"\nlease_s = {LEASE_S}\nmax_running = 24\n'
        swarm = self.run / "swarm"
        if self._with_relay:
            # Made before the trainer has made its folder, since the address of the relay is in its settings.
            relay = Relay(self.folder / "nginx", f"http://127.0.0.1:{self.proxy.port}")
            engine += f'blob_urls = ["{relay.url}"]\n'
        (self.folder / "swarm.toml").write_text(f"{config}\n{engine}")
        self.start("coordinator")
        await self.until("the swarm", lambda: (swarm / "status.json").exists())
        key = open_key(swarm / "publisher.key").public_key()
        credentials = Credentials(swarm / "workers.json")
        if self._with_relay:
            relay.configure(credentials.add("nginx", key).text)
            self.cast["nginx"] = relay
            relay.start()
        for name in self.speeds:
            (self.folder / f"{name}.token").write_text(credentials.add(name, key).text)
            (self.folder / f"{name}.token").chmod(0o600)
            if name not in self._late:
                self.start(name)

    # -- the cast -----------------------------------------------------------------------------------------------

    def start(self, name: str, *argv: str) -> None:
        """Start a process, or start it again."""
        if self._disk_of(name) in self._full:
            self._may_end.add(name)
        else:
            self._may_end.discard(name)
        if name == "nginx":
            relay = self.cast[name]
            assert isinstance(relay, Relay)
            relay.launch()
        elif name == "coordinator":
            self.toll.num_starts += 1
            self._cue = self.next_cue()
            begun = (self.run / "config.json").exists()
            which = ("--resume", str(self.run)) if begun else ("swarm.toml", "--run-dir", str(self.run))
            settings = () if begun else self._argv
            self.cast[name] = Forked(
                self.folder,
                name,
                ("train", *which, *settings, "--engine.listen", f"127.0.0.1:{self.port}", *argv),
                kill_at=self._cue,
                has_own_clock=self._has_own_clock,
            )
        else:
            self.cast[name] = Forked(
                self.folder,
                name,
                (
                    *("worker", "--join", f"ws://127.0.0.1:{self.proxy.port}"),
                    *("--token-file", f"{name}.token", "--cache", str(self._caches / f"cache-{name}")),
                    *("--engine.max_running", "12", "--engine.kv_cache_bytes", "4194304"),
                    *("--engine.block_size_tokens", "4", "--engine.stream_interval_tokens", "2"),
                    *("--connect_timeout_s", "3", *argv),
                ),
                tokens_per_s=self.speeds[name],
                has_own_clock=self._has_own_clock,
            )

    async def kill(self, name: str, away_s: float = 0.0) -> None:
        """Kill a process with SIGKILL and start it again after a while."""
        if (process := self.cast[name]).exit_code is not None:
            return
        self._away.add(name)
        self._paused.discard(name)
        process.kill()
        await self._again(name, "clock", away_s)

    async def _again(self, name: str, way: str, away_s: float) -> None:
        if self.cast[name].exit_code == -signal.SIGKILL:
            self.toll.kills[f"{name}/{way}"] += 1
            await asyncio.sleep(away_s)
            self.start(name)
        self._away.discard(name)

    async def pause(self, name: str, seconds: float) -> None:
        """Stop a process with SIGSTOP for a while."""
        if name in self._paused:
            return
        self.toll.others[f"{name}/pause {'above' if seconds > LEASE_S else 'below'} the lease"] += 1
        process = self.cast[name]
        process.send(signal.SIGSTOP)
        self._paused.add(name)
        await asyncio.sleep(seconds)
        self._paused.discard(name)
        process.send(signal.SIGCONT)

    def halt(self, name: str) -> None:
        """Have the engine of a member decode nothing from now on but checks; the member goes on to say that it is
        there."""
        (self.folder / f"{name}.halt").touch()

    async def fill(self, name: str, seconds: float) -> None:
        """Leave no space on a process's disk for a while. A process that ends because of it is started again."""
        which = self._disk_of(name)
        if which in self._full:
            return
        self.toll.others[f"{which}/full disk"] += 1
        self._full.add(which)
        self._may_end |= {which} & {"coordinator"}
        try:
            await asyncio.to_thread(self._disks[which].fill)
            await asyncio.sleep(seconds)
        finally:
            self._disks[which].clear()
            self._full.discard(which)

    def _disk_of(self, name: str) -> str:
        """Members share one disk, which holds nothing but what they have fetched."""
        return name if name in ("coordinator", "nginx") else "members"

    async def _after_full_disk(self, name: str) -> None:
        """Start a process again that has ended on a full disk and has said so, once there is space."""
        words = self.cast[name].last_words()
        assert re.search("no space|is full|GB are free", words), f"{name} does not say that its disk is full\n{words}"
        while self._disk_of(name) in self._full:
            await asyncio.sleep(0.05)
        self.toll.num_full_disk_ends += 1
        self.start(name)
        self._away.discard(name)

    def strike(self, blow: Blow) -> None:
        """Carry out a blow, and end it when its time is over."""
        match blow.way:
            case "kill":
                self.spawn(self.kill(blow.target, blow.seconds))
            case "pause":
                self.spawn(self.pause(blow.target, blow.seconds))
            case "fill":
                self.spawn(self.fill(blow.target, blow.seconds))
            case "cut":
                self.toll.others[f"{blow.target}/cut"] += 1
                self.proxy.cut(blow.target)
            case "freeze":
                self.toll.others[f"{blow.target}/freeze"] += 1
                self.proxy.freeze(blow.target, blow.seconds)

    def is_up(self, name: str) -> bool:
        """Tell whether a process runs, as far as can be seen, so that a blow would hit."""
        return name in self.cast and self.cast[name].exit_code is None and name not in self._paused | self._away

    async def stop(self) -> int:
        """Stop the run with Ctrl-C, after two more steps. Returns how many it has then taken."""
        last = self.steps_done() + 2
        await self.until(f"{last} steps", lambda: self.steps_done() >= last)
        coordinator = self.cast.pop("coordinator")
        coordinator.send(signal.SIGINT)
        try:
            await self.until("the end of the run", lambda: coordinator.exit_code is not None)
            assert coordinator.exit_code == 128 + signal.SIGINT, coordinator.last_words()
        finally:
            coordinator.kill()
        return self.steps_done()

    @property
    def is_over(self) -> bool:
        """The run has come to its end."""
        return self.cast["coordinator"].exit_code == 0

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something happen beside everything else."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

    def check_tasks(self) -> None:
        """Raise what has gone wrong in the background."""
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    # -- waiting ------------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
        """Wait for something; the cast must not end meanwhile, but by our own hand."""
        give_up_s = time.monotonic() + limit_s
        while not condition():
            self.check_cast()
            assert time.monotonic() < give_up_s, f"{what} did not happen within {limit_s:g} s\n{self.last_words()}"
            await asyncio.sleep(0.05)

    def check_cast(self) -> None:
        """Check that no process has ended without a blow."""
        self.check_tasks()
        for name, process in list(self.cast.items()):
            code = process.exit_code
            if name == "coordinator" and code == -signal.SIGKILL and name not in self._away:
                self._away.add(name)
                way = "flush" if self._cue is not None and self._cue.kind == "flush" else "event"
                self.spawn(self._again(name, way, 0.0))
            if code == 2 and name in self._may_end and name not in self._away:
                self._away.add(name)
                self.spawn(self._after_full_disk(name))
            assert name in self._away or code in (None, 0, -signal.SIGKILL), (
                f"{name} ended with {code}\n{self.last_words()}"
            )

    def status(self) -> SwarmStatus:
        """Return the state of the swarm as the coordinator has written it last."""
        return read_status(self.run / "swarm")

    def last_words(self) -> str:
        return "\n".join(process.last_words() for process in self.cast.values())

    def steps_done(self) -> int:
        """Steps that are in the metrics, each counted once."""
        path = self.run / "metrics.jsonl"
        return len(set(re.findall(r'"step": (\d+)', path.read_text()))) if path.exists() else 0
