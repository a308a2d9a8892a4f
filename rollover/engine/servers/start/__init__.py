"""Starts servers and finds places for them."""
