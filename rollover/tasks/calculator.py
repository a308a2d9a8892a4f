"""A calculator for sums that a model works out line by line: the environment of the packaged experiment ``tool``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollover.environments.episodes.base import Action
from rollover.environments.reasoning_gym import thaw
from rollover.tasks.sources.reasoning_gym import apply, worked_solution

_ASKED = re.compile(r"(-?\d{1,9}) ([-+*%]) (-?\d{1,9}) =$")


class Calculator:
    """Completes a turn that ends with an operation. A turn that does not end with ``=`` ends the episode.

    Examples:
        >>> calculator = Calculator()
        >>> calculator.step(Action(text="12 + 34 ="))
        ' 46\\n'
        >>> calculator.step(Action(text="#### 46")) is None
        True
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        pass

    def step(self, action: Action) -> str | None:
        text = action.text.rstrip()
        if not text.endswith("="):
            return None
        found = _ASKED.search(text)
        if found is None or (found[2] == "%" and not int(found[3])):
            return " ?\n"
        return f" {apply(found[2], int(found[1]), int(found[3]))}\n"

    def demonstrate(self, row: Mapping[str, Any]) -> list[str]:
        """Return the turns of a sum that is worked out with the calculator."""
        *lines, answer = worked_solution("chain_sum", thaw(row)).split("\n")
        return [*(f"{line.rpartition('=')[0]}=" for line in lines), answer]
