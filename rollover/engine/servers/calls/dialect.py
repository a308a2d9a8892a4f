"""The calls in which kinds of servers differ: ``vllm/dialect.py``, ``sglang/dialect.py`` and
``embedded/dialect.py`` implement them.

A dialect knows paths, bodies and answers. It knows no policy version, no other run and no other call: weights are named
by a label, and what to do with an answer is decided above it (``engine``, ``calls``, ``abort``, ``served_weights``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from rollover.engine.background import refused
from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.errors import EngineError, EngineTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The ways in which a server treats its calls, where kinds of servers or their settings differ.

    Example: vLLM with ``kv_on_update = "recompute"`` is ``Traits(keeps_calls=False, keeps_kv=False, silence_s=0.25)``:
    its running calls are aborted before a weight update.
    """

    keeps_calls: bool
    """Running calls continue after a weight update."""
    keeps_kv: bool
    """They keep the key-value cache that they had."""
    silence_s: float
    """Longest time after a pause that a token that was sampled before it may be on its way to us."""
    takes_adapters: bool = False
    """It can be given adapters alone."""
    aborts_all_at_once: bool = False
    """True when one request that aborts all open calls is better than one request for each."""
    is_seeded: bool = False
    """A rollout depends on its seed and the weights alone."""
    number_format: str | None = None
    """Number format of weights and arithmetic, if the server reports it; known once the model has been checked."""
    prefill_tokens_per_iteration: float | None = None
    """Same as in ``Capabilities``, if the server reports it; known once the model has been checked."""


class Dialect(Protocol):
    """Speaks to one server in the words of its kind. Each method raises ``EngineError`` when the server fails."""

    @property
    def traits(self) -> Traits: ...

    async def identify(self) -> None:
        """Check that the server is of this kind and can be controlled. Changes and decodes nothing there; the message
        of an ``EngineError`` says what to change."""
        ...

    async def check_model(self) -> int:
        """Check the model and the settings of a server that is ours and not paused. Returns its longest context."""
        ...

    def decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        """Send a call and stream what comes back."""
        ...

    async def ask_to_abort(self, request_ids: Collection[str]) -> None:
        """Ask for an end of some calls, at least one. Only their streams show whether it has worked."""
        ...

    async def ask_to_abort_all(self) -> None:
        """Ask, in a stronger way, for an end of every call of the server."""
        ...

    async def num_calls(self) -> int | None:
        """Return the number of calls that the server runs or has queued; ``None`` if it decodes no call that was
        given up."""
        ...

    async def check_health(self, *, decode: bool, timeout_s: float) -> None:
        """Raise ``EngineError`` unless the server answers and, with ``decode``, samples a token in time."""
        ...


class ServerDialect(Dialect, Protocol):
    """A dialect of servers whose weights and memory are the run's to change."""

    @property
    def weights(self) -> WeightEndpoint[Any]: ...

    async def freeze(self, *, keeps_kv: bool) -> None:
        """Stop sampling. Running calls stay; with ``keeps_kv`` their cache does too."""
        ...

    async def thaw(self) -> None:
        """Resume sampling."""
        ...


async def check_vocabulary(server: str, model: ModelFolder, take: Callable[[int], Awaitable[object]]) -> None:
    """See that a server takes the last token id of our vocabulary and not the next one; ``take`` sends it one.

    Raises ``EngineError`` when it serves another model.
    """
    size = model.vocab_size
    refusal = f"{server} does not take token {size - 1} of {model.path} (vocabulary of {size}): is it another model?"
    with refused(lambda e: EngineError(f"{refusal} {e}")):
        await take(size - 1)
    try:
        await take(size)
    except EngineTimeout:
        raise
    except EngineError:
        return
    raise EngineError(f"{server} has a larger vocabulary than the {size} of {model.path}: it is another model")
