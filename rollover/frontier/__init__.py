"""Throughput against lag: strategies simulated side by side on the same lengths, and a recommendation."""
