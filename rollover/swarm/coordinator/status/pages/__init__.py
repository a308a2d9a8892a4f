"""The live page of a swarm, on a listener of its own that this machine alone can reach."""
