"""What plans read and write, and the look-up in one set.

A request has a pool of N sets of W rows on the device; token id belongs to set id % N. A row code says where a row of
latents lies. Codes count the pools of all R request slots first, then their rings of the last tokens, then staging:

    pool row of slot r, set n, way w     r · N · W + n · W + w
    ring row of slot r, position p       R · N · W + r · G + p % G
    staging row i of slot r              R · (N · W + G) + r · staging_rows + i

Axes: R request slots, N sets, W ways, P = N · W rows of a pool, G rows of a ring; B requests of a call, padding
included, S queries of each, T = B · S tokens, query s of request b being token b · S + s; K columns of top-k,
X = S · K columns of a request, rank k of query s at position s · K + k; C counters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

# What is counted of each request. A row is one (query, rank); an id counts once, however many rows select it.
#   hits             rows whose token is in the pool             unique_hits   the ids among them
#   unique_misses    ids that are read from the host             promoted_rows ids that are copied from the ring
#   repeated_misses  rows of those ids beyond the first          staged_rows   those ids for which a set has no way
#   window_reads     rows of this step's own tokens
# Rows with a valid id are hits + unique_misses + promoted_rows + repeated_misses + window_reads.
STATS = ("hits", "unique_hits", "unique_misses", "repeated_misses", "window_reads", "promoted_rows", "staged_rows")
HITS, UNIQUE_HITS, UNIQUE_MISSES, REPEATED_MISSES, WINDOW_READS, PROMOTED, STAGED = range(len(STATS))


class Selection(NamedTuple):
    """What the indexer selected in one step of some requests; contiguous arrays.

    Tokens below committed[b] are settled. Those from committed[b] on, the window, are this step's own: they may yet be
    rejected, so no step finds them in a pool before they are settled. Ids beyond a query's own position count as none.
    """

    topk_TK: Ints
    """Token ids, below 2^31 - 1; negative for none, at any rank."""
    slot_mapping_T: Longs
    """Negative for a padded token, all of whose ids count as none."""
    seq_lens_B: Longs
    """Length of each request with this step's S tokens."""
    committed_B: Longs
    request_slots_B: Longs
    """The slot r of each request, no two the same; -1 for a padding request, for which nothing happens."""


class PoolState(NamedTuple):
    """What is in the pools of a group of layers. A slot without a request has tags and used -1, hands and marks 0."""

    tags_RNW: Ints
    """Token in each row; -1 for a free row."""
    used_RNW: Ints
    """committed[b] of the last step that selected or filled each row; -1 for none."""
    hands_RN: Ints
    """The way where each set's search for a victim starts."""
    marks_RN: Ints
    """Bit w, bit 31 being the sign, is the mark that CLOCK gives to way w."""


class FetchPlan(NamedTuple):
    """Where attention finds the selected rows, and what has to be fetched there before."""

    rows_TK: Ints
    """Row codes; -1 where no id is valid."""
    fetch_ids_BX: Ints
    """Tokens to fetch, ordered by their first position: id to read from the host, -2 - id to copy from the ring."""
    fetch_rows_BX: Ints
    """The row codes where they go. From counts[b] on both lists are -1."""
    counts_B: Ints
    stats_BC: Ints


def shape_of(selection: Selection) -> tuple[int, int, int]:
    """B, S and K of arrays that fit each other."""
    num_tokens, columns = selection.topk_TK.shape
    requests = len(selection.seq_lens_B)
    queries = num_tokens // requests
    assert queries * requests == num_tokens == len(selection.slot_mapping_T)
    assert requests == len(selection.committed_B) == len(selection.request_slots_B)
    return requests, queries, columns


def new_fetch_plan(requests: int, queries: int, columns: int) -> FetchPlan:
    """Arrays for a plan to fill."""
    return FetchPlan(
        np.empty((requests * queries, columns), np.int32),
        np.empty((requests, queries * columns), np.int32),
        np.empty((requests, queries * columns), np.int32),
        np.empty(requests, np.int32),
        np.empty((requests, len(STATS)), np.int32),
    )


def clear_fetch_plan(plan: FetchPlan) -> None:
    """A plan of nothing."""
    plan.rows_TK[:] = -1
    plan.fetch_ids_BX[:] = -1
    plan.fetch_rows_BX[:] = -1
    plan.counts_B[:] = 0
    plan.stats_BC[:] = 0


def own_positions(selection: Selection, b: int) -> Longs:
    """Position (S,) of each query of request b, the last that it sees; -1 for a padded token, which sees none."""
    queries = len(selection.slot_mapping_T) // len(selection.seq_lens_B)
    own_S = np.empty(queries, np.int64)
    for s in range(queries):
        padded = selection.slot_mapping_T[b * queries + s] < 0
        own_S[s] = -1 if padded else selection.seq_lens_B[b] - queries + s
    return own_S
