"""Programs that decode a load and print what it took as one JSON line: ``{"seconds": [...], "versions": {...}}``.

Each runs alone, in a process (and, where it needs one, an environment) of its own: ``python contenders/NAME.py LOAD
--repeats N``. The first, shorter round warms up and is not counted.
"""
