"""Opens the engine that a config asks for. Each kind of engine has a row in ``ENGINES``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollover.clock import Clock
from rollover.engine.base import Engine
from rollover.engine.config import EngineConfig
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.hf.architecture import Architecture
from rollover.weights.adapters import AdapterShape
from rollover.weights.base import WeightTarget

if TYPE_CHECKING:
    from rollover.engine.servers.places import ServerPlaces

ReadModel = Callable[[], Architecture]


class TrainedEngine(Engine, WeightTarget, Protocol):
    """Decodes, and takes new weights.

    Example: an ``EmbeddedEngine``: after ``await engine.load(3, source)``, the chunks that ``engine.generate(request)``
    yields have ``policy_version`` 3.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The surroundings in which an engine is opened.

    Example: ``EngineSetup(folder=Path("qwen3-0.6b"), run="sums-1f3a", logs=Path("logs"), clock=SystemClock())``
    """

    folder: Path
    """The model that it serves as version 0."""
    run: str
    """The run's name among all runs; its servers are labelled with it."""
    logs: Path
    """Folder in which servers that are started on this machine write."""
    clock: Clock
    lockstep: bool = False
    """Decode only when all consumers have come back for more; for engines that declare ``deterministic``."""
    places: ServerPlaces | None = None
    """Places where servers are started, if not on this machine."""
    adapters: AdapterShape | None = None
    """The shape of those that servers will be given in place of full weights, if any."""
    longest_tokens: int | None = None
    """The longest prompt and response that it will be asked for: the context of an engine whose config names none."""
    device: str | None = None
    """The GPU from which this process sends the weights of a folder to servers over NCCL; the first when left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """A row: what is done with the config of one kind of engine. The functions import what they need when they run.

    Example: ``ENGINES["vllm"].check`` is ``None``: only a server knows which models it serves.
    """

    open: Callable[[Any, EngineSetup], Awaitable[TrainedEngine]]
    check: Callable[[Any, ReadModel, int], None] | None = None
    """Refuses a model, given how to read its shape and the longest prompt and response, before anything is opened."""


async def open_engine(config: EngineConfig, setup: EngineSetup) -> TrainedEngine:
    """Open the engine. Raises ``RolloverError`` when it cannot be opened; the message says what to change."""
    assert not setup.lockstep or config.declared.deterministic, "the config refuses deterministic = true with it"
    return await ENGINES[config.kind].open(config, setup)


def check_model(config: EngineConfig, read_model: ReadModel, longest_tokens: int) -> None:
    """Refuse, with ``ConfigError`` or ``ModelError``, what the engine would refuse when it is opened, as far as that is
    known without weights. ``read_model`` is called only where something is."""
    if (check := ENGINES[config.kind].check) is not None:
        check(config, read_model, longest_tokens)


async def _embedded(config: EmbeddedConfig, setup: EngineSetup) -> TrainedEngine:
    from rollover.engine.embedded.engine import EmbeddedEngine

    if setup.longest_tokens is not None:
        config = config.fitted(setup.longest_tokens, Architecture.from_folder(setup.folder).max_position_embeddings)
    return EmbeddedEngine.from_folder(setup.folder, config, lockstep=setup.lockstep)


async def _embedded_servers(config: EmbeddedServerConfig, setup: EngineSetup) -> TrainedEngine:
    from rollover.engine.servers.embedded.open import open_embedded_servers

    if setup.longest_tokens is not None:
        config = config.fitted(setup.longest_tokens, Architecture.from_folder(setup.folder).max_position_embeddings)
    return await open_embedded_servers(
        config, setup.folder, run=setup.run, places=_places(setup), clock=setup.clock, device=setup.device
    )


async def _sglang(config: SGLangConfig, setup: EngineSetup) -> TrainedEngine:
    from rollover.engine.servers.sglang.open import open_sglang

    return await open_sglang(
        config,
        setup.folder,
        run=setup.run,
        places=_places(setup),
        clock=setup.clock,
        adapters=setup.adapters,
        device=setup.device,
    )


async def _vllm(config: VLLMConfig, setup: EngineSetup) -> TrainedEngine:
    from rollover.engine.servers.vllm.open import open_vllm

    return await open_vllm(
        config,
        setup.folder,
        run=setup.run,
        places=_places(setup),
        clock=setup.clock,
        adapters=setup.adapters,
        device=setup.device,
    )


def _places(setup: EngineSetup) -> ServerPlaces:
    from rollover.engine.servers.places import ThisMachine

    return setup.places or ThisMachine(setup.logs)


def _check_embedded(config: EmbeddedConfig, read_model: ReadModel, longest_tokens: int) -> None:
    from rollover.engine.embedded import sizing

    model = read_model()
    sizing.check(model, config.fitted(longest_tokens, model.max_position_embeddings))


def _check_embedded_servers(config: EmbeddedServerConfig, read_model: ReadModel, longest_tokens: int) -> None:
    from rollover.engine.servers.embedded.open import with_program

    if config.launch:
        _check_embedded(with_program(config).embedded(), read_model, longest_tokens)


ENGINES: Mapping[str, EngineKind] = {
    "embedded": EngineKind(open=_embedded, check=_check_embedded),
    "vllm": EngineKind(open=_vllm),
    "sglang": EngineKind(open=_sglang),
    "embedded_server": EngineKind(open=_embedded_servers, check=_check_embedded_servers),
}
"""The kinds of engines in ``AnyEngineConfig``, by kind."""
