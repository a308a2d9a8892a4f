"""What the server imports from which the processes of benchmarks are forked (``forked.py``)."""

from forked import preload

preload()
