"""Several servers as one engine."""
