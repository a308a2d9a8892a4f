"""How workers reach the coordinator: the seam between them, and its own port."""
