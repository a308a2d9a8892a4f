"""The records in which machines, models, workloads and their costs are described: frozen, in SI units (bytes, bytes/s,
FLOP/s, seconds).

Units are converted once, where files are read: gigabytes, bidirectional link figures and teraFLOP/s do not get past the
catalogue and the fleet file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BF16_BYTES = 2
"""Bytes of a weight, a gradient or an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ends."""

    bytes_per_s: float
    """One way, as specified: what transfers reach of it is ``Efficiency.link``."""
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Which part of a device's specified figures is reached, and what each step costs besides. Measured or default."""

    train: float
    """Of ``flops``, forward and backward passes of training."""
    prefill: float
    """Of ``flops``, prefill."""
    decode: float
    """Of ``flops``, decoding where compute bounds it."""
    bandwidth: float
    """Of ``hbm_bytes_per_s``, decoding."""
    link: float
    """Of every link's ``bytes_per_s``, collectives and weight transfer."""
    memory: float
    """Of ``hbm_bytes``, what weights, caches and activations may fill."""
    step_s: float
    """Time of a decoding iteration that no data explains: launches, sampling, scheduling."""
    source: str
    """Where these figures come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, as it stands in one kind of node. Devices of equal records are interchangeable."""

    name: str
    """Unique in a fleet: the catalogue's key, with ``@node`` appended where it occurs in differing surroundings."""
    title: str
    flops: float
    """Dense bf16 FLOP/s."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    node_size: int
    """Devices in its node; tensor parallelism stays inside."""
    link: Link
    """Between two devices of its node."""
    network: Link
    """From its node to other nodes; the node's devices share it."""
    price_per_hour: float | None
    """In the fleet's currency; ``None`` where unknown."""
    efficiency: Efficiency
    unverified: tuple[str, ...] = ()
    """Figures among the above that rest on second-hand sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only language model, as far as time and memory depend on it. Counts are of scalars."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    """Tensor parallelism divides them."""
    query_width: int
    """Heads times head size: 4 x this x context FLOPs per token and layer go into attention."""
    kv_width: int
    """Scalars cached per token and layer."""
    kv_heads: int
    """Tensor parallelism splits the cache so many ways; beyond that it is repeated."""
    ffn_width: int
    """Intermediate activations per token and layer (of the experts that a token visits)."""
    vocab_size: int
    parameters: int
    active_parameters: int
    """Used for one token."""
    embedding_parameters: int
    """Looked up, not multiplied or read as a whole: the input embedding where it is not the output's too."""
    expert_parameters: int = 0
    """In routed experts; the others are read in every step."""
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def multiplied_parameters(self) -> int:
        """Parameters with which a token is multiplied: 2 FLOPs each."""
        return self.active_parameters - self.embedding_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Responses of similar length; the first bucket has the shortest."""

    share: float
    """Of all samples."""
    tokens: float
    """Mean response length."""
    max_tokens: int
    group_share: float
    """Of all groups: their longest response falls here."""
    group_tokens: float
    """Mean length of the longest response of those groups."""
    batch_share: float
    """Probability that the longest response of a whole batch falls here."""
    batch_tokens: float
    """Its mean length then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What a training step consumes."""

    name: str
    num_groups: int
    """Prompts per training step."""
    group_size: int
    """Samples per prompt."""
    prompt_tokens: float
    """Mean prompt length."""
    buckets: tuple[LengthBucket, ...]
    reward_s: float = 0.0
    """Between a sample's last token and its reward."""
    held_s: float = 0.0
    """While a sample keeps its cache without decoding: tool calls."""
    pause_s: float = 1.0
    """Engines stand still so long around a weight update, transfer and re-prefill apart."""
    keeps_kv: bool = False
    """Caches survive a weight update; otherwise running samples are prefilled anew."""
    reference_model: bool = False
    proximal_pass: bool = True
    """The trainer recomputes log-probabilities before the step."""
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    rollout_weight_bytes: float = 2.0
    """Per parameter in the engines: 2 for bf16, 1 for fp8."""
    kv_bytes: float = 2.0
    """Per cached scalar."""

    @property
    def batch_size(self) -> int:
        """Samples per training step."""
        return self.num_groups * self.group_size

    @property
    def response_tokens(self) -> float:
        """Mean response length."""
        return sum(bucket.share * bucket.tokens for bucket in self.buckets)
