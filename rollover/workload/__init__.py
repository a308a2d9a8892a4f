"""Response lengths for simulations: drawn from a law, or replayed from a trace. Nothing here needs torch."""
