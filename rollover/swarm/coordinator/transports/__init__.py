"""The transport between workers and the coordinator: its contract, and the port that keeps it."""
