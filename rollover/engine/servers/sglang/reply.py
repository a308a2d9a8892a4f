"""The stream of one ``/generate`` call, read by count. Pure.

Invariants: each token is taken once, in order, whatever the events repeat; its id is named twice by the server,
once with its log-prob, and both agree; it is labelled with the weights that the server says have sampled it, and only
when that is certain.

Events carry all tokens so far, or (``--incremental-streaming-output``) those since the last event; an abort in the
server's queue repeats the last one. ``completion_tokens`` is right in all cases. Which weights sampled which tokens
stands in the last event alone (``weight_versions``): the ``weight_version`` of an earlier one holds for the moment in
which it was sent.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable

import numpy as np

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.calls.call import Delta
from rollover.engine.servers.sglang.answers import Generation, Meta, ReportedEnd, WeightSpan
from rollover.errors import EngineError
from rollover.kept_codec import encode_kept
from rollover.routes import expert_bytes
from rollover.types import FinishReason

_NO_TOKENS = "Abort before prefill"
"""Begin of the message of an abort whose tokens and log-probs mean nothing."""


class Reply:
    """One call's answer so far.

    Args:
        label: of the weights in force when the call was sent.
        incremental: events carry new tokens only.
        num_experts: of a layer of the model.
        shown: makes a text of the server's fit for a message.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        label: str,
        incremental: bool,
        num_experts: int = 0,
        shown: Callable[[str], str] = str,
    ) -> None:
        self._request = request
        self._label = label
        self._shown = shown
        self._incremental = incremental
        self._num_experts = num_experts
        self._held: list[tuple[int, float, bytes]] = []
        """Tokens that have come and are not labelled yet."""
        self._num_labelled = 0
        self._last = request.response_ids[-1] if request.response_ids else None

    @property
    def num_tokens(self) -> int:
        return self._num_labelled + len(self._held)

    def read(self, event: Generation, *, certain: bool) -> list[Delta]:
        """Read an event. Returns what it adds, with the label of the weights that sampled it.

        Args:
            certain: no other weights can have sampled what has come until now; else it is held until the last event.

        Raises ``EngineError`` when the event contradicts itself, an earlier one, or what was asked for, and when the
        server says that it has failed.
        """
        meta, reason = event.meta_info, event.meta_info.finish_reason
        if reason is not None:
            self._refuse_failure(reason)
        if reason is None or not (reason.message or "").startswith(_NO_TOKENS):
            self._take(event)
        wants_routes = self._request.params.returns_routes
        if reason is not None:
            spans = _spans(meta, self.num_tokens, self._shown)
            routes = self._routes(meta, spans) if wants_routes and self.num_tokens else ()
            return self._labelled(spans, self._finish_reason(reason), routes)
        if not certain or not self._held or wants_routes:  # routes come last
            return []
        return self._labelled([WeightSpan(version=self._label, start=0, end=self.num_tokens)], None)

    def _take(self, event: Generation) -> None:
        total, seen = event.meta_info.completion_tokens, self.num_tokens
        if total is None or total < seen:
            raise EngineError(f"{self._name}: the server counts {total} tokens after {seen} have come")
        first, last = (0, total - seen) if self._incremental else (seen, total)
        ids = event.output_ids[first:last]
        pairs = (event.meta_info.output_token_logprobs or [])[first:last]
        tokens = [(token, logprob, b"") for logprob, token, _ in pairs if logprob is not None]
        if len(ids) < last - first or [token for token, *_ in tokens] != ids:
            raise EngineError(
                f"{self._name}: the server counts {total} tokens, {seen} of them sent before, but sent the tokens"
                f" {ids[:8]} with the log-probs {pairs[:8]}"
            )
        self._held += self._of_kept(event.meta_info, ids, first, last) if self._request.params.returns_kept else tokens
        self._last = ids[-1] if ids else self._last

    def _of_kept(self, meta: Meta, ids: list[int], first: int, last: int) -> list[tuple[int, float, bytes]]:
        """Return new tokens with their log-probs among the kept ones, and the kept sets."""
        masks = [sorted(mask) for mask in (meta.output_token_sampling_mask or [])[first:last]]
        logprobs = (meta.output_token_sampling_logprobs or [])[first:last]
        if not len(masks) == len(logprobs) == len(ids):
            raise EngineError(
                f"{self._name}: the server sent {len(ids)} tokens with {len(masks)} kept sets and {len(logprobs)}"
                " log-probs among these: use SGLang 0.5.23 or later"
            )
        counts = np.array([len(mask) for mask in masks], dtype=np.int64)
        kept = encode_kept(counts, np.array([token for mask in masks for token in mask], dtype=np.int64))
        return list(zip(ids, logprobs, kept, strict=True))

    def _routes(self, meta: Meta, spans: list[WeightSpan]) -> tuple[bytes, ...]:
        """Return the route of each token of the reply, whose rows the server gives."""
        if meta.routed_experts is None:
            raise EngineError(
                f"{self._name}: the server does not return the experts that it chose: start it with"
                " --enable-return-routed-experts (engine.launch_args)"
            )
        if len({span.version for span in spans}) > 1:
            raise EngineError(
                f"{self._name}: its weights changed while it ran, after which the server returns the experts of the new"
                " weights for tokens that the old ones sampled: use a strategy that stops for new weights"
            )
        try:
            ids = np.frombuffer(b64decode(meta.routed_experts, validate=True), dtype="<i4")
        except ValueError as e:
            raise EngineError(f"{self._name}: the server sent experts that cannot be read: {e}") from None
        if len(ids) % self.num_tokens or ids.min(initial=0) < 0 or ids.max(initial=0) >= self._num_experts:
            raise EngineError(
                f"{self._name}: the server sent {len(ids)} ids from {ids.min(initial=0)} to {ids.max(initial=0)} as the"
                f" experts of {self.num_tokens} tokens of a model with {self._num_experts} experts"
            )
        rows = ids.reshape(self.num_tokens, -1).astype(f"<u{expert_bytes(self._num_experts)}")
        return tuple(row.tobytes() for row in rows)

    def _labelled(
        self, spans: list[WeightSpan], reason: FinishReason | None, routes: tuple[bytes, ...] = ()
    ) -> list[Delta]:
        """Return all that is held, cut where the weights changed; ``reason`` goes with the last piece. Routes come with
        a whole reply, of one piece."""
        pieces = []
        for span in spans:
            old, new = max(span.start, self._num_labelled), span.end
            if span.start < self._num_labelled and span.version != self._label:
                raise EngineError(
                    f"{self._name}: the server says that weights {self._shown(span.version)!r} sampled its token"
                    f" {span.start}, which came while weights {self._label!r} were loaded: another program changes them"
                )
            if new > old:
                start = self._num_labelled
                pieces.append((span.version, self._held[old - start : new - start]))
        self._num_labelled, self._held = self.num_tokens, []
        deltas = [
            Delta(
                token_ids=tuple(token for token, *_ in tokens),
                logprobs=tuple(logprob for _, logprob, _ in tokens),
                kept=tuple(kept for *_, kept in tokens) if self._request.params.returns_kept else (),
                routes=routes,
                finish_reason=reason if number == len(pieces) else None,
                label=label,
            )
            for number, (label, tokens) in enumerate(pieces, 1)
        ]
        return deltas or ([] if reason is None else [Delta(token_ids=(), logprobs=(), finish_reason=reason)])

    def _refuse_failure(self, reason: ReportedEnd) -> None:
        """Raise ``EngineError`` for a failure. A rejection or an inner error has the type ``abort`` too; a status or an
        error type tells it apart."""
        if failure := reason.status_code or reason.err_type:
            raise EngineError(
                f"{self._name}: the server ended it with {failure}: {reason.message or 'no reason given'}"
            )

    def _finish_reason(self, reason: ReportedEnd) -> FinishReason:
        params, matched = self._request.params, reason.matched
        match reason.type:
            case "length":
                return FinishReason.LENGTH
            case "stop":
                if matched in params.stop_token_ids or matched in params.stop_strings:
                    return FinishReason.STOP
                raise EngineError(
                    f"{self._name}: the server stopped at {self._shown(repr(matched))}, which was not asked for: it"
                    " is an end token of the server's own model folder, or its computation has failed"
                )
            case "abort":  # it hides a finish in the same iteration
                if self._last in params.stop_token_ids:
                    return FinishReason.STOP
                if len(self._request.response_ids) + self.num_tokens == params.max_new_tokens:
                    return FinishReason.LENGTH
                return FinishReason.ABORT
        raise EngineError(
            f"{self._name}: the server gave the finish reason {reason.type!r}; only stop, length and abort are known"
        )

    @property
    def _name(self) -> str:
        return self._request.request_id


def _spans(meta: Meta, num_tokens: int, shown: Callable[[str], str]) -> list[WeightSpan]:
    """Return the spans, checked to cover the output without a gap."""
    spans = meta.weight_versions or []
    borders = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != borders[:-1] or borders[-1] != num_tokens or borders != sorted(borders):
        found = ", ".join(f"{shown(s.version)!r} {s.start} to {s.end}" for s in spans[:4]) or "none"
        raise EngineError(
            f"the server's weight_versions must cover the {num_tokens} tokens of its response one after the other, but"
            f" they are: {found}"
        )
    return spans
