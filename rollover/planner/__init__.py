"""Plans for mixed fleets: which devices train, which roll out, in which shapes, and what that yields and costs.

Phase 1 is a mixed-integer linear programme over shapes; phase 2 places them on the fabric; both follow the two-phase
search of AReaL-Hex (arXiv 2511.00796). Nothing here imports torch.
"""
