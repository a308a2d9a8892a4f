"""Server-sent events from the bytes of a response, however the network has cut them. Pure."""

from __future__ import annotations

import codecs

MAX_EVENT_CHARS = 1 << 24
"""An event longer than this is no stream of tokens."""


class EventDecoder:
    """The ``data`` of each complete event; an event that the end of the stream cuts off never happened.

    Raises ``ValueError`` when the bytes are no event stream.
    """

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")()
        self._line: list[str] = []
        """Pieces of a line that has not ended."""
        self._data: list[str] = []
        self._num_chars = 0
        """Characters held in both."""

    @property
    def inside_event(self) -> bool:
        """Return True when the bytes so far end in the middle of an event."""
        return self._num_chars > 0 or bool(self._data)

    def feed(self, received: bytes) -> list[str]:
        """Return the data of the events that ``received`` completes."""
        *ends, rest = self._text.decode(received).split("\n")
        events = []
        for end in ends:
            line = "".join([*self._line, end]).removesuffix("\r")
            self._line = []
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        if rest:
            self._line.append(rest)
        self._num_chars = len(rest) + (self._num_chars if not ends else sum(map(len, self._data)))
        if self._num_chars > MAX_EVENT_CHARS:
            raise ValueError(f"an event of more than {MAX_EVENT_CHARS} characters")
        return events
