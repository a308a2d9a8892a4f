"""Speaks HTTP to one server: requests, deadlines, answers and streams."""
