"""The agent-loop manager: it takes verl's prompts for training, and leaves the prompts of evaluations to verl's own
manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollover.errors import ConfigError


class AgentLoopManager:
    """Replaces verl's manager of agent loops. Its prompts wait until ``rollover.integrations.verl.ReplayBuffer`` uses
    them. Raises ``ConfigError`` for a client that hides aborts, and for teachers, which are not supported here.

    Example: ``+actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollover.integrations.verl.AgentLoopManager``

    Args:
        config: verl's.
        llm_client: the plain client of its replicas.
        reward_loop_worker_handles: of its reward workers; ``None`` if its trainer computes rewards.
        evaluation: verl's own manager, for evaluations.
    """

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        *,
        teacher_client: Any = None,
        reward_loop_worker_handles: Sequence[Any] | None = None,
        evaluation: Any,
    ) -> None:
        if type(llm_client).__name__.startswith("FullyAsync"):
            raise ConfigError(
                f"verl's {type(llm_client).__name__} resumes stopped responses by itself, so what was decoded cannot be"
                " kept: use trainer.v1.trainer_mode=sync, whose client does not resume them"
            )
        if teacher_client is not None:
            raise ConfigError("distillation cannot be used with Rollover's agent-loop manager: no teacher is asked")
        self.config = config
        self.llm_client = llm_client
        self.reward_loop_worker_handles = reward_loop_worker_handles
        self.submitted: list[Any] = []
        """Batches of prompts that have not been taken yet."""
        self._evaluation = evaluation

    @classmethod
    def create(cls, config: Any, llm_client: Any, teacher_client: Any = None, **given: Any) -> AgentLoopManager:
        """Return a manager beside one of verl's own, which is created with the same arguments."""
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        evaluation = AgentLoopManagerTQ.create(
            config=config, llm_client=llm_client, teacher_client=teacher_client, **given
        )
        return cls(config, llm_client, teacher_client=teacher_client, evaluation=evaluation, **given)

    def generate_sequences(self, prompts: Any) -> None:
        """Keep prompts for training, or pass prompts of an evaluation on. Returns at once."""
        if "validate" in prompts and getattr(prompts["validate"], "data", prompts["validate"]):
            self._evaluation.generate_sequences(prompts)
        else:
            self.submitted.append(prompts)

    def take(self) -> list[Any]:
        """Return the batches of prompts that have arrived since the last call."""
        taken, self.submitted = self.submitted, []
        return taken
