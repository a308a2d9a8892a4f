"""This room is the trainer's side: the state machine of members and calls, and the shell that makes it an engine."""
