"""The ways for workers to reach the coordinator: its own port, or an existing NATS cluster."""
