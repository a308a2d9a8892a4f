"""Policy-gradient algorithms as rows of one registry."""
