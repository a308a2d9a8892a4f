"""What the runs of the chaos campaign come to: kills by role, rewards in pairs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from swarm_summary import Interval

LAST = 8
"""Steps at the end of a run over which the reward is compared."""


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the rows come to. A row is written when all laws have held: of its acknowledged tokens each was found
    in the journal, and no group was trained twice."""
    kills = _summed(rows, "kills")
    roles: Counter[str] = Counter()
    for name, count in kills.items():
        who, way = name.split("/")
        roles[f"{who if who in ('coordinator', 'nginx') else 'member'}/{way}"] += count
    return {
        "runs": len(rows),
        "cases": dict(sorted(Counter(row["case"] for row in rows).items())),
        "kills": kills.total(),
        "kills_by_role_and_way": dict(sorted(roles.items())),
        "others": dict(sorted(_summed(rows, "others").items())),
        "ended_by_a_full_disk_and_resumed": sum(row["ended_by_a_full_disk"] for row in rows),
        "faults": dict(sorted(_summed(rows, "faults").items())),
        "decoded_tokens": sum(row["decoded_tokens"] for row in rows),
        "acknowledged_tokens": sum(row["acknowledged_tokens"] for row in rows),
        "runs_in_pull_mode_with_the_tokens_of_no_swarm": sum(row["case"].startswith("pull") for row in rows),
        "reward_in_push_pull": _difference([row for row in rows if row["case"].startswith("push_pull")]),
    }


def _summed(rows: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for made in rows:
        total.update(made[key])
    return total


def _difference(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean reward of the last steps, disturbed less undisturbed, paired by case and seed, with its 95% interval
    (Student's t), beside what the undisturbed runs have gained since their first two steps."""
    if len(rows) < 3:
        return {"pairs": len(rows)}
    hit, calm = ([statistics.mean(row[key][-LAST:]) for row in rows] for key in ("rewards", "undisturbed_rewards"))
    first = [statistics.mean(row["undisturbed_rewards"][:2]) for row in rows]
    found = Interval.of([a - b for a, b in zip(hit, calm, strict=True)])
    gain = Interval.of([b - a for a, b in zip(first, calm, strict=True)])
    return {
        "pairs": len(rows),
        "steps": LAST,
        "undisturbed": round(statistics.mean(calm), 4),
        "disturbed": round(statistics.mean(hit), 4),
        "mean_lag": round(statistics.mean(row["mean_lag"] for row in rows), 2),
        "undisturbed_mean_lag": round(statistics.mean(row["undisturbed_mean_lag"] for row in rows), 2),
        "gain_of_the_undisturbed": gain.json(),
        "difference": round(found.mean, 4),
        "interval": [round(found.mean - found.half, 4), round(found.mean + found.half, 4)],
    }
