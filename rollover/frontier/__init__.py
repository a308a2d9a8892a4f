"""Throughput against lag: strategies simulated side by side on the same lengths, and what to make of it."""
