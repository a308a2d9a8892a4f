"""Measures how far the log-probs that engines recorded are from the trainer's own.

Looked at are tokens that the weights at the start of the step sampled, with a cache of theirs: there both sides
computed the same number, and differ by rounding alone. It costs no forward pass, for the step has the trainer's
log-probs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollover.types import Drift, Trajectory


class DriftMeter:
    """Collects over the rows of a batch; ``trajectories`` are in the order of its tokens."""

    def __init__(self, trajectories: Sequence[Trajectory], *, step: int, device: torch.device) -> None:
        segments = [s for t in trajectories for s in t.segments]
        self._engines = sorted({s.engine for s in segments if _is_fresh(s.policy_version, s.kv_version, step)})
        codes = {name: code for code, name in enumerate(self._engines)}
        codes_S = [codes[s.engine] if _is_fresh(s.policy_version, s.kv_version, step) else -1 for s in segments]
        codes_T = np.repeat(np.array(codes_S, dtype=np.int64), [len(s.token_ids) for s in segments])
        self._code_T = torch.from_numpy(codes_T).to(device)
        self._seen_E = torch.zeros(len(self._engines), dtype=torch.float64, device=device)
        self._sum_E = torch.zeros_like(self._seen_E)

    def add(self, token_T: Tensor, rollout_logprobs_T: Tensor, proximal_logprobs_T: Tensor) -> None:
        """The tokens of one row, by their numbers in the batch. ``proximal_logprobs_T`` are those of the weights at the
        start of the step."""
        if not self._engines:
            return
        code_T = self._code_T[token_T]
        distance_T = (proximal_logprobs_T.detach() - rollout_logprobs_T).abs().double()
        for code in range(len(self._engines)):
            fresh_T = code_T == code
            self._seen_E[code] += fresh_T.sum()
            self._sum_E[code] += distance_T.masked_fill(~fresh_T, 0.0).sum()

    def measured(self) -> dict[str, Drift]:
        """By engine, where it has such tokens."""
        found = zip(self._engines, self._seen_E.tolist(), self._sum_E.tolist(), strict=True)
        return {name: Drift(int(seen), total / seen) for name, seen, total in found if seen}


def _is_fresh(policy_version: int, kv_version: int, step: int) -> bool:
    return policy_version == kv_version == step
