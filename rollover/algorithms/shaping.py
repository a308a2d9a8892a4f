"""Reward shaping: the overlong punishment that an algorithm adds to a task's reward. No torch."""

from __future__ import annotations

from rollover.algorithms.registry import Algorithm


def overlong_punishment(algorithm: Algorithm, max_response_tokens: int, num_tokens: int) -> float:
    """Compute DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4) of a response of ``num_tokens``.

    With ``Lc = overlong_buffer * max_response_tokens`` it is 0 up to ``max - Lc`` tokens and falls linearly to -1 at
    ``max``. A truncated response has ``max`` tokens.
    """
    if algorithm.overlong_buffer == 0:
        return 0.0
    buffer_tokens = algorithm.overlong_buffer * max_response_tokens
    return -min(max((num_tokens - (max_response_tokens - buffer_tokens)) / buffer_tokens, 0.0), 1.0)
