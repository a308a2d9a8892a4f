"""The page "Run a swarm on three laptops" works as it stands: its own commands, in network namespaces, one of them
behind a router that translates addresses."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollover.swarm.coordinator.status.snapshot import read_status
from tests import runs
from tests.speed import within
from tests.swarm.chaos.forked import Forked

ROOT = Path(__file__).parents[2]
DEADLINE_S = within(240.0)
STEPS = 40
"""So many that one worker alone has not done them all before the other is there."""
PAGE = (ROOT / "docs" / "how-to" / "swarm.md").read_text()
SECTION = PAGE[PAGE.index("## Run a swarm on three laptops") : PAGE.index("### When a worker cannot join")]
CONTINUED = re.compile(r"\\\n\s*")
BLOCKS = [CONTINUED.sub(" ", block).splitlines() for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)]
TRAINER = "192.168.1.10"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=within(20))


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or not (shutil.which("nft") or shutil.which("iptables")):
        return False
    name = f"rollover-{os.getpid()}-probe"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "probe", "type", "bridge")
    except (subprocess.CalledProcessError, OSError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=within(20), check=False)
    return True


@dataclass
class Laptop:
    """A machine: a network namespace and a home folder."""

    namespace: str
    home: Path
    started: dict[str, Forked] = field(default_factory=dict)

    def command(self, line: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *shlex.split(line)]

    def run(self, line: str) -> str:
        if line.startswith("rollover "):  # none of these uses the network
            command = runs.Processes(self.home).run(*shlex.split(line)[1:])
            assert command.code == 0, f"{line}\n{command.err}"
            return command.out
        done = subprocess.run(self.command(line), cwd=self.home, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        return done.stdout

    def start(self, name: str, line: str) -> None:
        (self.home / f"{name}.log").touch()
        self.started[name] = Forked(self.home, name, shlex.split(line)[1:], namespace=self.namespace)

    def log(self, name: str) -> str:
        return (self.home / f"{name}.log").read_text(errors="replace")

    def kill(self) -> None:
        for process in self.started.values():
            process.kill()


class House:
    """Three laptops: the first and ``kitchen`` on one network, ``attic`` behind a router that translates addresses."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._prefix = f"ro{os.getpid()}"
        self._lan = self._namespace("lan")
        ip("-n", self._lan, "link", "add", "br0", "type", "bridge")
        ip("-n", self._lan, "link", "set", "br0", "up")
        self.first, self.kitchen, self.attic = (self._laptop(folder, name) for name in ("first", "kitchen", "attic"))
        self._plug(self.first.namespace, f"{TRAINER}/24")
        self._plug(self.kitchen.namespace, "192.168.1.20/24")
        self._behind_router(self.attic.namespace)

    @property
    def laptops(self) -> tuple[Laptop, ...]:
        return self.first, self.kitchen, self.attic

    def _laptop(self, folder: Path, name: str) -> Laptop:
        (folder / name).mkdir()
        laptop = Laptop(self._namespace(name), folder / name)
        self._stack.callback(laptop.kill)
        return laptop

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}-{name}"
        ip("netns", "add", full)
        self._stack.callback(ip, "netns", "del", full)
        ip("-n", full, "link", "set", "lo", "up")
        return full

    def _plug(self, namespace: str, address: str) -> None:
        port = f"v{address.split('.')[-1].split('/')[0]}"
        ip("-n", self._lan, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self._lan, "link", "set", port, "master", "br0", "up")
        self._address(namespace, "eth0", address)

    def _address(self, namespace: str, device: str, address: str) -> None:
        ip("-n", namespace, "addr", "add", address, "dev", device)
        ip("-n", namespace, "link", "set", device, "up")

    def _behind_router(self, namespace: str) -> None:
        router = self._namespace("router")
        self._plug(router, "192.168.1.30/24")
        ip("-n", router, "link", "add", "eth1", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._address(router, "eth1", "10.0.7.1/24")
        self._address(namespace, "eth0", "10.0.7.2/24")
        ip("-n", namespace, "route", "add", "default", "via", "10.0.7.1")
        rules = (
            [
                "nft add table ip nat",
                "nft add chain ip nat out { type nat hook postrouting priority 100 ; }",
                "nft add rule ip nat out oifname eth0 masquerade",
            ]
            if shutil.which("nft")
            else ["iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE"]
        )
        for rule in ["sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'", *rules]:
            ip("netns", "exec", router, *shlex.split(rule))


def until(what: str, holds: object, laptops: tuple[Laptop, ...]) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not holds():  # type: ignore[operator]
        logs = [
            (f"{name}: ended with {p.exit_code}", m.log(name)[-2000:]) for m in laptops for name, p in m.started.items()
        ]
        assert time.monotonic() < give_up_s, f"{what} did not happen: {logs}"
        assert all(p.exit_code in (None, 0) for m in laptops for p in m.started.values()), f"before {what}: {logs}"
        time.sleep(0.1)


def carry(line: str, house: House) -> None:
    """Do what ``scp -p FILES HOST:`` does, between folders."""
    _, flag, *files, host = shlex.split(line)
    assert flag == "-p", "a token stays its owner's alone"
    for file in files:
        shutil.copy2(house.first.home / file, getattr(house, host.removesuffix(":")).home)


def test_the_page_has_the_commands_that_are_tried_here() -> None:
    first, tokens, worker = BLOCKS
    assert [line.split()[0] for line in first] == ["pip", "openssl", "rollover"]
    assert [line.split()[0] for line in tokens] == ["rollover", "rollover", "scp", "scp"]
    assert [line.split()[0] for line in worker] == ["pip", "rollover"]


@pytest.mark.skipif(not may_make_namespaces(), reason="needs the right to make network namespaces, and nft or iptables")
def test_three_laptops_train_together_with_the_commands_of_the_page(tmp_path: Path, tiny_model: Path) -> None:
    (_, openssl, train), tokens, (_, worker) = BLOCKS
    with ExitStack() as stack:
        it = House(tmp_path, stack)
        runs.write_experiment(it.first.home, tiny_model)
        config = re.sub(r"\[engine\]\n.*?(?=\[trainer\])", "", runs.CONFIG, flags=re.DOTALL)
        config = config.replace("steps = 4", f"steps = {STEPS}").replace('progress = "off"', 'progress = "plain"')
        (it.first.home / "small.toml").write_text(config)
        it.first.run(openssl)
        said = it.first.run(f"{train} --dry-run")
        assert "wss://0.0.0.0:8790" in said, "the page's own run is a good one"
        it.first.start("train", train.replace("quickstart", "small.toml"))
        run = it.first.home / "runs" / "swarm"
        until("the run listens", (run / "swarm" / "status.json").exists, it.laptops)
        for line in tokens:
            carry(line, it) if line.startswith("scp") else it.first.run(line)
        it.kitchen.start("worker", worker)
        it.attic.start("worker", worker.replace("kitchen", "attic"))
        until(
            "both serve", lambda: all("serving version" in m.log("worker") for m in (it.kitchen, it.attic)), it.laptops
        )
        until("the end", lambda: all(p.exit_code == 0 for m in it.laptops for p in m.started.values()), it.laptops)
        assert all("the run has ended" in m.log("worker") for m in (it.kitchen, it.attic)), "workers are told so"
        assert "unreachable" in _ping(it.first, "10.0.7.2"), "nobody can dial in behind the router"
        members = {w.name: w for w in read_status(run / "swarm").workers}
    assert {name: w.num_decoded > 0 for name, w in members.items()} == {"kitchen": True, "attic": True}
    assert "the swarm listens on wss://HOST:8790" in it.first.log("train")
    assert re.search(r"see the workers on http://127\.0\.0\.1:\d+/", it.first.log("train"))
    assert runs.ledger(run).next_step == STEPS


def _ping(laptop: Laptop, address: str) -> str:
    code = f"import socket; s = socket.socket(); s.settimeout(5); s.connect(({address!r}, 1))"
    command = laptop.command(shlex.join([sys.executable, "-c", code]))
    return subprocess.run(command, capture_output=True, text=True, timeout=within(30), check=False).stderr
