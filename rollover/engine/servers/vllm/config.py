"""Settings of vLLM servers. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from rollover.engine.config import DeclaredCapabilities, EngineDemands, check_colocated
from rollover.engine.servers.config import ServerConfig, adapter_refusals
from rollover.settings.changes import Changeable


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig(ServerConfig):
    """vLLM servers over HTTP, started with `VLLM_SERVER_DEV_MODE=1` and `--logprobs-mode processed_logprobs`."""

    memory_share_argument: ClassVar[str | None] = "--gpu-memory-utilization"

    kind: Literal["vllm"] = "vllm"
    """`"vllm"` selects this engine."""
    launch_command: Changeable[tuple[str, ...]] = ("vllm", "serve")
    """Program that starts a server, from the environment in which vLLM is installed: `["/opt/vllm/bin/vllm", "serve"]`,
    or `["/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]` if that program is missing or fails."""
    served_model: Changeable[str | None] = None
    """Name under which the servers serve the policy; the first name that they list when left out."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Treatment of running samples in a weight update. `recompute` stops them before it and resumes them after it, so
    that every token is sampled from exactly the policy it is labelled with. `keep` freezes them with their cache:
    nothing is recomputed, later tokens come from new weights over the old cache, and the border between the two
    versions is drawn when the stream falls silent (`drain_s`)."""
    drain_s: Changeable[float] = 0.25
    """With calls running, a pause waits until nothing has arrived for this long: with `keep`, a token that the network
    delays for longer would be labelled with the next version."""
    seed_calls: Changeable[Literal["auto", "always", "never"]] = "auto"
    """Send a seed with each call, which makes two runs more alike and slows down sampling on a GPU. `auto` leaves it
    out on a CPU, where vLLM 0.32 crashes on seeded calls whose prompt it prefills in parts."""
    weight_transfer: Changeable[Literal["folder", "nccl"]] = "folder"
    """Path by which weights reach the servers. `folder`: they read them from `weights_dir`, which must have the same
    path on their machines. `nccl`: the trainer, or the first of its ranks, sends them from its GPU to the GPUs of all
    servers at once, and no folder is written; servers must be started with `--weight-transfer-config '{"backend":
    "nccl"}'`, which `launch` does itself."""
    stream_interval_tokens: Changeable[int] = 16
    """Tokens per streamed chunk, which is also the most that is lost per sample when a server dies. With `keep` every
    token is streamed."""

    @property
    def declared(self) -> DeclaredCapabilities:
        keeps = self.kv_on_update == "keep"
        return DeclaredCapabilities(
            in_flight_update=keeps,
            keeps_kv=keeps,
            is_colocated=self.colocated,
            max_context_tokens=self.launched_context("--max-model-len"),
            context_key="--max-model-len in engine.launch_args",
        )

    def refusals(self, demands: EngineDemands) -> Iterator[str]:
        yield from ServerConfig.refusals(self, demands)
        yield from adapter_refusals(demands, colocated=self.colocated, kv_on_update=self.kv_on_update)

    def __post_init__(self) -> None:
        super(VLLMConfig, self).__post_init__()  # slots make a second class: plain super() fails
        if self.stream_interval_tokens < 1:
            raise ValueError(f"stream_interval_tokens must be at least 1, got {self.stream_interval_tokens}")
        if self.colocated:
            check_colocated(self.kv_on_update)
