"""Policy-gradient algorithms as rows of one registry.

``config``, ``registry`` and ``filters`` need no torch and are exported here; ``advantages``, ``losses``,
``corrections``, ``kl`` and ``metrics`` are the tensor functions behind the columns.
"""

from rollover.algorithms.config import AlgorithmConfig
from rollover.algorithms.filters import keep_group, trains_sample
from rollover.algorithms.registry import ALGORITHMS, Algorithm, resolve

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmConfig", "keep_group", "resolve", "trains_sample"]
