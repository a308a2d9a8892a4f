"""Records of devices, links, models and workloads: frozen, in SI units (bytes, bytes/s, FLOP/s, seconds).

Units are converted once, where files are read: gigabytes, bidirectional link figures and teraFLOP/s occur only in the
catalogue and the fleet file.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
"""Bytes of a weight, a gradient or an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two ends."""

    bytes_per_s: float
    """The specified bandwidth, one way; transfers reach the fraction ``Efficiency.link`` of it."""
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The fractions of a device's specified figures that are reached, measured or by default."""

    train: float
    """Fraction of ``flops`` that forward and backward passes of training reach."""
    prefill: float
    """Fraction of ``flops`` that prefill reaches."""
    decode: float
    """Fraction of ``flops`` that compute-bound decoding reaches."""
    bandwidth: float
    """Fraction of ``hbm_bytes_per_s`` that decoding reaches."""
    link: float
    """Fraction of a link's ``bytes_per_s`` that collectives and weight transfers reach."""
    memory: float
    """Fraction of ``hbm_bytes`` that weights, the KV cache and activations may fill."""
    step_s: float
    """Seconds of a decoding iteration for launches, sampling and scheduling."""
    source: str
    """Source of these figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator in one kind of node. Devices of equal records are interchangeable.

    Example: an H20 in a node of 8 is ``Device(name="h20", flops=148e12, hbm_bytes_per_s=4e12, node_size=8, ...)``.
    """

    name: str
    """Unique name in a fleet: the catalogue's key, with ``@node`` appended if it occurs in different surroundings."""
    title: str
    flops: float
    """Dense bf16 FLOP/s."""
    hbm_bytes_per_s: float
    hbm_bytes: float
    node_size: int
    """Number of devices in its node; tensor parallelism stays inside."""
    link: Link
    """Link between two devices of its node."""
    network: Link
    """Link from its node to other nodes; the node's devices share it."""
    price_per_hour: float | None
    """Price in the fleet's currency; ``None`` if unknown."""
    efficiency: Efficiency
    unverified: tuple[str, ...] = ()
    """Names of the above figures that are not verified in a primary source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only language model, as far as time and memory depend on it. Counts are of scalars.

    Example: Qwen2.5-7B has ``num_layers=28, hidden=3584, kv_width=1024, parameters=7_615_616_512``.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    """Number of attention heads, which tensor parallelism divides."""
    query_width: int
    """Heads times head size: 4 x this x context FLOPs per token and layer go into attention."""
    kv_width: int
    """Scalars cached per token and layer."""
    kv_heads: int
    """Number of ways in which tensor parallelism can split the cache; beyond that it is replicated."""
    ffn_width: int
    """Intermediate activations per token and layer (of the experts that a token visits)."""
    vocab_size: int
    parameters: int
    active_parameters: int
    """Parameters used for one token."""
    embedding_parameters: int
    """Parameters that are only looked up, not multiplied or read as a whole: the input embedding unless it is tied."""
    expert_parameters: int = 0
    """Parameters in routed experts; the others are read in every step."""
    num_experts: int = 0
    experts_per_token: int = 0
    not_embedded: str = ""
    """Reason for which the embedded engine cannot run it; empty if it can, or if that is not known."""

    @property
    def multiplied_parameters(self) -> int:
        """Return the number of parameters with which a token is multiplied: 2 FLOPs each."""
        return self.active_parameters - self.embedding_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Responses of similar length; the first bucket has the shortest.

    Example: ``share=0.25, tokens=900, group_share=0.01`` holds a quarter of the samples and the longest of 1% of
    groups.
    """

    share: float
    """Fraction of all samples."""
    tokens: float
    """Mean response length."""
    max_tokens: int
    group_share: float
    """Fraction of all groups whose longest response falls here."""
    group_tokens: float
    """Mean length of the longest response of those groups."""
    batch_share: float
    """Probability that the longest response of a whole batch falls here."""
    batch_tokens: float
    """Mean length of that response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A training step's demand: prompts, samples and lengths, and how engine and trainer handle them.

    Example: ``num_groups=128, group_size=8`` trains 1,024 samples a step (``batch_size``).
    """

    name: str
    num_groups: int
    """Prompts per training step."""
    group_size: int
    """Samples per prompt."""
    prompt_tokens: float
    """Mean prompt length."""
    buckets: tuple[LengthBucket, ...]
    longest_prompt_tokens: float = 0.0
    """Length of the longest prompt; 0 if all are alike."""
    reward_s: float = 0.0
    """Seconds between a sample's last token and its reward."""
    held_s: float = 0.0
    """Seconds in which a sample keeps its KV cache without decoding: tool calls."""
    pause_s: float = 1.0
    """Seconds for which engines pause around a weight update, besides transfer and re-prefill."""
    keeps_kv: bool = False
    """True if the KV cache survives a weight update; otherwise running samples are prefilled again."""
    reference_model: bool = False
    proximal_pass: bool = True
    """True if the trainer recomputes log-probabilities before the step."""
    rollout_weight_bytes: float = 2.0
    """Bytes per parameter in the engines: 2 for bf16, 1 for fp8."""
    kv_bytes: float = 2.0
    """Bytes per cached scalar."""

    @property
    def batch_size(self) -> int:
        return self.num_groups * self.group_size

    @property
    def response_tokens(self) -> float:
        return sum(bucket.share * bucket.tokens for bucket in self.buckets)
