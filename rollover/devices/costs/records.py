"""Kinds of replica and training plans: the cost model's results for the planner. Frozen, in SI units."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """A kind of rollout replica, which decodes all lengths in proportion: device type, tensor and pipeline parallelism,
    batch cap.

    Example: ``device="h20", tp=2, pp=1, batch_cap=64, rate=1.4`` ends 1.4 samples per second.
    """

    device: str
    tp: int
    pp: int
    batch_cap: int
    """Maximum number of samples decoded at once, if the KV cache has room for them."""
    rate: float
    """Samples per second."""
    latency_s: float
    """Mean seconds from admission to reward."""
    group_latency_s: float
    """The same, for the longest sample of a group."""
    batch_latency_s: float
    """The same, for the longest sample of a batch."""
    max_latency_s: float
    """The same, for the longest sample of all."""
    kv_bytes: float
    """Capacity of the KV cache."""
    kv_byte_s: float
    """KV cache of a sample, integrated over its time in the engine."""
    update_s: float
    """Seconds lost to each weight update: pause, load and re-prefill of what is running."""

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Return the fields that distinguish the kind from others, regardless of the links it uses."""
        return self.device, self.tp, self.pp, self.batch_cap


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPart:
    """Equal data-parallel pipelines on one device type."""

    device: str
    dp: int
    tp: int
    pp: int
    sharded: bool
    """True if weights, gradients and optimizer state are sharded over ``dp`` as well."""
    recompute: bool
    """True if activations are recomputed in the backward pass instead of kept."""
    share: float
    """Fraction of every batch that it trains."""

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """A way to train: data-parallel parts, one for each device type it uses.

    Example: ``step_s=30, sync_s=4`` trains a batch every 34 s at best (``cycle_s``).
    """

    parts: tuple[TrainingPart, ...]
    step_s: float
    """C_T: time of a training step."""
    sync_s: float
    """S: exposed time until the engines have the new weights."""

    @property
    def cycle_s(self) -> float:
        return self.step_s + self.sync_s

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts)

    @property
    def shape(self) -> tuple[TrainingPart, ...]:
        """Return the plan's parts, regardless of their shares."""
        return tuple(replace(part, share=1.0) for part in self.parts)

    def count(self, device: str) -> int:
        return sum(part.num_devices for part in self.parts if part.device == device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """The time of a training part, which others may join: ``share * batch_s + fixed_s``."""

    part: TrainingPart
    """The part when it trains alone."""
    batch_s: float
    """Seconds for a whole batch: compute, tensor-parallel traffic, gathered weights."""
    fixed_s: float
    """Seconds regardless of the share: filling the pipeline, reducing gradients, the optimizer."""
