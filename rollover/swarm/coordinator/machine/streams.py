"""Token streams by position: whatever arrives, however often and in whatever order, comes out once and in order.

What it keeps true: the pieces that come out, put one after the other, are the response from ``start`` on without a gap
or a repetition, and nothing comes out after the piece that ends it.
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
    finish_reason: FinishReason | None = None
    """Reason for which it ended, once its end has come out."""
    _early: dict[int, Piece] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def arrived(self, piece: Piece) -> list[Piece]:
        """Return what can come out now that ``piece`` is here."""
        if self.is_over or (piece.end <= self.position and piece.finish_reason is None):
            return []
        known = self._early.get(piece.offset)
        if known is None or (known.end, known.finish_reason is not None) < (piece.end, piece.finish_reason is not None):
            self._early[piece.offset] = piece
        out = []
        while not self.is_over and (offset := self._next()) is not None:
            piece = self._early.pop(offset).behind(self.position)
            if piece.token_ids or piece.finish_reason is not None:
                out.append(piece)
            self.position = max(self.position, piece.end)
            self.finish_reason = piece.finish_reason
        if self.finish_reason is not None:
            self._early.clear()
        return out

    @property
    def num_early(self) -> int:
        """Return the number of tokens that wait for those before them."""
        return sum(len(piece.token_ids) for piece in self._early.values())

    def _next(self) -> int | None:
        """Return where a piece begins that continues from here, the earliest."""
        return next((offset for offset in sorted(self._early) if offset <= self.position), None)
