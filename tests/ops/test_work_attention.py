"""The work of the indexer and of attention against closed forms; axes as in test_work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.ops import attention, dsa_indexer
from castoff.ops.lengths import Lengths
from castoff.ops.program import OpCall
from castoff.spec.quant import AttentionAction, LinearAction
from tests.generators import (
    ATTENTION_ACTIONS,
    STORED,
    batches,
    stored_bytes,
    uniform,
)
from tests.ops.bench import (
    CACHES,
    KEYS,
    Bench,
    Index,
    Indexer,
    Latent,
    actions,
    indexes,
    latents,
    matrix_flops,
    parts_of,
    rotate_and_quantise,
    vector_flops,
)


class TestIndexer:
    WRITE_BUCKETS = frozenset({"k_proj", "k_norm", "k_rope", "key_cache_write"})
    BUCKETS = WRITE_BUCKETS | {
        "q_proj", "head_weights_proj", "rope", "score", "relu", "head_reduce", "topk", "key_cache_read",
    }  # fmt: skip
    QUANTISED_WRITE = frozenset({"k_rotate_quantize", "scale_cache_write"})
    QUANTISED = QUANTISED_WRITE | {"rotate_quantize", "scale_cache_read"}

    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    def test_buckets(self, cache: AttentionAction) -> None:
        """The quantised path rotates, quantises and keeps scales; the BF16 path does none of it."""
        s = Index(D=20, Q=10, H=4, E=16, P=8, K=6)
        quantised = cache != "DISABLED"
        select, write = (Indexer(s, uniform(2, 30, 3), cache).select(), Indexer(s, uniform(2, 30, 3), cache).write())
        assert set(parts_of(select.op.work(select))) == self.BUCKETS | (self.QUANTISED if quantised else set())
        assert set(parts_of(write.op.work(write))) == self.WRITE_BUCKETS | (
            self.QUANTISED_WRITE if quantised else set()
        )

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches(), action=actions)
    def test_projections(self, cache: AttentionAction, s: Index, lengths: Lengths, action: LinearAction) -> None:
        indexer = Indexer(s, lengths, cache, action)
        call = indexer.select()
        parts, T = parts_of(call.op.work(call)), indexer.T
        assert parts["q_proj"].matrix_flops == 2 * T * s.Q * s.H * s.E
        assert parts["k_proj"].matrix_flops == 2 * T * s.D * s.E
        assert parts["head_weights_proj"].matrix_flops == 2 * T * s.D * s.H
        assert parts["q_proj"].matrix_dtype == parts["k_proj"].matrix_dtype == STORED[action][2]
        # weights_proj stays in high precision, whatever the linear layers are.
        assert parts["head_weights_proj"].matrix_dtype == "bf16"
        assert parts["q_proj"].bytes == pytest.approx(2 * T * s.Q + stored_bytes(action, s.H * s.E, s.Q))
        # hidden is read once for the two projections that need it.
        assert parts["k_proj"].bytes == pytest.approx(2 * T * s.D + stored_bytes(action, s.E, s.D))
        assert parts["head_weights_proj"].bytes == 2 * s.H * s.D
        assert parts["k_norm"].bytes == 2 * 2 * s.E
        assert parts["rope"].vector_flops == 3 * T * s.H * s.P
        assert parts["k_rope"].vector_flops == 3 * T * s.P

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches())
    def test_scores(self, cache: AttentionAction, s: Index, lengths: Lengths) -> None:
        call = Indexer(s, lengths, cache).select()
        parts, T = parts_of(call.op.work(call)), lengths.tokens
        pairs = sum(
            context + i + 1
            for segment in lengths.classes
            for _ in range(int(segment.count))
            for context, query in [(int(segment.context), int(segment.query))]
            for i in range(query)
        )
        assert parts["score"].matrix_flops == 2 * pairs * s.H * s.E
        assert parts["score"].matrix_dtype == KEYS[cache][2]
        assert parts["relu"].vector_flops == pairs * s.H
        # A quantised key scales each sum; its query's scale goes into the head weights.
        scales = 0 if cache == "DISABLED" else pairs + T * s.H
        assert parts["head_reduce"].vector_flops == 2 * pairs * s.H + scales
        # Four 8-bit digits of a 32-bit key.
        assert parts["topk"].vector_flops == 4 * pairs
        if cache != "DISABLED":
            assert parts["rotate_quantize"].vector_flops == rotate_and_quantise(T * s.H, s.E)
            assert parts["k_rotate_quantize"].vector_flops == rotate_and_quantise(T, s.E)

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches())
    def test_cache_traffic(self, cache: AttentionAction, s: Index, lengths: Lengths) -> None:
        call = Indexer(s, lengths, cache).select()
        parts, T = parts_of(call.op.work(call)), lengths.tokens
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        key, scale, _ = KEYS[cache]
        assert parts["key_cache_read"].bytes == in_cache * key * s.E
        assert parts["key_cache_write"].bytes == T * key * s.E
        if cache != "DISABLED":
            assert parts["scale_cache_read"].bytes == in_cache * scale
            assert parts["scale_cache_write"].bytes == T * scale

    @pytest.mark.property
    @given(s=indexes, lengths=batches(), rows=st.integers(1, 10**7), blocks=st.integers(1, 10**4))
    def test_the_allocated_buffer_changes_nothing(self, s: Index, lengths: Lengths, rows: int, blocks: int) -> None:
        small, large = (
            Indexer(s, lengths, "FP8").select(),
            Indexer(s, lengths, "FP8").select(cached_rows=rows, blocks=blocks),
        )
        assert small.op.work(small) == large.op.work(large)
        assert small.outputs[0].shape == large.outputs[0].shape

    @pytest.mark.property
    @given(s=indexes, lengths=batches())
    def test_result(self, s: Index, lengths: Lengths) -> None:
        (ids,) = Indexer(s, lengths, "DISABLED").select().outputs
        longest = max(int(p.context) + int(p.query) for p in lengths.classes)
        assert ids.shape == (lengths.tokens, min(s.K, longest))
        assert ids.dtype == "int32"

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches(), action=actions)
    def test_a_key_write_is_the_indexer_without_its_queries(
        self, cache: AttentionAction, s: Index, lengths: Lengths, action: LinearAction
    ) -> None:
        select, write = Indexer(s, lengths, cache, action).select(), Indexer(s, lengths, cache, action).write()
        written = parts_of(write.op.work(write))
        assert write.outputs == ()
        assert write.op.name == "indexer_key_write"
        selected = parts_of(select.op.work(select))
        assert written == {name: selected[name] for name in written}

    @pytest.mark.property
    @given(s=indexes, lengths=batches(), shards=st.sampled_from([2, 4]))
    def test_shards_split_the_keys_and_not_the_queries(self, s: Index, lengths: Lengths, shards: int) -> None:
        split = Index(**{**{name: getattr(s, name) for name in "D Q H E P K".split()}, "shards": shards})
        whole_call, split_call = Indexer(s, lengths, "FP8").select(), Indexer(split, lengths, "FP8").select()
        whole, part = parts_of(whole_call.op.work(whole_call)), parts_of(split_call.op.work(split_call))
        for name in ("score", "relu"):
            assert part[name].matrix_flops * shards == pytest.approx(whole[name].matrix_flops)
            assert part[name].vector_flops * shards == pytest.approx(whole[name].vector_flops)
        for name in ("key_cache_read", "scale_cache_read"):
            assert part[name].bytes * shards == pytest.approx(whole[name].bytes)
        assert part["q_proj"] == whole["q_proj"]

    @pytest.mark.golden
    @pytest.mark.parametrize(
        ("cache", "read"), [("DISABLED", 65_537 * 256), ("FP8", 65_537 * 132), ("INT8", 65_537 * 130)]
    )
    def test_decode_of_glm_52_at_64k(self, cache: AttentionAction, read: int) -> None:
        s = Index(D=6144, Q=2048, H=32, E=128, P=64, K=2048)
        call = Indexer(s, uniform(1, 65_536, 1), cache).select()
        parts = parts_of(call.op.work(call))
        assert parts["score"].matrix_flops == 2 * 65_537 * 32 * 128
        scales = parts["scale_cache_read"].bytes if cache != "DISABLED" else 0
        assert parts["key_cache_read"].bytes + scales == read

    def test_merge_of_the_candidates_of_several_ranks(self) -> None:
        bench = Bench()
        call = bench.call(
            lambda: dsa_indexer.merge_topk(bench.x(5, 40, dtype="fp32"), bench.x(5, 40, dtype="int32"), 10)
        )
        work = call.op.work(call)
        assert call.outputs[0].shape == (5, 10)
        assert work.flops == 4 * 200
        assert work.bytes == 4 * 200 + 4 * 200 + 4 * 50


class TestAttention:
    @staticmethod
    def run(
        s: Latent, V: int, lengths: Lengths, *, topk: int | None, phase: str, cache: AttentionAction = "DISABLED",
        shards: int = 1, buffer: int = 1000,
    ) -> OpCall:  # fmt: skip
        bench = Bench()
        T, row_bytes = lengths.tokens, CACHES[cache].latent_row_bytes
        kv_b = bench.plain(s.H * (s.N + V), s.R)
        own = attention.AttentionSizes(s.H, s.N, s.P, s.R, V, CACHES[cache], 1.0, topk, shards)
        ids = None if topk is None else bench.x(T, min(topk, int(lengths.longest)), dtype="int32")
        return bench.call(
            lambda: attention.multihead_latent_attention(
                bench.x(T, s.H, s.N + s.P), bench.cache(buffer, row_bytes), ids, bench.x(1, 1, dtype="int32"),
                bench.x(1, dtype="int32"), kv_b, own, lengths, phase=phase, quantized=cache != "DISABLED",
            )
        )  # fmt: skip

    @staticmethod
    def seen(lengths: Lengths) -> list[int]:
        return [
            int(segment.context) + i + 1
            for segment in lengths.classes
            for _ in range(int(segment.count))
            for i in range(int(segment.query))
        ]

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(
        s=latents, V=st.integers(1, 40), lengths=batches(), K=st.integers(1, 60),
        phase=st.sampled_from(["prefill", "decode"]),
    )  # fmt: skip
    def test_sparse(self, cache: AttentionAction, s: Latent, V: int, lengths: Lengths, K: int, phase: str) -> None:
        call = self.run(s, V, lengths, topk=K, phase=phase, cache=cache)
        work, T = call.op.work(call), lengths.tokens
        rows = sum(min(K, seen) for seen in self.seen(lengths))
        # q_nope into the latent space, scores over latent and rope, the weighted sum of latents, and values out of it.
        per_token = 2 * s.H * (s.N * s.R + s.R * V)
        per_row = 2 * s.H * (s.R + s.P) + 2 * s.H * s.R
        assert matrix_flops(work) == per_token * T + per_row * rows
        assert vector_flops(work) == 5 * s.H * rows
        gather = parts_of(work)["kv_gather"]
        assert gather.gather_rows == rows
        assert gather.gather_bytes == rows * {"DISABLED": 1152, "INT8": 656, "FP8": 656}[cache]
        ids = 4 * T * min(K, int(lengths.longest))
        streamed = 2 * T * s.H * (s.N + s.P) + 2 * s.H * (s.N + V) * s.R + 2 * T * s.H * V + ids
        assert work.bytes == streamed + gather.gather_bytes
        assert call.outputs[0].shape == (T, s.H, V)
        assert call.op is (attention.SPARSE if cache == "DISABLED" else attention.SPARSE_QUANT)
        assert call.op.name == "multihead_latent_attention" + ("" if cache == "DISABLED" else "_quant")
        assert call.family == f"sparse_attention_{phase}"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches())
    def test_dense_decode(self, s: Latent, V: int, lengths: Lengths) -> None:
        call = self.run(s, V, lengths, topk=None, phase="decode")
        work, T, pairs = call.op.work(call), lengths.tokens, sum(self.seen(lengths))
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        per_token = 2 * s.H * (s.N * s.R + s.R * V)
        per_pair = 2 * s.H * (s.R + s.P) + 2 * s.H * s.R
        assert matrix_flops(work) == per_token * T + per_pair * pairs
        assert vector_flops(work) == 5 * s.H * pairs
        # The rows of a request are streamed once for all its heads.
        assert parts_of(work)["kv_read"].bytes == 1152 * in_cache
        assert work.bytes == 1152 * in_cache + 2 * T * s.H * (s.N + s.P + V) + 2 * s.H * (s.N + V) * s.R
        assert call.family == "dense_attention_decode"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches())
    def test_dense_prefill(self, s: Latent, V: int, lengths: Lengths) -> None:
        """Keys and values of all rows are expanded; then every pair costs N + P for its score and V for its value."""
        call = self.run(s, V, lengths, topk=None, phase="prefill")
        work, T, pairs = call.op.work(call), lengths.tokens, sum(self.seen(lengths))
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        expanded = in_cache * s.H * (s.N + V)
        assert matrix_flops(work) == 2 * s.R * expanded + 2 * pairs * s.H * (s.N + s.P + V)
        assert vector_flops(work) == 5 * s.H * pairs
        # Expanded rows are written and read once in bf16.
        rows_and_weight = 1152 * in_cache + 2 * s.H * (s.N + V) * s.R
        assert work.bytes == rows_and_weight + 2 * 2 * expanded + 2 * T * s.H * (s.N + s.P + V)
        assert work.workspace_bytes == 2 * expanded
        assert call.family == "dense_attention_prefill"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches(), K=st.integers(1, 60), dcp=st.sampled_from([2, 4]))
    def test_split_by_token_the_ranks_do_the_work_of_one(
        self, s: Latent, V: int, lengths: Lengths, K: int, dcp: int
    ) -> None:
        """With DCP a rank absorbs its own heads, scores those of its group against its rows, and expands its own."""
        bench, T = Bench(), lengths.tokens
        kv_b = bench.plain(s.H * (s.N + V), s.R)
        own = attention.AttentionSizes(
            s.H * dcp, s.N, s.P, s.R, V, CACHES["DISABLED"], 1.0, topk_limit=K, shards=dcp, absorbs=False
        )
        absorb = bench.call(lambda: attention.absorb_query(bench.x(T, s.H, s.N + s.P), kv_b, own))
        assert absorb.outputs[0].shape == (T, s.H, s.R + s.P)
        core = bench.call(
            lambda: attention.multihead_latent_attention(
                bench.x(T, s.H * dcp, s.R + s.P), bench.cache(1, 1), bench.x(T, K, dtype="int32"),
                bench.x(1, 1, dtype="int32"), bench.x(1, dtype="int32"), kv_b, own, lengths,
                phase="decode", quantized=False,
            )
        )  # fmt: skip
        assert core.outputs[0].shape == (T, s.H * dcp, s.R)
        expand = bench.call(lambda: attention.expand_value(bench.x(T, s.H, s.R), kv_b, own))
        assert expand.outputs[0].shape == (T, s.H, V)
        works = [call.op.work(call) for call in (absorb, core, expand)]
        alone = self.run(s, V, lengths, topk=K, phase="decode")
        assert sum(map(matrix_flops, works)) == pytest.approx(matrix_flops(alone.op.work(alone)))
        assert sum(map(vector_flops, works)) == pytest.approx(vector_flops(alone.op.work(alone)))
        rows = sum(min(K, seen) for seen in self.seen(lengths)) / dcp
        assert parts_of(works[1])["kv_gather"].gather_bytes == pytest.approx(1152 * rows)
        # Each half of kv_b is read by the op that needs it.
        assert works[0].bytes == 2 * (T * s.H * (s.N + s.P) + s.H * s.N * s.R + T * s.H * (s.R + s.P))
        assert works[2].bytes == 2 * (T * s.H * s.R + s.H * V * s.R + T * s.H * V)

    @pytest.mark.property
    @given(s=latents, lengths=batches())
    def test_a_limit_beyond_the_longest_request_selects_what_dense_attention_sees(
        self, s: Latent, lengths: Lengths
    ) -> None:
        sparse = self.run(s, 8, lengths, topk=10**6, phase="decode")
        dense = self.run(s, 8, lengths, topk=None, phase="decode")
        assert matrix_flops(sparse.op.work(sparse)) == matrix_flops(dense.op.work(dense))

    @pytest.mark.property
    @given(s=latents, lengths=batches(), buffer=st.integers(1, 10**8))
    def test_the_allocated_buffer_changes_nothing(self, s: Latent, lengths: Lengths, buffer: int) -> None:
        small, large = (
            self.run(s, 8, lengths, topk=5, phase="decode"),
            self.run(s, 8, lengths, topk=5, phase="decode", buffer=buffer),
        )
        assert small.op.work(small) == large.op.work(large)

    @pytest.mark.golden
    def test_decode_of_glm_52_at_64k_on_16_ranks(self) -> None:
        s = Latent(T=1, D=6144, H=4, N=192, P=64, R=512, Q=2048)
        call = self.run(s, 256, uniform(1, 65_536, 1), topk=2048, phase="decode")
        work = call.op.work(call)
        # 2 · 4 heads · (192 · 512 + 512 · 256) a token; 2 · 4 · (576 + 512) a row
        assert matrix_flops(work) == 1_835_008 + 17_825_792
        assert parts_of(work)["kv_gather"].gather_bytes == 2048 * 1152

    def test_ids_and_limit_belong_together(self) -> None:
        bench = Bench()
        own = attention.AttentionSizes(1, 2, 2, 4, 2, CACHES["DISABLED"], 1.0, 16)
        with pytest.raises(AssertionError, match="top-k"):
            attention.multihead_latent_attention(
                bench.x(1, 1, 4), bench.cache(1, 1), None, bench.x(1, 1), bench.x(1), bench.plain(4, 4), own,
                uniform(1, 0, 1), phase="decode", quantized=False,
            )  # fmt: skip
