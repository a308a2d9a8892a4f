"""Inference engines: the two protocols (``base``) and their implementations."""
