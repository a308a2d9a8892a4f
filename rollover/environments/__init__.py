"""How responses are answered and scored."""
