"""An existing NATS cluster as the way between a coordinator and its workers; the protocol page has "Over NATS"."""
