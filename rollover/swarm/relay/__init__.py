"""This room makes a relay: a caching nginx between trainer and workers, with a configuration that is written for it."""
