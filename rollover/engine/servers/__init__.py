"""Engines behind HTTP: a client with deadlines, calls that stream, servers that are started and stopped."""
