"""Settings of SGLang servers. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from rollover.engine.config import DeclaredCapabilities, EngineDemands, check_colocated
from rollover.engine.servers.config import ServerConfig, adapter_refusals
from rollover.settings.changes import Changeable


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangConfig(ServerConfig):
    """SGLang servers over HTTP, version 0.5.23 or later. A url may name a router: it is asked for its workers, and
    every call goes directly to a worker."""

    memory_share_argument: ClassVar[str | None] = "--mem-fraction-static"

    kind: Literal["sglang"] = "sglang"
    """`"sglang"` selects this engine."""
    launch_command: Changeable[tuple[str, ...]] = ("python", "-m", "sglang.launch_server")
    """Program that starts a server, with the interpreter of the environment in which SGLang is installed."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Treatment of running samples in a weight update; they stay open in either case, and the server says which weights
    sampled which of their tokens. `recompute` takes them off the server's batch and recomputes their cache, so that
    later tokens come from the new policy. `keep` freezes them with their cache: nothing is recomputed, and later tokens
    come from new weights over the old cache."""
    weight_transfer: Changeable[Literal["folder", "nccl", "gloo"]] = "folder"
    """Path by which weights reach the servers. `folder`: they read them from `weights_dir`, which must have the same
    path on their machines. `nccl` (GPUs) and `gloo`: the trainer, or the first of its ranks, sends them into the memory
    of the workers of all servers at once, through connections that the workers open to it, and no folder is written;
    this does not work with data-parallel or pipeline-parallel servers."""
    transfer_host: Changeable[str | None] = None
    """Address of the trainer's machine as seen from the servers, for `nccl` and `gloo`; the address from which they are
    reached when left out."""
    stream_interval_tokens: Changeable[int] = 16
    """Tokens per streamed chunk, which is also the most that is lost per sample when a server dies, provided that no
    weights have been loaded since the sample started there. After an update, a sample's tokens are handed on only at
    its end, when the server says which weights they come from."""

    @property
    def declared(self) -> DeclaredCapabilities:
        keeps = self.kv_on_update == "keep"
        return DeclaredCapabilities(
            keeps_kv=keeps,
            gives_kept=True,
            gives_routes=True,
            is_colocated=self.colocated,
            max_context_tokens=self.launched_context("--context-length"),
            context_key="--context-length in engine.launch_args",
        )

    def refusals(self, demands: EngineDemands) -> Iterator[str]:
        yield from ServerConfig.refusals(self, demands)
        yield from adapter_refusals(demands, colocated=self.colocated, kv_on_update=self.kv_on_update)

    def __post_init__(self) -> None:
        super(SGLangConfig, self).__post_init__()  # slots make a second class: plain super() fails
        if self.stream_interval_tokens < 1:
            raise ValueError(f"stream_interval_tokens must be at least 1, got {self.stream_interval_tokens}")
        if self.colocated:
            check_colocated(self.kv_on_update)
        if self.transfer_host is not None and self.weight_transfer == "folder":
            raise ValueError("transfer_host has no effect with weight_transfer = 'folder': leave it out")
        if self.launch and self.api_key_env is not None:
            raise ValueError(
                "api_key_env does not work with launch = true: SGLang takes its key on the command line, where every"
                " user of the machine can read it; a server that is started listens on the loopback interface only"
            )
