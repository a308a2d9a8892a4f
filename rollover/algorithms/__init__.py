"""Policy-gradient algorithms (GRPO, DAPO, GSPO, Dr.GRPO, RLOO, REINFORCE++, CISPO) as rows of one table.

``config`` and ``registry`` need no torch and are exported here; ``advantages``, ``losses``,
``corrections``, ``kl`` and ``metrics`` are the tensor functions behind the settings of a row.
"""

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.algorithms.registry import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmConfig", "resolve"]
