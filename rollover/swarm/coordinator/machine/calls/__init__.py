"""The open calls of a swarm: each with its tokens, its member, and what of it has yet to be written down."""
