"""Top-k traces: which tokens sparse attention selected in every decode step; numpy only, no torch."""
