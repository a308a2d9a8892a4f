"""The scheduler inside slime: ``generate_rollout`` for ``--rollout-function-path`` and ``DataSource`` for
``--data-source-path``."""

from rollover.integrations.slime.plugin import DataSource, generate_rollout

__all__ = ["DataSource", "generate_rollout"]
