"""Workloads by name. Their parameters are assumptions in the range that published runs suggest; no fitted length tables
have been published. Fit your own with ``rollover workload fit``."""

from __future__ import annotations

from rollover.workload.law import LengthLaw

PRESETS: dict[str, LengthLaw] = {
    # Reasoning models distilled from R1, 1.5B, on competition mathematics.
    "r1-16k": LengthLaw(
        median_tokens=4500, sigma=0.85, icc=0.5, loop_probability=0.03, cap_tokens=16384, min_tokens=64
    ),
    # Qwen3-4B thinking.
    "qwen3-16k": LengthLaw(
        median_tokens=7000, sigma=0.60, icc=0.6, loop_probability=0.02, cap_tokens=16384, min_tokens=64
    ),
    # A tail as heavy as a 32k budget lets it be.
    "heavy-32k": LengthLaw(
        median_tokens=4000, sigma=1.10, icc=0.5, loop_probability=0.02, cap_tokens=32768, min_tokens=64
    ),
    # Short answers that seldom hit the cap.
    "light-8k": LengthLaw(
        median_tokens=1200, sigma=0.60, icc=0.5, loop_probability=0.003, cap_tokens=8192, min_tokens=64
    ),
}
ALIASES = {"math-16k": "r1-16k"}
"""Names of purposes, each with the preset that it stands for."""
