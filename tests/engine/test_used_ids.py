"""An id is used once, and a run of any length remembers a bounded number of ids."""

from __future__ import annotations

import pytest

from rollover.engine.used_ids import NUM_REMEMBERED, UsedIds
from rollover.errors import EngineError


def test_an_id_is_refused_while_its_call_is_open_and_long_after() -> None:
    open_calls = {"old#0.": None}
    ids = UsedIds(open_calls)
    ids.claim("new#0.")
    for used in ("old#0.", "new#0."):
        with pytest.raises(EngineError, match=f"request id '{used}' was used before"):
            ids.claim(used)
        with pytest.raises(EngineError, match="each generation call needs its own"):
            ids.check(used)
    ids.check("other#0.")
    ids.claim("other#0.")  # a check uses nothing


def test_a_bounded_number_is_remembered_and_open_calls_keep_their_id() -> None:
    open_calls = {"endless#0.": None}
    ids = UsedIds(open_calls)
    for number in range(NUM_REMEMBERED + 1000):
        ids.claim(f"g{number}.0#{number}.")
    assert len(ids) == NUM_REMEMBERED
    for used in ("endless#0.", f"g{1000}.0#{1000}.", f"g{NUM_REMEMBERED + 999}.0#{NUM_REMEMBERED + 999}."):
        with pytest.raises(EngineError, match="was used before"):
            ids.claim(used)
