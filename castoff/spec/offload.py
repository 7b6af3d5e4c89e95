"""KV offload as a user asks for it: which mode, with which pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.spec.checks import MOST, check_value, declared

PoolPolicy = Literal["fifo", "lru", "clock"]
OffloadMode = Literal["none", "gather", "serve_install", "direct"]

MOST_WAYS = 32
# The published pool, and its sets.
POOL_TOKENS = 8192
WAYS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Where the latent KV cache lies. None takes the default of the mode; a flag that the mode knows nothing of is an
    error.

    offload: none keeps all rows on the device. The others keep them in host memory: gather reuses the rows of each
        query's last selection; serve_install is the published shared-indexer route, a pool that is filled after
        attention; direct puts each missed row into its final place at once.
    pool_tokens: rows of a request's pool in every layer.
    ways: rows of a pool's set, from 1 to 32; pool_tokens must be a multiple.
    policy: which row of a set gives way.
    prefetch: bring the rows of a group's later layers while its first ones compute.
    install_stream: fill the pool beside the computation.
    mtp_gather_reuse: draft calls that reuse a top-k reuse its rows too, as they were.
    """

    offload: OffloadMode = "none"
    pool_tokens: int | None = None
    ways: int | None = None
    policy: PoolPolicy | None = None
    prefetch: bool | None = None
    install_stream: bool | None = None
    mtp_gather_reuse: bool | None = None

    @property
    def offloads(self) -> bool:
        """Whether latent rows lie in host memory."""
        return self.offload != "none"

    @property
    def offloads_mtp(self) -> bool:
        """Whether those of the MTP block do too."""
        return self.offload == "gather"

    @property
    def pool(self) -> tuple[int, int]:
        """(sets, ways) of a request's pool."""
        ways = self.ways or WAYS
        return (self.pool_tokens or POOL_TOKENS) // ways, ways

    @property
    def pool_policy(self) -> PoolPolicy:
        """How a way is chosen."""
        return self.policy or "fifo"

    @property
    def prefetches(self) -> bool:
        """Whether a copy stream runs ahead."""
        return self.offload == "direct" and self.prefetch is not False

    @property
    def has_install_stream(self) -> bool:
        """Whether pools are filled on a stream of their own."""
        return self.offload == "serve_install" and self.install_stream is not False

    @property
    def reuses_rows_in_drafts(self) -> bool:
        """Whether draft calls with a frozen top-k skip the gather."""
        return self.offload == "gather" and self.mtp_gather_reuse is not False


_FLAGS = {
    "pool_tokens": ("serve_install", "direct"),
    "ways": ("serve_install", "direct"),
    "policy": ("direct",),
    "prefetch": ("direct",),
    "install_stream": ("serve_install",),
    "mtp_gather_reuse": ("gather",),
}


def flags_without_use(mode: str) -> set[str]:
    """Fields that say nothing in a mode."""
    return {name for name, modes in _FLAGS.items() if mode not in modes}


def check_offload(offload: Offload) -> None:
    """Raise CastoffError for a wrong type, a flag that the mode has no use for, and a pool that cannot be."""
    for name, allowed in declared(Offload).items():
        check_value(name, getattr(offload, name), allowed)
    for name, modes in _FLAGS.items():
        value = getattr(offload, name)
        fixed = name == "policy" and offload.offload == "serve_install" and value == "fifo"
        if value is not None and offload.offload not in modes and not fixed:
            flag = f"--{name.replace('_', '-')}"
            said = f"--no-{flag[2:]}" if value is False else flag if value is True else f"{flag} {value}"
            raise CastoffError(
                f"{said} is for --offload {' or '.join(modes)}, and this run has --offload {offload.offload}"
                f"{_HINTS.get((name, offload.offload), '')}"
            )
    if offload.ways is not None and not 1 <= offload.ways <= MOST_WAYS:
        raise CastoffError(f"--ways must be from 1 to {MOST_WAYS}, got {offload.ways}")
    if offload.pool_tokens is not None:
        check_pool_multiple(np.asarray(offload.pool_tokens), offload.ways or WAYS)


def check_pool_multiple(pool_tokens: Array, ways: int) -> None:
    """Raise CastoffError for a size that is no positive multiple of the ways."""
    if np.any(pool_tokens > MOST):
        raise CastoffError(f"--pool-tokens must be at most {MOST}, got {pool_tokens.max():g}")
    wrong = pool_tokens[(pool_tokens < 1) | (pool_tokens % ways != 0)]
    if wrong.size:
        raise CastoffError(
            f"--pool-tokens must be a positive multiple of --ways {ways}, got {wrong[0]:.0f}; "
            f"the nearest is {max(round(wrong[0] / ways), 1) * ways}"
        )


_HINTS = {
    ("policy", "serve_install"): "; the published route is first in, first out",
    ("policy", "gather"): "; gather keeps each query's last selection",
    ("pool_tokens", "gather"): "; gather keeps index_topk rows per query",
}
