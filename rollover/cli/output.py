"""Output that outlasts its reader: a pager or ``head`` that goes away, or a full disk, does not end the work."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Output(io.FileIO):
    """The file of a standard stream. Once it cannot be written, what is written goes nowhere."""

    def __init__(self, stream: io.TextIOWrapper, name: str) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._name = name

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            has_gone = error.errno in (errno.EPIPE, errno.EIO)  # the latter is a terminal's
            why = "the reader of the output has gone" if has_gone else f"stdout cannot be written ({error.strerror})"
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self._name == "stdout":
            print(f"{why}: continuing without it", file=sys.stderr, flush=True)
        return memoryview(data).nbytes


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within this context, stdout and stderr outlast their readers, and print characters that their encoding lacks as
    escapes."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if stream is None:  # the program was started without it: otherwise some other file would get its number
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper) and isinstance(_file_of(stream), io.FileIO):
            stream.flush()
            file = _Output(stream, name)
            lasting = io.TextIOWrapper(
                file if stream.buffer is _file_of(stream) else io.BufferedWriter(file),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            if stream is None:
                getattr(sys, name).close()
            setattr(sys, name, stream)


def _file_of(stream: io.TextIOWrapper) -> Any:
    """Return the file of a stream, which is unbuffered under ``PYTHONUNBUFFERED``."""
    return getattr(stream.buffer, "raw", stream.buffer)
