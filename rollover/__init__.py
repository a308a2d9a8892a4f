"""Rollover: reinforcement-learning post-training of language models in which no rollout is wasted."""

__version__ = "0.1.0"
