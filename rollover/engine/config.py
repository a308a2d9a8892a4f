"""The base of the configs of all engines: what they say of an engine before it is open. Torch-free.

Each kind of engine has a config of its own, which decides this for itself: a run asks it and never looks at its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

UPDATE_TIMEOUT_S = 600.0
"""Longest that new weights may take to be loaded by an engine without deadlines of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCapabilities:
    """The abilities that the config of an engine settles before the engine is open; ``Capabilities`` say the rest.

    Example: ``VLLMConfig(launch=True).declared.in_flight_update`` is false, and with ``kv_on_update = "keep"`` true.
    """

    in_flight_update: bool = True
    """Same as in ``Capabilities``."""
    gives_kept: bool = False
    """Tokens come with the kept sets (``rollover.kept``) that a request wants."""
    gives_routes: bool = False
    """Tokens come with the routes (``rollover.routes``) that a request wants."""
    keeps_kv: bool = False
    """Tokens may attend to caches that older weights computed."""
    deterministic: bool = False
    """A run can be repeated bit for bit."""
    max_running: int | None = None
    """Same as in ``Capabilities``; ``None`` if it is known only once the engine is open."""
    max_context_tokens: int | None = None
    """Same as in ``Capabilities``; ``None`` if it is known only once the engine is open."""
    context_key: str = "engine.max_context_tokens"
    """Name of the setting behind ``max_context_tokens``, for messages."""
    is_colocated: bool = False
    """It sleeps while the trainer trains (``Sleeps``): no cache outlives a step, so what a round leaves unfinished is
    prefilled again in the next one."""
    in_process: bool = False
    """It computes in the process that opens it."""
    serves_training_only: bool = False
    """It needs a trainer beside it, so a model cannot be evaluated by it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemands:
    """The demands that a run makes on its engine."""

    strategy: str
    """Kind of the strategy, for messages."""
    staleness_bound: int
    in_flight_update: bool
    """The strategy loads weights under running samples."""
    deterministic: bool
    adapters: bool
    """It is given adapters in place of full weights."""
    on_cluster: bool
    """Its servers are placed on a Ray cluster."""


class EngineConfig(ABC):
    """The base of the configs of all engines. Each adds its fields, ``kind`` among them."""

    __slots__ = ()

    memory_share_argument: ClassVar[str | None] = None
    """The argument by which a server is told its share of a GPU's memory, if it takes one."""

    kind: str
    logprob_tolerance: float | None

    @property
    @abstractmethod
    def declared(self) -> DeclaredCapabilities:
        """Return the abilities that these settings decide."""

    @property
    def update_timeout_s(self) -> float | None:
        """Return the longest that an update takes if every deadline of the engine is kept; ``None`` without any."""
        return None

    @property
    def publish_timeout_s(self) -> float:
        """Return the longest that engines may take to load published weights."""
        own_s = self.update_timeout_s
        return UPDATE_TIMEOUT_S if own_s is None else own_s

    @property
    def start_timeout_s(self) -> float:
        """Return the longest that a server of the engine may take to start; 0 if it starts none."""
        return 0.0

    @property
    def away_timeout_s(self) -> float:
        """Return the longest that calls wait while no server of the engine is up; 0 if they never do."""
        return 0.0

    @abstractmethod
    def mismatch_remedy(self, number_format: str) -> str:
        """Say what a user can do about an engine whose log-probs are not the trainer's. The engine reports that it
        computes in ``number_format``."""

    @property
    def weight_transfer(self) -> str:
        """Return the path by which weights reach servers: through a folder, unless the settings name another."""
        return "folder"

    def devices(self) -> Sequence[str]:
        """Return the device of each engine that these settings start on this machine, or all devices of each server."""
        return ()

    def memory(
        self, num_parameters: int, model: Mapping[str, Any], *, on_gpu: bool, capacity: int | None
    ) -> Mapping[str, int] | None:
        """Return the bytes, by purpose, that one engine takes of a device; ``None`` if the settings do not determine
        them.

        Args:
            num_parameters: of the model.
            model: the content of its ``config.json``.
            capacity: the bytes of a GPU; ``None`` if they are not known, and on a CPU.
        """
        del num_parameters, model, on_gpu, capacity
        return None

    def weights_root(self, default: Path, name: str) -> Path | None:
        """Return the folder through which weights reach the engine, ``None`` if it takes them from memory.

        Args:
            default: the folder if the settings name none.
            name: of whoever uses the folder, which may not be alone in it.
        """
        del default, name
        return None

    @property
    def unties_first(self) -> bool:
        """Tell whether the engine must be started on a model whose output matrix is a tensor of its own."""
        return False

    def refusals(self, demands: EngineDemands) -> Iterator[str]:
        """Yield what the run asks and these settings rule out, each with what to change."""
        if demands.deterministic and not self.declared.deterministic:
            yield f"deterministic = true needs engine.kind 'embedded', got {self.kind!r}"
        if demands.on_cluster:
            yield from self.cluster_refusals()

    def cluster_refusals(self) -> Iterator[str]:
        """Yield why a Ray cluster cannot be the place of this engine."""
        kinds = "'vllm', 'sglang' or 'embedded_server'"
        yield f"cluster.engines starts servers, but engine.kind is {self.kind!r}: choose {kinds}"


def check_colocated(kv_on_update: str) -> None:
    """Raise ``ValueError`` if an engine that gives its cache back is to keep it over an update."""
    if kv_on_update == "keep":
        raise ValueError(
            "kv_on_update = 'keep' does not work with colocated = true: the cache is released while the trainer trains,"
            " so there is nothing left to keep; leave out one of the two"
        )
