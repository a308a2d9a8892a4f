"""Workers that come over a NATS cluster."""
