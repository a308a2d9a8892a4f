"""Settings of a worker. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollover.engine.config import EngineConfig
from rollover.engine.embedded.config import EmbeddedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker: its engine, and how long it waits for whom."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    engine: EngineConfig = field(default_factory=EmbeddedConfig)
    deterministic: bool = False
    """Decode in step with the calls' consumers, as a run with ``deterministic = true`` does; the embedded engine alone
    can."""
    max_held_tokens: int = 1_000_000
    """Decoded tokens that wait for an acknowledgement, at 200 bytes each (700 with the experts of large mixtures), up
    to which the worker continues to decode while the coordinator is away. Then it stands still; nothing is dropped."""
    version_timeout_s: float = 900.0
    """Seconds for which a call waits for the weights that it needs before it is handed back."""
    fetch_timeout_s: float = 3600.0
    """Seconds that fetching a version may take before it is restarted."""
    update_timeout_s: float = 600.0
    """Seconds that an engine may take to load new weights; servers use their own deadlines if these are longer."""
    connect_timeout_s: float = 20.0
    """Longest wait for the connection to the coordinator to be opened, and for its first answer."""
    away_timeout_s: float = 86_400.0
    """Seconds without a connection to the coordinator after which the worker gives up, with exit code 2: the run may
    have ended while it was away."""
    leave_timeout_s: float = 10.0
    """Seconds within which a stopped worker sends what it has decoded; it says how many tokens it could not."""

    def __post_init__(self) -> None:
        for key in ("max_held_tokens", *(key for key in self.__dataclass_fields__ if key.endswith("_s"))):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, got {getattr(self, key)}")
        if self.engine.declared.serves_training_only:
            raise ValueError(f"engine.kind {self.engine.kind!r} is for the trainer's side: choose another kind")
        if self.engine.declared.is_colocated:
            raise ValueError("engine.colocated has no effect in a worker, which has no trainer beside it: leave it out")
        if self.deterministic and not self.engine.declared.deterministic:
            raise ValueError(
                "deterministic = true needs the embedded engine, the only one that repeats itself"
                f" bit for bit; got engine.kind = {self.engine.kind!r}"
            )
