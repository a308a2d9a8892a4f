"""The generation calls of one server, and the dialect in which they are made."""
