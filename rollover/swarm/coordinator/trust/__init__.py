"""The workers that may join a run: tokens, and the list of workers that were sent away."""
