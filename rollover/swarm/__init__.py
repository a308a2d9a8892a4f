"""Two swarms: trainer and inference engines on different, unreliable machines, joined over an ordinary network.

The trainer's side is an engine whose members dial in (``gateway``); the other side is any engine behind a connection
that it opens (``worker``). After Echo (arXiv 2508.05387) and ECHO-2 (arXiv 2602.02192).
"""
