"""This room is the trainer's side as an engine: the shell around the state machine, and the rooms that it stands on."""
