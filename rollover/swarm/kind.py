"""A swarm as a kind of engine."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from rollover.engine.kind import EngineFacts, EngineKind, EngineSetup, OpenedEngine
from rollover.errors import ConfigError
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
    lines = [f"swarm: {check_listening(config)}"]
    if facts.cuts_distribution:
        lines.append(
            "swarm: warning: with rollout.top_p, top_k or min_p, nothing verifies among which tokens a worker drew:"
            " leave them out unless you trust whoever runs the workers"
        )
    return lines


def check_listening(config: SwarmConfig) -> str:
    """Try the address, the certificate and its key. Returns the address as workers join it.

    Raises ``ConfigError`` when the port is in use, or the certificate and the key cannot be used together."""
    from rollover.engine.ports import listen_on

    listen_on(config.address, setting="engine.listen").close()
    if config.tls_certificate is None or config.tls_key is None:
        return f"ws://{config.listen}"

    def ask() -> str:
        raise ConfigError(
            f"engine.tls_key: {config.tls_key!r} is encrypted, and a run cannot ask for its password: give a key"
            f" without one (openssl pkey -in {config.tls_key} -out plain.pem)"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key, password=ask)
    except OSError as e:  # of TLS too
        reason = getattr(e, "reason", None) or e.strerror or e
        raise ConfigError(
            f"engine.tls_certificate {config.tls_certificate!r} and engine.tls_key {config.tls_key!r} cannot be used"
            f" together as PEM files: {reason}"
        ) from e
    return f"wss://{config.listen}"


SWARM = EngineKind(config=SwarmConfig, open=_open, preflight=_preflight)
