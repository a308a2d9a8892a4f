"""The embedded engine as a kind of engine."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine


async def _open(config: EmbeddedConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.engine.embedded.engine import EmbeddedEngine
    from rollover.hf.architecture import Architecture

    if setup.longest_tokens is not None:
        config = config.fitted(setup.longest_tokens, Architecture.from_folder(setup.folder).max_position_embeddings)
    engine = EmbeddedEngine.from_folder(setup.folder, config, lockstep=setup.lockstep)
    return OpenedEngine(engine=engine, weights=engine, sleeper=engine if config.colocated else None)


def check_embedded(config: EmbeddedConfig, facts: EngineFacts) -> Sequence[str]:
    """Refuse a model that the embedded engine cannot serve, or for which its cache is too small."""
    from rollover.engine.embedded import sizing

    model = facts.read_model()
    sizing.check(model, config.fitted(facts.longest_tokens, model.max_position_embeddings))
    return ()


EMBEDDED = EngineKind(config=EmbeddedConfig, open=_open, preflight=check_embedded)
