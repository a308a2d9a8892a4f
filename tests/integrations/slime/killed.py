"""A process of recorded slime, to be killed: it makes a rollout for each line that it reads, and prints its samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integrations.slime import recorded
from tests.integrations.slime.kit import arguments, known
from tests.integrations.slime.recorded import Manager


def main(folder: Path, port: int, start: int) -> None:
    with recorded.installed():
        manager = Manager(arguments(folder, port), start=start)
        for line in sys.stdin:
            rollout_id, saves = json.loads(line)
            samples = manager.generate(rollout_id).samples
            if saves:
                manager.save(rollout_id)
            print(json.dumps([known(sample) for sample in samples]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
