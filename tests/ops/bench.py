"""A recorder for the work of single ops, the sizes that tests draw, and closed forms that several of them need."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from hypothesis import strategies as st

from castoff.dims import Dim, ceil_div, minimum
from castoff.ops import dsa_indexer, linear
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, OpCall, Recorder
from castoff.ops.work import Part, Work
from castoff.spec.quant import AttentionAction, CacheFormat, LinearAction, cache_format, linear_format
from tests.generators import (
    ATTENTION_ACTIONS,
    LINEAR_ACTIONS,
    MXFP4_GROUP,
    STORED,
    model,
)

DYNAMIC_ACTIONS: tuple[LinearAction, ...] = ("W8A8_DYNAMIC", "W4A8_DYNAMIC", "FP8", "MXFP4")

sizes = st.integers(1, 700)
actions = st.sampled_from(LINEAR_ACTIONS)


def quantise_operations(action: LinearAction) -> int:
    """A value: abs, max, scale, round; or, where the scale is stored, scale and round."""
    if STORED[action][2] == "bf16":
        return 0
    return 4 if action in DYNAMIC_ACTIONS else 2


def activation_scale_bytes(action: LinearAction, tokens: int, width: int) -> int:
    """Scales found at run time: fp32 per token, or per 128 values for FP8; a byte per group for MXFP4."""
    if action not in DYNAMIC_ACTIONS:
        return 0
    per_token = {"FP8": 4 * ceil(width / 128), "MXFP4": ceil(width / MXFP4_GROUP)}.get(action, 4)
    return tokens * per_token


class Bench:
    """A recorder with one open block, and what an op recorded in it."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def x(self, *shape: Dim, dtype: str = "bf16") -> Abstract:
        return self.recorder.tensor(*shape, dtype=dtype)

    def activations(self, tokens: int, width: int, action: LinearAction) -> linear.Activations:
        """A product's input in a format, as `quantize` leaves it."""
        form = linear_format(action, mxfp4_group_size=MXFP4_GROUP)
        values = self.x(tokens, width, dtype=form.activation_dtype)
        if not form.quantizes_activations:
            return values
        count = form.activation_scales(width)
        return linear.Quantized(values, self.x(tokens, count, dtype=form.scale_dtype) if count else None, "bf16")

    def cache(self, *shape: Dim) -> Abstract:
        return self.recorder.tensor(*shape, dtype="int8", kind="cache")

    def plain(self, *shape: int, dtype: str = "bf16") -> Weight:
        return Weight(self.recorder.tensor(*shape, dtype=dtype, kind="weight"))

    def weight(self, *shape: int, action: LinearAction = "DISABLED") -> Weight:
        form = linear_format(action, mxfp4_group_size=MXFP4_GROUP)
        values = self.recorder.tensor(*shape, dtype=form.weight_dtype, kind="weight")
        if action == "DISABLED":
            return Weight(values, None, form)
        scales = (*shape[:-2], *form.weight_scales(*shape[-2:]))
        return Weight(values, self.recorder.tensor(*scales, dtype=form.scale_dtype, kind="weight"), form)

    def calls(self, run: Callable[[], Any]) -> list[OpCall]:
        """The calls that `run` records."""

        def body() -> tuple[Abstract | None, ...]:
            run()
            return ()

        self.recorder.block(f"block {len(self.recorder.program.schedule)}", "", body)
        return self.recorder.program.schedule[-1].block.calls

    def call(self, run: Callable[[], Any]) -> OpCall:
        """The only call that `run` records."""
        (call,) = self.calls(run)
        return call

    def work(self, run: Callable[[], Any]) -> Work:
        """The work of that only call."""
        call = self.call(run)
        return call.op.work(call)


def parts_of(work: Work) -> dict[str, Part]:
    parts = {part.name: part for part in work.parts}
    assert len(parts) == len(work.parts), "two buckets of one name"
    return parts


def does_something(part: Part) -> bool:
    return part != Part(part.name)


def matrix_flops(work: Work) -> Dim:
    return sum(part.matrix_flops for part in work.parts)


