"""The environment of episodes, which acts between their turns, as the driver sees it."""

from __future__ import annotations

from typing import Protocol

from rollover.types import Observation, Prompt, SampleId, Trajectory


class Environment(Protocol):
    """Answers the turns of episodes: with the results of tools, say. It has deadlines of its own.

    Example: a calculator answers the turn ``"12+34<call>"`` with an observation whose text is ``"46"``, after which the
    sample goes on, and the turn ``"#### 46"`` with an observation that ends the episode.
    """

    def turn_limit(self, prompt: Prompt) -> int | None:
        """Return the largest number of tokens of a turn; ``None`` if samples of this prompt are no episodes."""
        ...

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        """Answer the last turn of a trajectory. Whatever is missing of the episode, as after a restart, is made up by
        acting on its earlier turns again.

        Raises:
            RewardError: there is no answer, and the sample is given up; with the reason.
            RolloverError: a mistake that would affect every other episode too.
        """
        ...

    def leave(self, sample_id: SampleId) -> None:
        """Forget an episode, which is over or was given up."""
        ...


class NoEnvironment:
    """The environment of a run without episodes."""

    def turn_limit(self, prompt: Prompt) -> int | None:
        return None

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        raise NotImplementedError(f"{trajectory.sample_id} is no episode")

    def leave(self, sample_id: SampleId) -> None:
        pass
