"""A Ray cluster that exists already, as the place of the trainer's ranks and of engine servers."""
