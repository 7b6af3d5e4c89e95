"""The policies that a trace can be replayed with: what each name means."""

from __future__ import annotations

from typing import Literal, get_args

from castoff.policy.full import FullPolicy
from castoff.spec.offload import PoolPolicy

SetPolicy = Literal["fifo", "lru", "clock", "serve_install", "set-belady"]
PolicyName = SetPolicy | FullPolicy | Literal["belady", "gather"]

DIRECT: tuple[PoolPolicy, ...] = get_args(PoolPolicy)
"""Mode `direct` with such sets."""
SET_ASSOCIATIVE: tuple[SetPolicy, ...] = get_args(SetPolicy)
"""Pools of sets; the others have none."""
FULLY_ASSOCIATIVE: tuple[FullPolicy, ...] = get_args(FullPolicy)
POLICIES: tuple[PolicyName, ...] = (*SET_ASSOCIATIVE, *FULLY_ASSOCIATIVE, "belady", "gather")
READS_EVERY_ROW: tuple[PolicyName, ...] = ("serve_install", "gather")
"""These read a missed token for every row that selects it, and a step's own tokens too; the others read each once."""
