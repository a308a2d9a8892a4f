"""Writes what knights and knaves are warmed up on: problems of reasoning-gym with their answers, as JSON lines.

    python benchmarks/knights.py build/swarm/knights.jsonl

Their seeds are above those of any run: nothing that is trained or evaluated is among them but by chance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_EXAMPLES = 40_000
CONFIG = {"n_people": 2, "depth_constraint": 2, "width_constraint": 2}


def write(path: Path, num_examples: int = NUM_EXAMPLES) -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("knights_knaves", seed=2**32, size=num_examples, **CONFIG)
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        for i in range(num_examples):
            item = dataset[i]
            file.write(json.dumps({"question": item["question"], "answer": item["answer"]}) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
