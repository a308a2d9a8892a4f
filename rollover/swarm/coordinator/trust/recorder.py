"""Records the calls of a swarm that may be decoded again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollover.engine.base import GenerateRequest
from rollover.engine.reexecution import Lot, Stretch, can_be_compared
from rollover.swarm.coordinator.machine.effects import Deliver
from rollover.swarm.coordinator.machine.streams import Piece


@dataclass(slots=True)
class _RecordedCall:
    request: GenerateRequest
    pieces: list[tuple[str, Piece, bool]] = field(default_factory=list)
    """With the member that sampled each, and whether another can decode it again."""


class Recorder:
    """Collects the tokens of the calls that a lot draws, and cuts them into stretches when a call has ended.

    Example: a call that changed weights on its way makes two stretches.
    """

    def __init__(self, lot: Lot) -> None:
        self._lot = lot
        self._recordings: dict[str, _RecordedCall] = {}

    def opened(self, request: GenerateRequest) -> None:
        """Begin to record a call, where its sample is drawn."""
        if can_be_compared(request) and self._lot.draws(request.sample_key):
            self._recordings[request.request_id] = _RecordedCall(request)

    def delivered(self, effect: Deliver, *, is_seeded: bool) -> None:
        """Take note of tokens. ``is_seeded``: their member draws by seed, as it says when they come."""
        piece = effect.piece
        if (recording := self._recordings.get(effect.call_id)) is not None and piece.token_ids:
            recording.pieces.append((effect.member, piece, is_seeded and piece.kv_version == piece.version))

    def ended(self, call_id: str) -> list[Stretch]:
        """Return the stretches of a call that has ended. Tokens that were not drawn by seed are in none, and neither
        are those that attended to a cache of older weights: no other member has that cache."""
        recording = self._recordings.pop(call_id, None)
        if recording is None:
            return []
        stretches: list[Stretch] = []
        before, response = None, recording.request.response_ids
        for member, piece, can_be_repeated in recording.pieces:
            origin = (member, piece.version) if can_be_repeated else None
            if origin is not None and origin == before:
                last = stretches.pop()
                token_ids, logprobs = (*last.token_ids, *piece.token_ids), (*last.logprobs, *piece.logprobs)
                stretches.append(replace(last, token_ids=token_ids, logprobs=logprobs))
            elif origin is not None:
                request = replace(recording.request, response_ids=response)
                stretches.append(
                    Stretch(
                        request=request,
                        engine=member,
                        version=piece.version,
                        token_ids=piece.token_ids,
                        logprobs=piece.logprobs,
                    )
                )
            before, response = origin, (*response, *piece.token_ids)
        return stretches
