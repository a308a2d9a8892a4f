"""Settings of servers of the embedded engine. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

from rollover.engine.config import DeclaredCapabilities, check_colocated
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.config import ServerConfig, argument
from rollover.errors import ConfigError
from rollover.settings.changes import Changeable

KEY_VARIABLE = "ROLLOVER_API_KEY"
"""The environment variable from which a server takes its API key, unless it is told to use another."""

_OF_STARTED = ("dtype", "max_context_tokens", "kv_cache_bytes", "stream_interval_tokens")
"""Settings of the engine in a server that is started; a server that is already running has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedServerConfig(ServerConfig):
    """Servers of the embedded engine (`rollover serve`), on this machine or others; typically one per GPU."""

    kind: Literal["embedded_server"] = "embedded_server"
    """`"embedded_server"` selects this engine."""
    launch_command: Changeable[tuple[str, ...]] = ("rollover", "serve")
    """Program that starts a server; by default the one from this program's own environment."""
    launch_args: Changeable[tuple[str, ...]] = ()
    """Additional arguments for it, such as `["--block_size_tokens", "64"]`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """With `launch`, the number format of weights and cache; `auto` is bfloat16 on a GPU and float32 on a CPU, where
    half precision is slow."""
    max_context_tokens: Changeable[int | None] = None
    """With `launch`, the longest prompt plus response; the sum of `tasks.max_prompt_tokens` and `max_new_tokens` when
    left out."""
    kv_cache_bytes: Changeable[int] = 512 * 2**20
    """With `launch`, each server's memory for the key-value cache of running samples, parked samples and prompts."""
    stream_interval_tokens: Changeable[int] = 16
    """With `launch`, the tokens per streamed chunk, which is also the most that is lost per sample when a server
    dies."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Treatment of running samples in a weight update; they stay open in either case. `recompute` drops their cache, so
    that every token is sampled from exactly the policy it is labelled with; `keep` costs nothing, and samples from new
    weights over the old cache."""

    weight_transfer: Changeable[Literal["folder", "nccl", "gloo"]] = "folder"
    """Path by which weights reach the servers. `folder`: they read them from `weights_dir`, which must have the same
    path on their machines. `nccl` (GPUs) and `gloo` (CPUs): weights are sent into the servers' memory, through a
    connection that the servers open to the sender."""
    transfer_host: Changeable[str | None] = None
    """Address of this machine as seen from the servers, for `nccl` and `gloo`; the address from which they are reached
    when left out."""

    def embedded(self) -> EmbeddedConfig:
        """Return the settings of the engine in each server that is started."""
        return EmbeddedConfig(max_running=self.running(), **{key: getattr(self, key) for key in _OF_STARTED})

    def started(self) -> EmbeddedConfig:
        """Return the settings of the engine in each server, including settings that ``launch_args`` override."""
        args, settings = self.launch_args, self.embedded()
        device, dtype = argument(args, "--device"), argument(args, "--dtype")
        try:
            return replace(
                settings,
                device=device or settings.device,
                dtype=cast(Any, dtype or settings.dtype),
                kv_cache_bytes=int(argument(args, "--kv-cache-bytes") or settings.kv_cache_bytes),
            )
        except ValueError as error:
            raise ConfigError(f"engine.launch_args: {error}") from None

    @property
    def launch_device(self) -> str:
        return self.started().device

    def memory(
        self, num_parameters: int, model: Mapping[str, Any], *, on_gpu: bool, capacity: int | None
    ) -> Mapping[str, int] | None:
        return self.started().memory(num_parameters, model, on_gpu=on_gpu, capacity=capacity) if self.launch else None

    @property
    def declared(self) -> DeclaredCapabilities:
        keeps = self.kv_on_update == "keep"
        return DeclaredCapabilities(is_colocated=self.colocated, keeps_kv=keeps, gives_kept=True, gives_routes=True)

    @property
    def unties_first(self) -> bool:
        return False

    def fitted(self, num_tokens: int, num_positions: int) -> Self:
        """Return these settings with room for a prompt and response of ``num_tokens`` in servers that are started where
        they name no length, unless a model of ``num_positions`` cannot have it."""
        if not self.launch or self.max_context_tokens is not None or num_tokens > num_positions:
            return self
        return replace(self, max_context_tokens=num_tokens)

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
