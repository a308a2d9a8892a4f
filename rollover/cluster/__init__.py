"""An existing Ray cluster that hosts the trainer's ranks and engine servers."""
