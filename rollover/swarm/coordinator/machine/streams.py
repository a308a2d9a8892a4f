"""Token streams by position: whatever arrives, however often and in whatever order, comes out once and in order.

What it keeps true: the pieces that come out, put one after the other, are the response from ``start`` on without a
gap or a repetition, and nothing comes out after the piece that ends it; what waits is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollover.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Decoded tokens of one call and one version, at their position in the response.

    Example: ``Piece(offset=300, token_ids=(31, 4), logprobs=(-0.2, -1.1), version=7, kv_version=7)`` are the response's
    tokens 300 and 301.
    """

    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    kv_version: int
    finish_reason: FinishReason | None = None
    num_prefilled_tokens: int = 0

    @property
    def end(self) -> int:
        """Return the position after its last token."""
        return self.offset + len(self.token_ids)

    @property
    def is_last(self) -> bool:
        """Return whether it ends the response."""
        return self.finish_reason is not None

    def behind(self, position: int) -> Piece:
        """Return the part from ``position`` on."""
        skipped = max(0, position - self.offset)
        if not skipped:
            return self
        return replace(
            self,
            offset=self.offset + skipped,
            token_ids=self.token_ids[skipped:],
            logprobs=self.logprobs[skipped:],
            num_prefilled_tokens=0,
        )


@dataclass(slots=True)
class TokenStream:
    """Puts the pieces of one call in order.

    Example: a stream that starts at 300 and meets pieces at 302, 300 and again 300 yields those at 300 and 302.
    """

    position: int
    """Position after the last token that came out."""
    max_early: int
    """Tokens that may wait for those before them. A piece for which there is no room is dropped: its member is asked
    for it again. Pieces that overlap could otherwise be many times as long as the response."""
    finish_reason: FinishReason | None = None
    """Reason for which it ended, once its end has come out."""
    num_early: int = 0
    """Tokens that wait for those before them."""
    _early: dict[int, Piece] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def arrived(self, piece: Piece) -> list[Piece]:
        """Return what can come out now that ``piece`` is here."""
        if self.is_over or (piece.end <= self.position and piece.finish_reason is None):
            return []
        self._keep(piece)
        out = []
        while not self.is_over and (early := self._next()) is not None:
            piece = early.behind(self.position)
            if piece.token_ids or piece.finish_reason is not None:
                out.append(piece)
            self.position = max(self.position, piece.end)
            self.finish_reason = piece.finish_reason
        if self.finish_reason is not None:
            self._early.clear()
            self.num_early = 0
        return out

    def _keep(self, piece: Piece) -> None:
        """Keep a piece until its turn, unless one at its position is longer or too many tokens wait already."""
        known = self._early.get(piece.offset)
        if known is not None and (known.end, known.is_last) >= (piece.end, piece.is_last):
            return
        num_early = self.num_early + len(piece.token_ids) - (0 if known is None else len(known.token_ids))
        if piece.offset <= self.position or num_early <= self.max_early:
            self._early[piece.offset] = piece
            self.num_early = num_early

    def _next(self) -> Piece | None:
        """Take out the earliest piece, if it continues from here."""
        offset = min(self._early, default=self.position + 1)
        if offset > self.position:
            return None
        piece = self._early.pop(offset)
        self.num_early -= len(piece.token_ids)
        return piece
