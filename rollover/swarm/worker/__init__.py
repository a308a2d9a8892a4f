"""This room is the worker's side: any engine of ours behind a connection that it opens itself."""
