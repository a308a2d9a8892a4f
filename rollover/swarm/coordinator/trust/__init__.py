"""This room says who may take part, and finds out who does not sample what it says."""
