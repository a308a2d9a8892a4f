"""Runs the program of one episode: ``python -m rollover.environments.program DESCRIPTOR``, started by
``rollover.environments.episodes.agents``.

The one line in has the program, its environment variables and the row. The row is also what the program reads from its
standard input. The keeper kills whatever the program has started.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from rollover.environments.channel import Channel
from rollover.environments.keeper import keep, limit_memory

MOST_ROW_BYTES = 100_000
"""Longest row that fits into an environment variable."""


def main() -> None:
    channel = Channel(int(sys.argv[1]))
    given = channel.receive()
    channel.send({"ready": True})
    row = json.dumps(given["row"], ensure_ascii=False)
    with tempfile.TemporaryFile() as file:
        file.write(row.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    variables = given["variables"] | ({"ROLLOVER_ROW": row} if len(row.encode()) <= MOST_ROW_BYTES else {})
    limit_memory(given["max_memory_gib"])
    if given["function"] is None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        try:
            os.execvpe(given["command"][0], given["command"], variables)
        except OSError as error:  # a script without a first line that names its interpreter, say
            print(f"environment.command: {given['command'][0]} cannot be started: {error.strerror}", file=sys.stderr)
            os._exit(126)  # as a shell does
    os.environ.update({name: variables[name] for name in variables.keys() - {"PYTHONPATH", "OMP_NUM_THREADS"}})
    try:
        _call(given["function"], given["row"])
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does for a script
            print(end.code, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else bool(end.code))


def _call(path: str, row: Mapping[str, Any]) -> None:
    from rollover.environments.user_function import import_function

    done = import_function(path)(row)
    if inspect.isawaitable(done):
        import asyncio  # which takes longer than all else that is imported here

        async def awaited() -> None:
            await done

        asyncio.run(awaited())


if __name__ == "__main__":
    keep(main)
