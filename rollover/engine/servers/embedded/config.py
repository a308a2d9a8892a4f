"""Settings of servers of the embedded engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollover.engine.base import DeclaredCapabilities, check_colocated
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.config import ServerConfig
from rollover.settings.changes import Changeable

KEY_VARIABLE = "ROLLOVER_API_KEY"
"""The environment variable from which a server takes its API key, unless it is told another."""

_OF_STARTED = ("dtype", "max_context_tokens", "kv_cache_bytes", "draft_rows", "stream_interval_tokens")
"""Settings of the engine in a server that is started; one that runs already was given its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedServerConfig(ServerConfig):
    """Servers of the embedded engine (`rollover serve`), on this machine or others: one for each GPU, say."""

    kind: Literal["embedded_server"] = "embedded_server"
    """`"embedded_server"` chooses this engine."""
    launch_command: Changeable[tuple[str, ...]] = ("rollover", "serve")
    """Program that starts a server; that of this program's own environment when left out."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """With `launch`, of weights and cache; `auto` is bfloat16 on a GPU and float32 on a CPU, where half precision is
    slow."""
    max_context_tokens: Changeable[int | None] = None
    """With `launch`, the longest prompt plus response; unset, it is what `tasks.max_prompt_tokens` and `max_new_tokens`
    come to."""
    kv_cache_bytes: Changeable[int] = 512 * 2**20
    """With `launch`, the memory of each server for the key-value cache of running and parked samples and of prompts."""
    draft_rows: Changeable[int] = 0
    """With `launch`, the rows of a decode iteration that draft tokens may fill up; as in the embedded engine."""
    stream_interval_tokens: Changeable[int] = 16
    """With `launch`, the tokens per streamed chunk; what is lost at most per sample when a server dies."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What a weight update does to running samples; they stay open in either case. `recompute` drops their cache, so
    that every token is sampled from the one policy it is labelled with; `keep` costs nothing and samples from new
    weights over old cache."""

    weight_transfer: Changeable[Literal["folder", "nccl", "gloo"]] = "folder"
    """How weights reach the servers. `folder`: they read them from `weights_dir`, which they must see under the same
    path. `nccl` (GPUs) and `gloo` (CPUs): they are sent into the servers' memory, through a connection that the servers
    open to the sender."""
    transfer_host: Changeable[str | None] = None
    """Address of this machine as the servers see it, for `nccl` and `gloo`; when absent, that from which they are
    reached."""

    @property
    def declared(self) -> DeclaredCapabilities:
        return DeclaredCapabilities(is_colocated=self.colocated)

    def embedded(self) -> EmbeddedConfig:
        """Return the settings of the engine in each server that is started.

        Example: ``EmbeddedServerConfig(launch=True, max_running=8).embedded().max_running == 8``.
        """
        return EmbeddedConfig(max_running=self.running(), **{key: getattr(self, key) for key in _OF_STARTED})

    def __post_init__(self) -> None:
        super(EmbeddedServerConfig, self).__post_init__()  # slots make a second class: plain super() fails
        if self.transfer_host is not None and self.weight_transfer == "folder":
            raise ValueError("transfer_host has no effect with weight_transfer = 'folder': leave it out")
        if self.colocated:
            check_colocated(self.kv_on_update)
        if self.launch:
            self.embedded()
            return
        for key in _OF_STARTED:
            if getattr(self, key) != self.__dataclass_fields__[key].default:
                raise ValueError(
                    f"{key} has no effect without launch = true: leave it out, and start the servers with --{key}"
                )
