"""This room holds what a coordinator and a worker say to each other: messages, addresses and tokens."""
