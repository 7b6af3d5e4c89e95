"""A replay as CSV: a row for each policy and pool, and one for each of its index groups."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from castoff.lab.result import ReplayResult, Spread
from castoff.policy.arrays import STATS

_RATES = ("hit_rate", "unique_hit_rate", "unique_misses_per_step")
_WHOLE = ("unique_misses_p50", "unique_misses_p99", "link_bytes_per_step")


def replay_csv(result: ReplayResult) -> str:
    """CSV text. group and layers are empty in a row for all groups; counters are means of a request's step and group.

    What stands empty in the row of a group is known of all together alone.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("policy", "ways", "pool_tokens", "group", "layers", *_RATES, *_WHOLE, *STATS))
    for row in result.rows:
        name = (row.policy, row.ways, row.pool_tokens)
        writer.writerow((*name, None, None, *(getattr(row, key) for key in (*_RATES, *_WHOLE)), *_means(row.stats)))
        for group in row.per_group:
            rates = (getattr(group, key) for key in _RATES)
            layers = " ".join(map(str, group.layers))
            writer.writerow((*name, group.group, layers, *rates, *(None for _ in _WHOLE), *_means(group.stats)))
    return text.getvalue()


def _means(stats: Mapping[str, Spread]) -> list[float]:
    return [stats[name].mean for name in STATS]
