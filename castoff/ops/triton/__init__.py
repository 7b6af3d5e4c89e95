"""Triton kernels of the offload ops and of sparse attention by row, and the functions that launch them.

Imported lazily, where an op finds its tensors on an accelerator: this package imports torch and triton at its top.

    sets.py           what plans share: a tag compare in a set, misses ranked within their sets
    plan_direct.py    rows, fetch list and new group state of a step
    plan_serve.py     sources and install list of the published path, and its deferred metadata
    plan_gather.py    reuse of the previous step's selection
    rows.py           copies of whole rows between host, pool, ring, staging and selection
    attention.py      latent attention over rows given by code
    launch.py         a kernel with all that it is launched with
    aot.py            every kernel compiled for devices that need not be there

No kernel reads anything on the host, and grids depend on shapes alone, so every launch can be captured in a graph.
"""
