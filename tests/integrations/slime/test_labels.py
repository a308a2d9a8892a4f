"""Labels of slime's servers as versions."""

from __future__ import annotations

import pytest

from rollover.errors import EngineError
from rollover.integrations.slime.labels import LabelLine, agreed


def test_servers_that_disagree_are_named_with_what_they_say() -> None:
    with pytest.raises(EngineError, match=r"'2' by http://c; '3' by http://a, http://b"):
        agreed({"http://a": "3", "http://b": "3", "http://c": "2"})
    with pytest.raises(EngineError, match="call their weights 'default'"):
        agreed({"http://a": "default"})


def test_the_first_label_of_a_process_is_the_version_of_its_checkpoint() -> None:
    line = LabelLine.first(step=20, label="1", max_lag=0)
    assert [line.version(label, step=step) for label, step in (("1", 20), ("2", 21), ("7", 26))] == [20, 21, 26]
    assert line.label(21) == "2" and line.label(18) == "-1"


def test_a_label_may_lag_as_far_as_the_user_says() -> None:
    line = LabelLine.first(step=0, label="1", max_lag=1)
    assert line.version("1", step=1) == 0
    with pytest.raises(EngineError, match="'2' was due"):
        line.version("1", step=2)


def test_a_label_ahead_of_the_batches_is_refused() -> None:
    line = LabelLine.first(step=0, label="1", max_lag=0)
    with pytest.raises(EngineError, match="say '3' at the rollout of batch 1, where '2' was due: there were more"):
        line.version("3", step=1)