def vector_flops(work: Work) -> Dim:
    return sum(part.vector_flops for part in work.parts)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of latent attention for one rank."""

    T: int
    D: int
    H: int
    N: int
    P: int
    R: int
    Q: int | None


latents = st.builds(
    Latent,
    T=st.integers(1, 50),
    D=st.integers(1, 200),
    H=st.integers(1, 9),
    N=st.integers(1, 40),
    P=st.integers(1, 20).map(lambda half: 2 * half),
    R=st.integers(1, 90),
    Q=st.none() | st.integers(1, 70),
)
# Of the real models' format, whatever the sizes in a test: only the row's bytes count.
CACHES: dict[AttentionAction, CacheFormat] = {action: cache_format(model(), action) for action in ATTENTION_ACTIONS}


@dataclass(frozen=True, kw_only=True)
class Index:
    """Sizes of an indexer: H heads of E values, P of them rotated, K selected."""

    D: int
    Q: int
    H: int
    E: int
    P: int
    K: int
    shards: int = 1


indexes = st.builds(
    Index,
    D=st.integers(1, 200),
    Q=st.integers(1, 90),
    H=st.integers(1, 9),
    E=st.sampled_from([16, 64, 128]),
    P=st.sampled_from([2, 8, 16]),
    K=st.integers(1, 60),
)
# key bytes per value, scale bytes, dtype of the score
KEYS: dict[AttentionAction, tuple[int, int, str]] = {
    "DISABLED": (2, 0, "bf16"),
    "FP8": (1, 4, "fp8"),
    "INT8": (1, 2, "int8"),
}


def index_cache(action: AttentionAction, E: int) -> CacheFormat:
    key, scale, dtype = KEYS[action]
    return CacheFormat(action, 0, key * E, scale, dtype)


class Indexer:
    """One dsa_indexer call, or one indexer_key_write, on its bench."""

    def __init__(self, s: Index, lengths: Lengths, cache: AttentionAction, action: LinearAction = "DISABLED") -> None:
        self.bench, self.s, self.lengths = Bench(), s, lengths
        self.T = lengths.tokens
        self.weights = dsa_indexer.IndexerWeights(
            wq_b=self.bench.weight(s.H * s.E, s.Q, action=action),
            wk=self.bench.weight(s.E, s.D, action=action),
            weights_proj=self.bench.plain(s.H, s.D),
            k_norm=self.bench.plain(s.E),
            k_norm_bias=self.bench.plain(s.E),
        )
        self.sizes = dsa_indexer.IndexerSizes(s.H, s.E, s.P, s.K, True, index_cache(cache, s.E), s.shards)
        self.columns = minimum(s.K, ceil_div(lengths.longest, s.shards))

    def select(self, *, cached_rows: int = 1000, blocks: int = 8) -> OpCall:
        b, T, s = self.bench, self.T, self.s
        return b.call(
            lambda: dsa_indexer.dsa_indexer(
                b.x(T, s.D), b.x(T, s.Q), b.x(T, s.P), b.x(T, s.P), b.cache(cached_rows, 1), b.x(T, dtype="int32"),
                b.x(self.lengths.requests, blocks, dtype="int32"), b.x(self.lengths.requests, dtype="int32"),
                self.weights, self.sizes, self.columns, self.lengths,
            )
        )  # fmt: skip

    def write(self) -> OpCall:
        b, T, s = self.bench, self.T, self.s
        return b.call(
            lambda: dsa_indexer.indexer_key_write(
                b.x(T, s.D), b.x(T, s.P), b.x(T, s.P), b.cache(1000, 1), b.x(T, dtype="int32"), self.weights, self.sizes
            )
        )


def rotate_and_quantise(vectors: Dim, E: int) -> Dim:
    """log2 E butterflies a value for the Hadamard rotation; abs, max, scale and round for the quantisation."""
    return vectors * E * ({16: 4, 64: 6, 128: 7}[E] + 4)


@dataclass(frozen=True, kw_only=True)
class Experts:
    T: int
    D: int
    E: int
    K: int
    I: int  # noqa: E741
    touched: float


expert_sizes = st.builds(
    Experts,
    T=st.integers(1, 60),
    D=st.integers(1, 90),
    E=st.integers(8, 64),
    K=st.integers(1, 8),
    I=st.integers(1, 50),
    touched=st.floats(0, 80),
)
