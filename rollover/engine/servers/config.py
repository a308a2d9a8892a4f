"""Settings shared by every engine behind HTTP: where its servers are and how long to wait for them. Importing this
module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollover.engine.config import DeclaredCapabilities, EngineConfig, EngineDemands
from rollover.engine.devices import VISIBLE, devices_of_process
from rollover.errors import ConfigError
from rollover.settings.changes import Changeable

_URL = re.compile(r"https?://[^/@?#\s]+(/[^?#\s]*)?")


def is_server_url(url: str) -> bool:
    """Tell whether a text names a server and holds no user, password or query."""
    return _URL.fullmatch(url) is not None and _is_reachable(url)


def _is_reachable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(EngineConfig):
    """Servers to use, or to start. All of them serve the same model."""

    urls: Changeable[tuple[str, ...]] = ()
    """Servers that are already running, as in `http://10.0.0.5:8000`. Give either these or `launch`."""
    launch: Changeable[bool] = False
    """Start servers on this machine and stop them at the end; their logs are kept in the run directory."""
    num_servers: Changeable[int] = 1
    """Number of servers to start with `launch`."""
    launch_command: Changeable[tuple[str, ...]] = ("python",)
    """Program that starts a server, with the interpreter of the environment in which the server is installed."""
    launch_args: Changeable[tuple[str, ...]] = ()
    """Additional arguments for it, such as `["--tensor-parallel-size", "2"]`."""
    launch_env: Changeable[Mapping[str, str]] = field(default_factory=dict)
    """Environment variables for it, in addition to this program's own."""
    launch_devices: Changeable[tuple[str, ...]] = ()
    """`CUDA_VISIBLE_DEVICES` of each server that is started; every server sees all devices when left out."""
    launch_timeout_s: Changeable[float] = 900.0
    """Longest wait for a started server to load its model and answer."""
    stop_timeout_s: Changeable[float] = 20.0
    """Time a started server gets to stop before it is killed."""
    api_key_env: Changeable[str | None] = None
    """Name of the environment variable that holds the servers' API key, which is sent as a bearer token."""
    verify_tls: Changeable[bool] = True
    """Check the certificate of an `https` server."""
    ca_file: Changeable[str | None] = None
    """Certificates to check it against (PEM); the system's when left out."""
    max_running: Changeable[int | tuple[int, ...]] = 64
    """Samples decoded at the same time by each server, or a list with one number for each of the `urls`, as in `[64,
    256]`. The server's own limit should not be lower, or calls queue there."""
    weights_dir: Changeable[str | None] = None
    """Folder through which weights reach the servers; it must have the same path on their machines. Each run makes a
    folder of its own in it. `weights` in the run directory when left out."""
    colocated: Changeable[bool] = False
    """The trainer trains on the servers' devices, and they give back the memory of weights and cache while it does. The
    cache is then recomputed, and strategies that generate during training cannot be used."""
    connect_timeout_s: Changeable[float] = 10.0
    """Longest wait for a connection."""
    first_token_timeout_s: Changeable[float] = 300.0
    """Longest wait for the first token of a call, including prefill and the server's queue."""
    token_timeout_s: Changeable[float] = 60.0
    """Longest silence of a call that has started streaming."""
    busy_timeout_s: Changeable[float] = 120.0
    """Time for which a call is retried at a server that answers 429 or 503."""
    control_timeout_s: Changeable[float] = 30.0
    """Longest wait for the answer to any other call."""
    abort_timeout_s: Changeable[float] = 10.0
    """Time a server gets to hand over stopped calls. After half of it all its calls are stopped; after all of it their
    connections are closed."""
    load_timeout_s: Changeable[float] = 300.0
    """Longest wait for weights to load and, with `colocated`, for memory to be released or reclaimed."""
    logprob_tolerance: Changeable[float | None] = None
    """Largest mean difference, in nats, between the log-probs that a server reports and the trainer's for the same
    weights. It is measured on a few tokens of each server at startup, after each weight update and before a server
    rejoins, and, unless `rollout.accept_truncation_bias` is set, on every batch. A server that exceeds it is taken out.
    When left out: 0.002 if weights and trainer are float32, because bfloat16 produces 0.004 and more; 0.1 if one of
    them is in half precision."""
    health_interval_s: Changeable[float] = 5.0
    """Time between two health checks of a server."""
    health_timeout_s: Changeable[float] = 10.0
    """Longest wait for the answer to a health check; a server with two late answers in a row is taken out."""
    rejoin_max_interval_s: Changeable[float] = 60.0
    """Longest interval between attempts to bring back a server that was taken out; the interval doubles up to this."""
    all_down_timeout_s: Changeable[float] = 120.0
    """Longest time for which calls wait for a server to come back when all are out. While one is being started again,
    they wait up to `launch_timeout_s`."""

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(is_colocated=self.colocated)

    @property
    def switch_timeout_s(self) -> float:
        """Return the longest time that a server which keeps its deadlines takes to pause and to resume."""
        return 4 * self.control_timeout_s

    @property
    def install_timeout_s(self) -> float:
        """Return the longest time that such a server takes to install new weights: calls stopped, weights loaded, cache
        emptied, label set and read; and, with ``colocated``, memory reclaimed before and after it."""
        taken_s = 2 * self.load_timeout_s * self.colocated
        return self.abort_timeout_s + self.load_timeout_s + taken_s + 3 * self.control_timeout_s

    @property
    def sleep_timeout_s(self) -> float:
        """Return the longest time that a server which keeps its deadlines takes to release its memory."""
        return self.abort_timeout_s + self.load_timeout_s + 4 * self.control_timeout_s

    @property
    def update_timeout_s(self) -> float:
        """Return the longest time that an update of all servers takes, including servers that fail; if it takes longer,
        the fault is our own. Weights that are sent to all servers in one group may have to be sent again: without those
        that have failed, and then to one server after the other."""
        again_s = 0.0
        if self.weight_transfer != "folder":
            again_s = (1 + max(self.num_servers, len(self.urls))) * (self.load_timeout_s + self.control_timeout_s)
        awaited_s = self.install_timeout_s + self.away_timeout_s + self.control_timeout_s
        return 2 * self.switch_timeout_s + awaited_s + again_s

    @property
    def start_timeout_s(self) -> float:
        return self.launch_timeout_s if self.launch else 0.0

    @property
    def away_timeout_s(self) -> float:
        return max(self.all_down_timeout_s, self.start_timeout_s)

    def launched_context(self, *names: str) -> int | None:
        """Return the context that ``launch_args`` give started servers, in an argument of one of these names."""
        text = argument(self.launch_args, *names) if self.launch else None
        return int(text) if text and text.isdecimal() else None

    @property
    def launch_device(self) -> str:
        """Return the first device of a server that is started, by its name in the server."""
        return "auto"

    def devices_of(self, number: int) -> list[str]:
        """Return the devices on which the server of this number is started, by their names in this process."""
        own = self.launch_devices[number] if self.launch_devices else None
        visible = self.launch_env.get(VISIBLE, own)
        return devices_of_process(self.launch_device, num_devices(self.launch_args), visible)

    def devices(self) -> list[str]:
        return [device for n in range(self.num_servers) for device in self.devices_of(n)] if self.launch else []

    def memory(
        self, num_parameters: int, model: Mapping[str, Any], *, on_gpu: bool, capacity: int | None
    ) -> Mapping[str, int] | None:
        del num_parameters, model
        share = argument(self.launch_args, self.memory_share_argument or "")
        if not (self.launch and on_gpu and capacity and share):
            return None
        try:
            return {"share": int(float(share) * capacity)}
        except ValueError:
            return None

    def mismatch_remedy(self, number_format: str) -> str:
        return (
            f"it must serve this run's model with --dtype {number_format}, without quantisation, and no other run"
            " or process may load weights into it"
        )

    def weights_root(self, default: Path, name: str) -> Path:
        return (default if self.weights_dir is None else Path(self.weights_dir) / name).resolve()

    @property
    def unties_first(self) -> bool:
        return self.launch  # vLLM on a CPU does not reload the output side of a tied matrix

    def cluster_refusals(self) -> Iterator[str]:
        if not self.launch:
            yield "cluster.engines starts servers, but engine.urls names running ones: leave out one of the two"
            return
        for key, empty in (("num_servers", 1), ("launch_devices", ())):
            if getattr(self, key) != empty:
                yield f"engine.{key} is for servers on this machine, not for servers of cluster.engines: leave it out"

    def __post_init__(self) -> None:
        if self.launch == bool(self.urls):
            seen = "both" if self.launch else "neither"
            raise ValueError(f"urls or launch = true: one of the two says where the servers are, got {seen}")
        for url in self.urls:
            if not _URL.fullmatch(url):
                raise ValueError(
                    f"urls must look like 'http://host:8000', without user, password or query, got {url!r}"
                )
            if not _is_reachable(url):
                raise ValueError(f"urls must name a host, and a port from 1 to 65535 or none, got {url!r}")
        plain = [url.rstrip("/") for url in self.urls]
        if repeated := {url for url in plain if plain.count(url) > 1}:
            raise ValueError(f"urls names {min(repeated)!r} more than once")
        self._check_running()
        positive = ("num_servers", "logprob_tolerance")
        for key in (*positive, *(k for k in self.__dataclass_fields__ if k.endswith("_s"))):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ValueError(f"{key} must be positive, got {getattr(self, key)}")
        if self.launch and not self.launch_command:
            raise ValueError("launch_command must name a program, got an empty list")
        for name in self.launch_env:
            if not name or "=" in name:
                raise ValueError(f"launch_env: {name!r} is not the name of an environment variable")
        if self.launch_devices and len(self.launch_devices) != self.num_servers:
            raise ValueError(
                f"launch_devices names the devices of {len(self.launch_devices)} servers,"
                f" but num_servers is {self.num_servers}"
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            raise ValueError("api_key_env must be the name of an environment variable, never the key itself")
        self._check_idle_settings()

    def _check_running(self) -> None:
        each = self.max_running
        if isinstance(each, int):
            each = (each,)
        elif self.launch or len(each) != len(self.urls):
            raise ValueError(
                f"max_running is one number for all servers, or a list with one for each of the {len(self.urls)} urls,"
                f" got a list of {len(each)}"
            )
        if min(each) <= 0:
            raise ValueError(f"max_running must be positive, got {min(each)}")

    def running(self, url: str | None = None) -> int:
        """Return ``max_running`` of the server at one of the ``urls``, or of any server that is started."""
        if isinstance(self.max_running, int):
            return self.max_running
        return next(n for own, n in zip(self.urls, self.max_running, strict=True) if own.rstrip("/") == url)

    def _check_idle_settings(self) -> None:
        fields = self.__dataclass_fields__
        of_launch = ("launch_command", "launch_args", "launch_devices", "num_servers")
        changed = [key for key in of_launch if getattr(self, key) != fields[key].default]
        for key in (*changed, *(["launch_env"] if self.launch_env else [])):
            if not self.launch:
                raise ValueError(f"{key} has no effect without launch = true: leave it out")
        if self.ca_file is not None and not self.verify_tls:
            raise ValueError("ca_file has no effect with verify_tls = false: leave it out")


def adapter_refusals(demands: EngineDemands, *, colocated: bool, kv_on_update: str) -> Iterator[str]:
    """Yield why servers that put adapters beside their weights, and serve calls under their name, cannot be given them
    alone."""
    if not demands.adapters:
        return
    if colocated:
        yield (
            "trainer.lora.publish 'adapter' has no benefit with engine.colocated = true: the server gives up its"
            " weights and receives all of them at every update; leave out one of the two"
        )
    elif kv_on_update == "keep":
        yield (
            "trainer.lora.publish 'adapter' does not work with engine.kv_on_update 'keep': a running call keeps the"
            " adapter it started with; set kv_on_update = 'recompute', or publish = 'merged'"
        )
    elif demands.in_flight_update:
        yield (
            f"rollout.strategy {demands.strategy!r} loads weights under running samples, but with trainer.lora.publish"
            " 'adapter' a running call keeps the adapter it started with: set publish = 'merged', or choose another"
            " strategy"
        )


_SIZES = (
    ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
)
"""Arguments of vLLM and SGLang that multiply the GPUs of a server, each under all its names."""


def argument(args: Sequence[str], *names: str) -> str | None:
    """Return the value that ``args`` give an option, which may have several names; the value of the last mention
    counts. Words may be joined by ``-`` or ``_``. ``None`` if the option is not there, "" where its value is missing.

    Example: ``argument(["--tp", "2", "--tensor_parallel_size=4"], "--tensor-parallel-size", "--tp")`` is "4".
    """
    value = None
    for index, arg in enumerate(args):
        name, equals, after = arg.partition("=")
        if name.replace("_", "-") in names:
            value = after if equals else args[index + 1] if index + 1 < len(args) else ""
    return value


def num_devices(args: Sequence[str]) -> int:
    """Read from a server's arguments how many GPUs it takes: tensor x pipeline x data parallel size.

    Example: ``num_devices(["--tensor-parallel-size", "4", "--pp=2"])`` is 8, ``num_devices([])`` is 1.

    Raises ``ConfigError`` for a size that is no whole number above 0.
    """
    total = 1
    for names in _SIZES:
        if (text := argument(args, *names)) is None:
            continue
        if "--dp" in names and any(arg.replace("_", "-") == "--enable-dp-attention" for arg in args):
            continue  # SGLang's data parallel attention shares the GPUs of its tensor parallel ranks
        if not text.isdecimal() or int(text) < 1:
            also = ", ".join(names[1:])
            raise ConfigError(
                f"engine.launch_args: {names[0]} (or {also}) must be followed by a number of devices, got {text!r}"
            )
        total *= int(text)
    return total
