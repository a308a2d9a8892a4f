"""An id is used once, and a run of any length remembers a bounded number of ids."""

from __future__ import annotations

import pytest

from rollover.engine.used_ids import NUM_REMEMBERED, UsedIds
from rollover.errors import EngineError


def test_an_id_is_refused_while_its_call_is_open_and_long_after() -> None:
    open_calls = {"endless#0.": None}
    ids = UsedIds(open_calls)
    for number in range(NUM_REMEMBERED + 1000):
        ids.claim(f"g{number}.0#{number}.")
    assert len(ids) == NUM_REMEMBERED
    for used in ("endless#0.", f"g{1000}.0#{1000}.", f"g{NUM_REMEMBERED + 999}.0#{NUM_REMEMBERED + 999}."):
        with pytest.raises(EngineError, match=f"request id '{used}' was used before; each generation call needs"):
            ids.claim(used)
    ids.check("new#0.")
    ids.claim("new#0.")  # a check uses nothing
