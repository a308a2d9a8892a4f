"""The embedded engine behind HTTP: the server program, and the dialect by which a pool speaks to it."""
