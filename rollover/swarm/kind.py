"""A swarm as a kind of engine."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine
from rollover.swarm.config import SwarmConfig


async def _open(config: SwarmConfig, setup: EngineSetup) -> OpenedEngine:
    from rollover.swarm.coordinator.open import open_swarm

    assert setup.longest_tokens is not None, "a run knows its longest prompt and response"
    swarm = await open_swarm(
        config,
        setup.folder,
        root=setup.root / "swarm",
        run=setup.run,
        max_context_tokens=setup.longest_tokens,
        keep_versions=setup.max_staleness + 2,
        clock=setup.clock,
        returns_kept=setup.returns_kept,
        returns_routes=setup.returns_routes,
    )
    setup.notify(
        f"the swarm listens on {swarm.url}; create a token for each worker with rollover workers {setup.root} --add"
        " NAME"
    )
    if swarm.admin is not None:
        setup.notify(f"see the workers on {swarm.admin.url}, or with rollover workers {setup.root}")
    return OpenedEngine(engine=swarm, weights=swarm, placement=swarm.placement, trust=swarm.checks, metrics=swarm.board)


def _preflight(config: SwarmConfig, facts: EngineFacts) -> Sequence[str]:
    from rollover.swarm.coordinator.listening import check_listening

    lines = [f"swarm: {check_listening(config)}"]
    if facts.cuts_distribution:
        lines.append(
            "swarm: warning: with rollout.top_p, top_k or min_p, nothing verifies among which tokens a worker drew:"
            " leave them out unless you trust whoever runs the workers"
        )
    return lines


SWARM = EngineKind(config=SwarmConfig, open=_open, preflight=_preflight)
