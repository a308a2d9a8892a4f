"""The weights and the memory of one server, and the run to which they belong."""
