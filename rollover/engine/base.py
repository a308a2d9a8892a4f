"""The ``Engine`` protocol: what rollout asks of an inference engine. ``WeightTarget`` stands in ``weights/base.py``.

Laws every implementation keeps (``tests/engine/contract.py`` proves them):

* Ids in, ids out: nothing is re-tokenised, the sampled stop token is included.
* Each token carries the log-probability of the distribution it was drawn from and the version of the
  weights that drew it.
* ``generate`` ends with exactly one chunk that has a ``finish_reason``; on an abort that chunk holds what
  was decoded and not yet streamed, possibly nothing. A finish that races with an abort wins. Callers take an abort
  that they have not asked for as a failure.
* ``abort`` returns once each of those calls has put its final chunk on its stream. Unknown and finished ids
  are no error, an empty collection stops nothing.
* After ``pause`` returns no token is sampled until ``resume``. Running calls stay open across a weight load and
  continue afterwards under the new version when ``Capabilities.in_flight_update``; otherwise the caller aborts them
  first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rollover.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation call: a sample decodes until it ends, reaches its limit or is aborted.

    Examples:
        A sample that has 300 tokens of at most 512 continues after them:

        >>> params = SamplingParams(max_new_tokens=512)
        >>> request = GenerateRequest(request_id="g7.0#2", sample_key="g7.0", prompt_key="g7", prompt_ids=(15, 10, 22),
        ...     response_ids=(9,) * 300, params=params, seed=3)
        >>> request.params.max_new_tokens - len(request.response_ids)
        212
    """

    request_id: str
    """Unique per generation call."""
    sample_key: str
    """The same for all generation calls of a sample; an engine that keeps the cache on abort finds it by this key."""
    prompt_key: str
    """The same for all siblings of a prompt; an engine may prefill the prompt once for all of them."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    """Tokens decoded in earlier calls; fewer than ``params.max_new_tokens``."""
    params: SamplingParams
    seed: int
    """Keys the sampling noise. In an engine declaring ``seeded`` the noise at response position p depends on
    (seed, p) alone, so the same seed is sent on every generation call of a sample."""
    least_version: int = 0
    """No token may be sampled from older weights. Engines whose members change weights each in their own time choose
    one by it; where all serve one version it is met anyway."""
    due_version: int | None = None
    """A training step waits for the response once this version of the weights is published. ``None``: no step will, as
    far as is known. Engines with members of unlike speed choose one by it; others need not look at it."""
    is_journaled: bool = False
    """The caller writes the tokens down and says when; until then an engine that can keeps them, to hand them over
    again after a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Newly decoded tokens of one policy version. Never cumulative.

    Examples:
        >>> chunk = Chunk(token_ids=(31, 4), logprobs=(-0.2, -1.1), policy_version=7, kv_version=7)
        >>> chunk.finish_reason is None  # more follows
        True
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    kv_version: int
    """Oldest version in the key-value cache these tokens attended to."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a call and on no other."""
    num_prefilled_tokens: int = 0
    """Response tokens re-prefilled to start this call, with vLLM also those in its cache; on its first chunk only.
    Earlier turns of an episode are a part of the prompt."""
    engine: str = ""
    """Name of the engine that sampled the tokens; a pool of several fills it in."""
    kept: tuple[bytes, ...] = ()
    """Kept set of each token (``rollover.kept``) if the request wants them, otherwise empty."""
    routes: tuple[bytes, ...] = ()
    """Route of each token (``rollover.routes``) if the request wants them, otherwise empty."""


