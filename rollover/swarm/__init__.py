"""Two swarms: trainer and inference engines on different, unreliable machines, joined over an ordinary network.

The trainer's side (``coordinator``) is an engine whose members dial in; the other side (``worker``) is any engine
behind a connection that it opens. They speak the messages in ``wire``, and weights travel as files (``publication``).
After Echo (arXiv 2508.05387) and ECHO-2 (arXiv 2602.02192).
"""
