"""What the runs of the chaos campaign come to: kills by role, times of return against limits, rewards in pairs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swarm_summary import Interval

from tests.swarm.chaos.returns import Kept, Return, quantile
from tests.swarm.chaos.stage import LEASE_S, SPEEDS

LAST = 8
"""Steps at the end of a run over which the reward is compared."""
COORDINATOR_LIMIT_S, MEMBER_LIMIT_S = 5.0, 2 * LEASE_S
BUSY = 4.0
"""Load average from which a machine of two cores has other work than a run, which makes a load of two."""


def whole_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all lines of ``--parts`` come to."""
    rows, calm = ([made for made in found if key in made] for key in ("case", "calm_seed"))
    whole = summary(rows) if rows else {}
    if calm:
        whole["calm"] = returns_of([Return(**back) for made in calm for back in made["returns"]])
        whole["calm"]["load_average"] = [made["load_average"] for made in calm]
    if colds := [made for made in found if "cold_s" in made]:
        whole["cold_starts_of_the_coordinator"] = colds
    return whole


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
        "returns": {
            name: {"runs": len(chosen), **returns_of([Return(**back) for row in chosen for back in row["returns"]])}
            for name, chosen in (
                ("on an idle machine", [row for row in rows if row["load_average"] < BUSY]),
                ("on a busy machine", [row for row in rows if row["load_average"] >= BUSY]),
            )
        },
        "reward_in_push_pull": _difference([row for row in rows if row["case"].startswith("push_pull")]),
    }


def returns_of(returns: Sequence[Return]) -> dict[str, Any]:
    """Return how the limits were kept, and what is known of returns while other blows came."""
    found: dict[str, Any] = {}
    for role, names, limit_s in (
        ("coordinator", ("coordinator",), COORDINATOR_LIMIT_S),
        ("member", tuple(SPEEDS), MEMBER_LIMIT_S),
    ):
        of_role = [back for back in returns if back.name in names]
        watched = [back for back in of_role if back.is_watched]
        found[role] = {
            **asdict(Kept.of(of_role, limit_s)),
            "steps": {
                mark: _spread([value for back in watched if (value := getattr(back, mark)) is not None])
                for mark in ("answered_s", "welcomed_s", "serving_s", "acked_s")
            },
            "while_others_were_hit": {
                **Counter(back.outcome for back in of_role if not back.is_watched),
                "seconds_of_those_back": _spread(
                    [back.seconds for back in of_role if not back.is_watched and back.outcome == "back"]
                ),
            },
        }
    found["nginx"] = _spread([back.seconds for back in returns if back.name == "nginx" and back.outcome == "back"])
    return found


def _summed(rows: Sequence[dict[str, Any]], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for made in rows:
        total.update(made[key])
    return total


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    shares = {"median": 0.5, "p95": 0.95, "max": 1.0}
    return {"count": len(ordered), **{name: quantile(ordered, share) for name, share in shares.items()}}


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
