"""Asks a member of a swarm to decode again what another has sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.noise import seeds_around
from rollover.engine.reexecution import (
    MAX_DIFFERENT,
    Bounds,
    Comparison,
    Dispute,
    Doubt,
    SecondAnswer,
    Slack,
    Stretch,
    Verdict,
    logprobs_differ,
    tokens_verdict,
    verdict,
)
from rollover.swarm.coordinator.trust.directed import DirectedEngine


@dataclass(slots=True)
class SecondOpinion:
    """One member, asked about one stretch.

    Example: ``await SecondOpinion(swarm, "attic", stretch, Slack(logprobs=0.002)).comparison()``
    """

    swarm: DirectedEngine
    member: str
    stretch: Stretch
    slack: Slack
    num_tokens: int = 0
    """Decoded for it."""

    async def comparison(self) -> Comparison:
        """Have the member decode the stretch again. Raises ``EngineError`` when it is lost.

        What it decodes after a change of weights says nothing; so there may be fewer answers than tokens.
        """
        stretch, answers, outside = self.stretch, list[SecondAnswer](), list[SecondAnswer]()
        position, num_different = stretch.start, 0
        while position < stretch.end and num_different < MAX_DIFFERENT:
            for token, logprob in await self._drawn(stretch.call(_name(), position, stretch.end)):
                answers.append(SecondAnswer(position, token, logprob))
                position += 1
                if token != stretch.token(position - 1):
                    break
            else:
                break  # it has come to the end, or to other weights
            if (bounds := await self._bounds(position - 1)) is None:
                answers.pop()
                break
            num_different += 1
            if not bounds.holds(stretch.token(position - 1)):
                outside.append(answers[-1])
            if len(outside) > self.slack.max_outside:
                return Comparison(answers=tuple(answers), outside=tuple(outside), doubt=Doubt.TOKEN)
        doubt = Doubt.LOGPROBS if logprobs_differ(stretch, answers, self.slack) else None
        return Comparison(answers=tuple(answers), outside=tuple(outside), doubt=doubt)

    async def verdict(self, dispute: Dispute) -> Verdict | None:
        """Return who has lied, as this member sees it; ``None`` when it can no longer say. Raises ``EngineError``."""
        if dispute.comparison.doubt is Doubt.TOKEN:
            bounds = [await self._bounds(answer.position) for answer in dispute.answers]
            known = [each for each in bounds if each is not None]
            return tokens_verdict(dispute, known) if len(known) == len(bounds) else None
        own = await self.comparison()
        if len(own.answers) < len(dispute.comparison.answers):
            return None
        ours = {(answer.position, answer.token): answer.logprob for answer in own.answers}
        apart = [abs(a.logprob - p) for a in dispute.comparison.answers if (p := ours.get((a.position, a.token)))]
        second_is_wrong = bool(apart) and not sum(apart) / len(apart) <= self.slack.logprobs
        return verdict(first_is_wrong=own.doubt is not None, second_is_wrong=second_is_wrong)

    async def _bounds(self, position: int) -> Bounds | None:
        """Return the tokens between which the member draws one, with noise a little to either side."""
        seeds = seeds_around(self.stretch.request.seed, position, self.slack.noise)
        low, high = await asyncio.gather(*(self._one(position, seed) for seed in seeds))
        if (low is None and seeds[0] is not None) or (high is None and seeds[1] is not None):
            return None
        return Bounds(-1 if low is None else low, 2**32 if high is None else high)

    async def _one(self, position: int, seed: int | None) -> int | None:
        if seed is None:
            return None
        drawn = await self._drawn(self.stretch.call(_name(), position, position + 1, seed=seed))
        return drawn[0][0] if drawn else None

    async def _drawn(self, request: GenerateRequest) -> list[tuple[int, float]]:
        """Return tokens and log-probs that the member draws under the stretch's version, up to its next one."""
        drawn: list[tuple[int, float]] = []
        chunks: AsyncIterator[Chunk] = self.swarm.generate(request, only=self.member)
        async with aclosing(chunks) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                self.num_tokens += len(chunk.token_ids)
                if chunk.token_ids and (chunk.policy_version, chunk.kv_version) != (self.stretch.version,) * 2:
                    return drawn
                drawn += zip(chunk.token_ids, chunk.logprobs, strict=True)
                if self._differs(request, drawn):
                    return drawn
        return drawn

    def _differs(self, request: GenerateRequest, drawn: list[tuple[int, float]]) -> bool:
        """Return whether there is no use in decoding further."""
        start = len(request.response_ids)
        return any(token != self.stretch.token(start + i) for i, (token, _) in enumerate(drawn))


def _name() -> str:
    """Return a name of a call that looks like any other's."""
    return f"{secrets.token_hex(4)}.g{secrets.randbelow(2**32)}.{secrets.randbelow(8)}"
