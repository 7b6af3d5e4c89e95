"""Cache policies, one per file, and the plans of the offload modes, on numpy arrays; compiled where numba is there."""
