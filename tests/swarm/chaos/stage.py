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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.engine.servers.launch import free_port
from rollover.swarm.coordinator.status.snapshot import StatusFile, SwarmStatus
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from tests import runs
from tests.runs import Cue
from tests.swarm.chaos.faults import Blow
from tests.swarm.chaos.forked import Forked
from tests.swarm.chaos.proxy import FaultProxy
from tests.swarm.chaos.relay import Relay, nginx_program

SPEEDS: Mapping[str, float] = {"workstation": 2000.0, "laptop": 1000.0, "tablet": 300.0, "phone": 100.0}
"""Tokens per second of each member."""
LEASE_S = 3.0
DEADLINE_S = 240.0
"""Of a wait; whoever is waited for has gone wrong beyond it."""


@dataclass(frozen=True, slots=True)
class Return:
    """How long one of the cast took to be of use again: ``Return("phone", 1.9, False)`` after it was killed."""

    name: str
    seconds: float
    is_alone: bool
    """Nobody else was hit meanwhile."""


@dataclass
class Toll:
    """What was done to whom, and how they came back."""

    kills: Counter[str] = field(default_factory=Counter)
    """By name and way: ``coordinator/event`` for one that died as an event went to the journal."""
    others: Counter[str] = field(default_factory=Counter)
    returns: list[Return] = field(default_factory=list)
    num_starts: int = 0
    """Of the coordinator."""

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
        with_relay: blobs go through nginx, where it is installed.
        has_own_clock: wall clocks are what ``set_clocks`` makes them.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        *,
        seed: str,
        speeds: Mapping[str, float] = SPEEDS,
        run: Path | None = None,
        caches: Path | None = None,
        with_relay: bool = True,
        has_own_clock: bool = False,
    ) -> None:
        self.folder, self.speeds, self.run = folder, speeds, run or folder / "out"
        self._caches = caches or folder
        self._with_relay = with_relay and nginx_program() is not None
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
        self._last_blow_s = 0.0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Stage]:
        """Start everybody; in the end nobody is left."""
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
            relay = Relay(self.folder / "nginx", f"http://127.0.0.1:{self.proxy.port}/v1/blobs")
            engine += f'blob_urls = ["{relay.url}"]\n'
        (self.folder / "swarm.toml").write_text(f"{config}\n{engine}")
        self.start("coordinator")
        await self.until("the swarm", lambda: (swarm / "status.json").exists())
        key = open_key(swarm / "publisher.key").public_key()
        credentials = Credentials(swarm / "workers.json")
        if self._with_relay:
            relay.configure(credentials.add("nginx", key).text)
            relay.start()
            self.cast["nginx"] = relay
        for name in self.speeds:
            (self.folder / f"{name}.token").write_text(credentials.add(name, key).text)
            (self.folder / f"{name}.token").chmod(0o600)
            self.start(name)

    # -- the cast -----------------------------------------------------------------------------------------------

    def start(self, name: str, *argv: str) -> None:
        """Start a process, or start it again."""
        if name == "nginx":
            relay = self.cast[name]
            assert isinstance(relay, Relay)
            relay.start()
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
            self.spawn(self._time_return(name, time.monotonic()))
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

    def strike(self, blow: Blow) -> None:
        """Do something to somebody, and see to it that it passes."""
        self._last_blow_s = time.monotonic()
        match blow.way:
            case "kill":
                self.spawn(self.kill(blow.whom, blow.seconds))
            case "pause":
                self.spawn(self.pause(blow.whom, blow.seconds))
            case "cut":
                self.toll.others[f"{blow.whom}/cut"] += 1
                self.proxy.cut(blow.whom)
            case "freeze":
                self.toll.others[f"{blow.whom}/freeze"] += 1
                self.proxy.freeze(blow.whom, blow.seconds)

    def is_up(self, name: str) -> bool:
        """Tell whether somebody runs as far as can be seen, so that a blow would hit."""
        return name in self.cast and self.cast[name].exit_code is None and name not in self._paused | self._away

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

    # -- coming back --------------------------------------------------------------------------------------------

    async def _time_return(self, name: str, start_s: float) -> None:
        """Take note of how long somebody needs to be of use again, unless it is hit before."""
        blow_s, process = self._last_blow_s, self.cast[name]
        while not await self._is_back(name, start_s):
            if self.cast[name] is not process or process.exit_code is not None or time.monotonic() > start_s + 30.0:
                return
            await asyncio.sleep(0.01)
        alone = self._last_blow_s == blow_s
        self.toll.returns.append(Return(name, time.monotonic() - start_s, alone))

    async def _is_back(self, name: str, start_s: float) -> bool:
        """Tell whether the coordinator answers, or a member serves again."""
        if name not in ("coordinator", "nginx"):
            return any(who == name and at_s > start_s for at_s, who, _ in self.proxy.record.servings)
        relay = self.cast["nginx"] if name == "nginx" else None
        return await answers(relay.port if isinstance(relay, Relay) else self.port)

    # -- waiting ------------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
        """Wait for something; the cast must not end meanwhile, but by our own hand."""
        give_up_s = time.monotonic() + limit_s
        while not condition():
            self.check_cast()
            assert time.monotonic() < give_up_s, f"{what} did not happen within {limit_s:g} s\n{self.last_words()}"
            await asyncio.sleep(0.05)

    def check_cast(self) -> None:
        """Nobody ends but by a blow."""
        self.check_tasks()
        for name, process in list(self.cast.items()):
            code = process.exit_code
            if name == "coordinator" and code == -signal.SIGKILL and name not in self._away:
                self._away.add(name)
                way = "flush" if self._cue is not None and self._cue.kind == "flush" else "event"
                self.spawn(self._again(name, way, 0.0))
            assert code in (None, 0, -signal.SIGKILL), f"{name} ended with {code}\n{self.last_words()}"

    def status(self) -> SwarmStatus:
        """Return the state of the swarm as the coordinator has written it last."""
        return StatusFile(self.run / "swarm" / "status.json").read()

    def last_words(self) -> str:
        return "\n".join(process.last_words() for process in self.cast.values())

    def steps_done(self) -> int:
        """Steps that are in the metrics, each counted once."""
        path = self.run / "metrics.jsonl"
        return len(set(re.findall(r'"step": (\d+)', path.read_text()))) if path.exists() else 0


async def answers(port: int) -> bool:
    """Tell whether a server on this machine answers a request, whatever it says."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /v1/blobs/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 ")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
