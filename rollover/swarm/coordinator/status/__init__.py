"""This room shows people how a swarm is: the board, its file, its pages, and the record of weights on the way."""
