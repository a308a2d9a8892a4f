"""A kind of engine: its config, how it is opened, and the record of an engine that is open.

Each kind has a folder, an ``EngineKind`` in the ``kind.py`` of its room, and a row in ``rollover.run.kinds``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.engine.config import EngineConfig

if TYPE_CHECKING:
    from rollover.clock import Clock
    from rollover.engine.base import CallPlacement, Engine, EngineMetrics, Sleeps
    from rollover.engine.logprob_check import CheckedMembers
    from rollover.hf.architecture import Architecture
    from rollover.types import AdapterShape
    from rollover.weights.base import WeightTarget
    from rollover.weights.folders import WeightFolders


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The surroundings in which an engine is opened."""

    folder: Path
    """The model that it serves as version 0."""
    run: str
    """The run's name among all runs; its servers are labelled with it."""
    root: Path
    """The folder in which the engine keeps its files, such as the logs of servers that are started on this machine."""
    clock: Clock
    lockstep: bool = False
    """Decode only when all consumers have come back for more; for engines that declare ``deterministic``."""
    weights_name: str | None = None
    """The name of this user of a folder for weights, which others may use too. ``None``: the engine is only given
    weights that are in a folder already."""
    places: Callable[[Any, Path], Awaitable[Any]] | None = None
    """Given the config of servers and the model's folder, returns the ``ServerPlaces`` for them; left out if they are
    started on this machine."""
    adapters: AdapterShape | None = None
    """The shape of the adapters that servers will be given in place of full weights, if any."""
    longest_tokens: int | None = None
    """The longest prompt and response that it will be asked for: the context of an engine whose config names none."""
    max_staleness: int = 0
    """The largest number of versions by which a trained token may be older than the weights."""
    returns_kept: bool = False
    """Calls want the kept sets of their tokens (``rollover.kept``)."""
    returns_routes: bool = False
    """Calls want the routes of their tokens (``rollover.routes``)."""
    device: str | None = None
    """The GPU from which this process sends the weights of a folder to servers over NCCL; the first when left out."""
    notify: Callable[[str], None] = lambda line: None
    """Shows the user a line about the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    """An open engine, by its roles. One object may have several of them; a role that it does not have is ``None``.

    Example: an embedded engine has ``engine``, ``weights`` and ``sleeper``; after ``await opened.weights.load(3,
    source)``, the chunks that ``opened.engine.generate(request)`` yields have ``policy_version`` 3.
    """

    engine: Engine
    weights: WeightTarget
    placement: CallPlacement | None = None
    trust: CheckedMembers | None = None
    sleeper: Sleeps | None = None
    """Only if it is to take turns with a trainer on the same devices."""
    metrics: EngineMetrics | None = None
    until_up: Callable[[], Awaitable[None]] | None = None
    """Returns when one of its servers is up, which may all be away for a while; raises ``EngineError`` when none comes
    up in time."""
    folders: WeightFolders | None = None
    """The folders through which it gets its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts of a run that a kind of engine checks before anything is opened."""

    read_model: Callable[[], Architecture]
    """Reads the model's shape; called only if the shape matters."""
    longest_tokens: int
    """The longest prompt and response."""
    cuts_distribution: bool = False
    """Tokens are drawn from a part of the vocabulary."""
    sender: str | None = None
    """The GPU from which this process sends weights over NCCL; ``None`` if it sends none in this way."""
    places: Callable[[Any], Sequence[str]] | None = None
    """Given the config of servers, returns lines that say where on a Ray cluster they will go, and raises
    ``ConfigError`` if it has no room for them; ``None`` if servers are started on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A kind of engine. The functions import what they need when they run."""

    config: type[EngineConfig]
    open: Callable[[Any, EngineSetup], Awaitable[OpenedEngine]]
    preflight: Callable[[Any, EngineFacts], Sequence[str]] = lambda config, facts: ()
    """Returns what a user should know before anything is opened. Raises ``ConfigError`` or ``ModelError`` for what the
    engine would refuse when it is opened, as far as that is known without weights."""
