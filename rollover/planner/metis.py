"""A METIS bisection as an order of islands for the arrangement to start from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollover.errors import PlanError
from rollover.planner.fabric import Fabric, Shares


def metis_order(fabric: Fabric, shares: Sequence[Shares]) -> list[int]:
    """An order of the islands to start from: METIS bisects the graph in the proportion of the training share.

    Raises:
        PlanError: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise PlanError("a METIS start needs pymetis: pip install 'rollover[metis]'") from None
    n = len(fabric.types)
    scaled = np.rint(1000 * fabric.bandwidth / fabric.bandwidth.max()).astype(int)
    neighbours = [[j for j in range(n) if j != i and scaled[i, j]] for i in range(n)]
    starts = np.cumsum([0, *(len(found) for found in neighbours)])
    share = sum(s.train for s in shares) / sum(fabric.sizes)
    cut = pymetis.part_graph(
        2,
        pymetis.CSRAdjacency(starts.tolist(), [j for found in neighbours for j in found]),
        vweights=list(fabric.sizes),
        eweights=[int(scaled[i, j]) for i, found in enumerate(neighbours) for j in found],
        tpwgts=[share, 1 - share],
    )
    return sorted(range(n), key=lambda i: cut.vertex_part[i])
