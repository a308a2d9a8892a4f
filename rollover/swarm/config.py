"""Settings of the trainer's side of a swarm. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rollover.engine.config import DeclaredCapabilities, EngineConfig, EngineDemands
from rollover.settings.changes import Changeable
from rollover.swarm.wire.address import has_place, is_loopback

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\s/]+):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig(EngineConfig):
    """Workers on any machines, which dial in with `rollover worker --join URL`. Needs `rollover[swarm]`."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    kind: Literal["swarm"] = "swarm"
    mode: Literal["pull", "push_pull"] = "push_pull"
    """`pull`: every token is sampled from the newest weights; workers fetch them before they sample. `push_pull`:
    workers decode without pause and switch to new weights each in its own time, within `max_staleness`."""
    listen: Changeable[str] = "127.0.0.1:8790"
    """Address and port where workers dial in. Port 0 takes a free port."""
    tls_certificate: Changeable[str | None] = None
    """Certificate chain (PEM). Without one, the run listens only on this machine, unless `insecure` is set."""
    tls_key: Changeable[str | None] = None
    """Private key of the certificate (PEM)."""
    insecure: Changeable[bool] = False
    """Listen on a network without TLS. Only for a network that is itself encrypted, such as a VPN: on any other, tokens
    can be read on the way."""
    admin: Changeable[str | None] = "127.0.0.1:0"
    """Address and port of the live page, `/status.json` and `/metrics`, which only this machine can open. Port 0 takes
    a free port; `none` switches the page off."""
    blob_urls: Changeable[tuple[str, ...]] = ()
    """Places from which workers fetch weights, in the order in which they are tried; the trainer is the last. Each is a
    server that answers `{url}/{digest}`: a cache in front of the trainer, or a copy of `swarm/blobs` of the run
    directory."""
    anchor_every: Changeable[int] = 20
    """Number of publications from one with full weights to the next; those in between contain only what has changed. 1
    publishes full weights every time."""
    max_running: Changeable[int] = 256
    """Largest number of samples that all workers together decode at the same time: about as many as the workers that
    you expect have room for. Strategies that keep the engine full keep this number of samples open."""
    lease_s: Changeable[float] = 15.0
    """Seconds without a message from a worker after which other workers continue its calls; at least 1."""
    away_timeout_s: Changeable[float] = 3600.0
    """Seconds that the run waits for workers, beyond `rollout.stall_timeout_s`, while none decodes: time to start them,
    or for those that are away to come back."""
    abort_timeout_s: Changeable[float] = 10.0
    """Seconds that a worker may take to hand over stopped calls."""
    update_timeout_s: Changeable[float] = 600.0
    """Seconds that writing a publication may take."""
    logprob_tolerance: Changeable[float | None] = None
    """Largest mean difference, in nats, between the log-probs that a worker reports and the trainer's. It is measured
    on a few tokens before a worker gets calls under new weights, and on the batches. When left out, 0.002 if both sides
    are in float32, and 0.1 if either is in half precision."""

    def __post_init__(self) -> None:
        for key, example in (("listen", "0.0.0.0:8790"), ("admin", "127.0.0.1:8791")):
            address = getattr(self, key)
            match = None if address is None else _ADDRESS.fullmatch(address)
            if address is not None and (match is None or int(match["port"]) > 65535):
                raise ValueError(f"{key} must look like {example!r}, got {address!r}")
        if self.admin_address is not None and not is_loopback(self.admin_address[0]):
            raise ValueError(
                f"admin = {self.admin!r} can be reached from other machines, and opening the page needs no token: use"
                " '127.0.0.1:8791'; to view it from elsewhere, use a tunnel (ssh -L 8791:127.0.0.1:8791)"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: give both or neither")
        if self.tls_certificate is None and not self.insecure and not is_loopback(self.address[0]):
            raise ValueError(
                f"listen = {self.listen!r} can be reached from other machines: give tls_certificate and tls_key, or set"
                " insecure = true on a network that is itself encrypted, such as a VPN"
            )
        if self.lease_s < 1:
            raise ValueError(
                f"lease_s must be at least 1: workers send three heartbeats in that time; got {self.lease_s}"
            )
        if self.away_timeout_s < 0:
            raise ValueError(f"away_timeout_s must be at least 0 seconds, got {self.away_timeout_s}")
        for key in ("abort_timeout_s", "update_timeout_s", "logprob_tolerance"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ValueError(f"{key} must be positive, got {value}")
        for key in ("anchor_every", "max_running"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        for url in self.blob_urls:
            if not re.fullmatch(r"https?://[^\s?#@]+", url) or not has_place(url):
                raise ValueError(f"blob_urls must look like 'https://relay/blobs', got {url!r}")

    @property
    def address(self) -> tuple[str, int]:
        return _split(self.listen)

    @property
    def admin_address(self) -> tuple[str, int] | None:
        return None if self.admin is None else _split(self.admin)

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(
            max_running=self.max_running,
            gives_kept=True,
            gives_routes=True,
            serves_training_only=True,
        )

    def mismatch_remedy(self, number_format: str) -> str:
        return (
            f"the operator of this worker must make sure that it computes in {number_format} and without quantisation"
            " (--engine.dtype of its embedded engine, --dtype of a vLLM or SGLang server) and that no other program"
            " loads weights into its engine; rollover workers RUN --trust NAME then readmits it"
        )

    def refusals(self, demands: EngineDemands) -> Iterator[str]:
        yield from EngineConfig.refusals(self, demands)
        if demands.adapters:
            yield (
                "trainer.lora.publish 'adapter' is for engines on this machine: workers of a swarm are sent the merged"
                " weights; leave the key out"
            )
        if self.mode == "pull" and demands.staleness_bound > 0:
            yield (
                "engine.mode 'pull' samples every token from the newest weights, but rollout.strategy"
                f" {demands.strategy!r} trains tokens that are up to {demands.staleness_bound} versions older: use"
                " strategy 'sync', or engine.mode = 'push_pull'"
            )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
