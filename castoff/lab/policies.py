"""The policies that a trace can be replayed with: what each name means."""

from __future__ import annotations

from typing import Literal, get_args

PolicyName = Literal["fifo", "lru", "clock", "serve_install", "gather"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

SET_ASSOCIATIVE: tuple[PolicyName, ...] = ("fifo", "lru", "clock", "serve_install")
"""Pools of sets; the others have none."""
READS_EVERY_ROW: tuple[PolicyName, ...] = ("serve_install", "gather")
"""These read a missed token for every row that selects it, and a step's own tokens too; the others read each once."""