GPU_PREFILL_TOKENS = 150.0
"""Tokens prefilled in the time of a decode iteration, which reads each weight, two bytes, once. A prefilled token takes
two operations per weight, and a GPU computes some 300 while it reads a byte, half of that in practice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine beyond the contract. Declared, never faked.

    Examples:
        What is not declared is not expected:

        >>> Capabilities(max_running=64, max_context_tokens=8192, in_flight_update=True).keeps_kv_on_abort
        False
    """

    max_running: int
    """Samples it decodes at the same time; the driver never has more calls open."""
    max_context_tokens: int
    """Prompt plus response."""
    keeps_kv_on_abort: bool = False
    """An aborted sample that comes back under the same weights needs no prefill (room permitting)."""
    in_flight_update: bool = False
    """Running calls survive a weight load."""
    seeded: bool = False
    """A rollout depends on its seed and the weights alone: not on batching, parking or order."""
    number_format: str = "float32"
    """Number format of its weights and arithmetic, by torch's name; the coarser one if they differ."""
    prefill_tokens_per_iteration: float = GPU_PREFILL_TOKENS
    """Tokens it prefills in the time of a decode iteration of few samples, to an order of magnitude; infinite where
    caches outlive new weights, so that what was stopped is not prefilled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started; ``num_running``, ``num_waiting`` and ``kv_bytes`` are of this moment.

    Examples:
        Eight prompts of 576 tokens that begin with the same 512, just prefilled: 575 tokens, then 63 for each of the
        others, which found the rest in the cache:

        >>> stats = EngineStats(num_running=8, num_waiting=0, policy_version=3, prefilled_tokens=575 + 7 * 63,
        ...     cached_tokens=7 * 512)
        >>> stats.prefilled_tokens + stats.cached_tokens == 8 * 575
        True
    """

    num_running: int
    num_waiting: int
    policy_version: int
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    """All tokens that were run through prefill, prompts included."""
    reprefilled_tokens: int = 0
    """Prefilled tokens whose cache had existed before and was lost (eviction, weight update)."""
    cached_tokens: int = 0
    """Tokens that calls found in the prefix cache when they started, and that were not prefilled for them."""
    decode_iterations: int = 0
    busy_s: float = 0.0
    """Time spent in prefill and decode."""
    kv_bytes: int = 0
    """Key-value cache of running samples; what others can find beside it is evicted when room is needed."""


class Engine(Protocol):
    """An engine decodes generation calls.

    Example: ``async for chunk in engine.generate(request)`` takes the tokens of one call; the last chunk has a
    ``finish_reason``.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream one generation call. Raises ``EngineError`` when the engine fails; the chunks seen so far stay valid.
        Closing the iterator early aborts the call."""
        ...

    async def abort(self, request_ids: Collection[str]) -> None: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Free everything; open calls end with ``abort``."""
        ...


class Sleeps(Protocol):
    """An engine that can give its memory back while a trainer on the same devices trains.

    Asleep it holds neither weights nor cache and samples nothing; calls that are opened meanwhile wait. It wakes when
    it is given weights: ``pause``, ``load``, ``resume``, as ever.

    Example: ``await engine.sleep()``, a step of the trainer, then ``load(7, source)``: what is sampled from now on is
    of version 7, and every prefix is prefilled again.
    """

    async def sleep(self) -> None:
        """Give back the memory of weights and cache. No call may be open. An engine that sleeps already stays asleep.

        Raises ``EngineError`` naming who holds memory still, after a deadline at the latest.
        """
        ...


class EngineMetrics(Protocol):
    """An engine that adds measurements of its own to the metrics of a training step, and shows people all of them
    beside its own state."""

    def take_metrics(self) -> Mapping[str, float]:
        """Return what was measured since the last call, by metric name."""
        ...

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        ...


class FirstCall(NamedTuple):
    """The first call of a group, as a place for it is asked for."""

    least_version: int
    max_new_tokens: int
    num_waiting: int = 0
    """Samples that are to be placed beside this one."""
    max_staleness: int | None = None
    """The step that trains the sample waits for it once this number of versions has been published after the version
    under which the call begins. ``None``: no step will wait for it, as far as is known."""


class CallPlacement(Protocol):
    """An engine whose members come and go and change weights each in its own time says where a call would run.

    Example: ``reserve("g7.0.", FirstCall(3, 512))`` returns 4: a call of this sample that is opened now is with a
    member that serves version 4.
    """

    def room(self) -> int:
        """Return how many calls the members decode at the same time, all together."""
        ...

    def takes_one(self, call: FirstCall) -> bool:
        """Return whether ``reserve`` would promise a place to some sample now."""
        ...

    def reserve(self, sample_key: str, call: FirstCall) -> int | None:
        """Promise a place to the call that the caller opens for this sample next. Returns the version that the member
        serves; ``None`` when the sample should wait: every other sample should then wait too, until something changes
        other than that fewer of them wait."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever a sample that was to wait may be placed."""
        ...

    def on_distrust(self, listener: Callable[[str], None]) -> None:
        """Have ``listener`` called with the name of each member that is found not to sample as it says, at any time:
        what it has sampled is not to be trained."""
        ...

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Say that the first ``num_tokens`` tokens of each of these samples, given by sample key, are written down."""
        ...

    def run_ended(self) -> None:
        """Say that the run is over: no call will come any more, and members need not come back."""
        ...
