"""The reference maths of ops against definitions written out naively. Axes as in the ops."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


from castoff.ops import (  # noqa: E402
    attention,
    cache_rows,
    collectives,
    dsa_indexer,
    mlapo,
    moe,
    norm,
    tokens,
)
from castoff.ops.attention import AttentionSizes  # noqa: E402
from castoff.ops.dsa_indexer import IndexerSizes  # noqa: E402
from castoff.ops.linear import Weight  # noqa: E402
from castoff.spec.quant import AttentionAction, CacheFormat  # noqa: E402
from tests.ops.cases import (  # noqa: E402
    BLOCK_TOKENS,
    CACHE,
    INDEX_DIM,
    INDEX_HEADS,
    Batch,
    D,
    H,
    N,
    P,
    Q,
    R,
    T,
    V,
    angles,
    attention_sizes,
    batch,
    ids,
    indexer_sizes,
    indexer_weights,
    paged,
    rand,
)


def select(own: Batch, cache: Any, hidden_TD: Any, qa_TQ: Any, positions: Any, sizes: IndexerSizes) -> Any:
    weights, topk = indexer_weights(), min(sizes.topk_limit, max(own.lengths_B.tolist()))
    (ids_TK,) = dsa_indexer.dsa_indexer(
        hidden_TD,
        qa_TQ,
        *angles(positions),
        cache,
        own.slots_T,
        own.block_tables,
        own.lengths_B,
        weights,
        sizes,
        topk,
        None,
    )
    return ids_TK


def chosen_sets(ids_TK: Any) -> list[set[int]]:
    return [{token for token in row.tolist() if token >= 0} for row in ids_TK]


@pytest.mark.numerics
@pytest.mark.parametrize("interleave", [True, False])
def test_indexer_against_its_definition(interleave: bool) -> None:
    """One score at a time, from the docstring; keys of earlier calls come from the cache."""
    length, queries, topk = 14, 5, 4
    own, sizes, weights = batch([length], queries), indexer_sizes(topk, interleave=interleave), indexer_weights()
    hidden, qa = rand(queries, D, seed=5), rand(queries, Q, seed=6)
    positions = torch.arange(length - queries, length)
    earlier = rand(length - queries, INDEX_DIM, seed=7)
    cache = paged({(0, at): row for at, row in enumerate(earlier)}, own, INDEX_DIM)
    cos, sin = angles(positions)

    def rotated(x: Any, at: int) -> Any:
        out, half = x.clone(), P // 2
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleave else (pair, half + pair)
            # The op lays the members of interleaved pairs out one after the other; so are the keys in the cache.
            out[pair] = x[first] * cos[at, pair] - x[second] * sin[at, pair]
            out[half + pair] = x[second] * cos[at, pair] + x[first] * sin[at, pair]
        return out

    keys = list(earlier)
    for at in range(queries):
        key = weights.wk.values @ hidden[at]
        key = (key - key.mean()) / (key.var(unbiased=False) + 1e-6).sqrt()
        keys.append(rotated(key * weights.k_norm.values + weights.k_norm_bias.values, at))
    ids_TK = select(own, cache, hidden, qa, positions, sizes)
    for at in range(queries):
        q_HE = (weights.wq_b.values @ qa[at]).view(INDEX_HEADS, INDEX_DIM)
        weight_H = weights.weights_proj.values @ hidden[at] / INDEX_HEADS**0.5
        scores = []
        for token in range(length - queries + at + 1):
            score = sum(weight_H[h] * max(rotated(q_HE[h], at) @ keys[token], 0) for h in range(INDEX_HEADS))
            scores.append(float(score) / INDEX_DIM**0.5)
        best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:topk]
        assert ids_TK[at].tolist() == best


def test_ties_go_to_the_lowest_id() -> None:
    """Queries of zero score every token alike, whatever the keys."""
    own = batch([11, 9], 3)
    cache = rand(own.blocks, BLOCK_TOKENS, INDEX_DIM)
    ids_TK = select(own, cache, rand(6, D), torch.zeros(6, Q, dtype=torch.float64), torch.arange(6), indexer_sizes(5))
    assert ids_TK.tolist() == [[0, 1, 2, 3, 4]] * 6


def test_ties_below_the_best_go_to_the_lowest_id() -> None:
    """Two kinds of key in alternation: all of the better kind in order, then the worse ones in order."""
    length = 12
    own = batch([length], 1)
    hidden, qa = rand(1, D, seed=3), rand(1, Q, seed=4)
    good, bad = rand(INDEX_DIM, seed=5), rand(INDEX_DIM, seed=6)
    rows = {(0, at): good if at % 3 == 1 else bad for at in range(length - 1)}
    cache = paged(rows, own, INDEX_DIM)
    ids_TK = select(own, cache, hidden, qa, torch.tensor([length - 1]), indexer_sizes(length))
    order = [token for token in ids_TK[0].tolist() if token != length - 1]
    goods, bads = [1, 4, 7, 10], [0, 2, 3, 5, 6, 8, 9]
    assert order in (goods + bads, bads + goods)


batches = st.tuples(st.lists(st.integers(0, 15), min_size=1, max_size=4), st.integers(1, 6))


@pytest.mark.property
@given(batches, st.integers(1, 20))
@settings(max_examples=30)
def test_indexer_is_causal(lengths_and_queries: tuple[list[int], int], topk: int) -> None:
    """min(topk, visible) distinct tokens, none later than the query; padded queries select nothing."""
    lengths, queries = lengths_and_queries
    own = batch(lengths, queries)
    count = own.tokens
    positions = (own.lengths_B[:, None] - queries + torch.arange(queries)).flatten()
    cache = rand(own.blocks, BLOCK_TOKENS, INDEX_DIM)
    ids_TK = select(own, cache, rand(count, D), rand(count, Q), positions, indexer_sizes(topk))
    for row, position in zip(ids_TK.tolist(), positions.tolist(), strict=True):
        chosen = [token for token in row if token >= 0]
        assert len(set(chosen)) == len(chosen) == min(topk, max(position + 1, 0))
        assert all(token <= position for token in chosen)
        assert row == chosen + [-1] * (len(row) - len(chosen)), "unused columns come last and hold −1"


@pytest.mark.property
@given(batches, st.integers(1, 5), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=30)
def test_layout_of_the_cache_does_not_matter(
    lengths_and_queries: tuple[list[int], int], block_tokens: int, spare: int, seed: int
) -> None:
    """Ids and attention are those of one large block per request."""
    lengths, queries = lengths_and_queries
    results = []
    for size, more, order in ((32, 0, 0), (block_tokens, spare, seed)):
        own = batch(lengths, queries, block_tokens=size, spare=more, seed=order)
        positions = (own.lengths_B[:, None] - queries + torch.arange(queries)).flatten()
        earlier = {
            (request, position): torch.cat([rand(INDEX_DIM, seed=at), rand(R + P, seed=at)])
            for request, length in enumerate(lengths)
            for position in range(max(length - queries, 0))
            for at in [100 * request + position]
        }
        cache = paged({key: row[:INDEX_DIM] for key, row in earlier.items()}, own, INDEX_DIM, size)
        ids_TK = select(own, cache, rand(own.tokens, D), rand(own.tokens, Q), positions, indexer_sizes(4))
        latent = paged({key: row[INDEX_DIM:] for key, row in earlier.items()}, own, R + P, size)
        mlapo.write_rows(latent, own.slots_T, rand(own.tokens, R + P))
        results.append((chosen_sets(ids_TK), attend(own, latent, rand(own.tokens, H, N + P), ids_TK)))
    (ids_one, out_one), (ids_two, out_two) = results
    assert ids_one == ids_two
    torch.testing.assert_close(out_one, out_two)


KV_B = Weight(rand(H * (N + V), R))


def attend(own: Batch, cache: Any, q_THX: Any, topk_TK: Any) -> Any:
    sizes = attention_sizes(None if topk_TK is None else topk_TK.shape[1])
    return attention.multihead_latent_attention(
        q_THX, cache, topk_TK, own.block_tables, own.lengths_B, KV_B, sizes, None, phase="decode", quantized=False
    )[0]


@pytest.mark.numerics
@pytest.mark.parametrize("sparse", [True, False])
def test_attention_against_expanded_keys_and_values(sparse: bool) -> None:
    """Per token and head, keys and values expanded through kv_b; an empty request in the middle gives zeros."""
    lengths, queries = [9, 0, 5], 2
    own = batch(lengths, queries)
    rows = {(request, at): rand(R + P, seed=50 * request + at) for request, n in enumerate(lengths) for at in range(n)}
    cache = paged(rows, own, R + P)
    q_THX = rand(own.tokens, H, N + P)
    topk_TK = torch.full((own.tokens, 3), -1, dtype=torch.int32)
    topk_TK[0], topk_TK[1] = torch.tensor([7, 2, 0]), torch.tensor([8, -1, 3])
    # Ids past the query's own position are not visible, and count for nothing.
    topk_TK[4], topk_TK[5] = torch.tensor([3, 4, 1]), torch.tensor([0, -1, -1])
    out_THV = attend(own, cache, q_THX, topk_TK if sparse else None)
    w_uk_uv = KV_B.values.view(H, N + V, R)
    for token in range(own.tokens):
        request, position = token // queries, lengths[token // queries] - queries + token % queries
        visible = [at for at in range(position + 1) if not sparse or at in topk_TK[token].tolist()]
        if not visible:
            assert torch.equal(out_THV[token], torch.zeros(H, V, dtype=torch.float64))
            continue
        for head in range(H):
            scores, values = [], []
            for at in visible:
                latent, key = rows[request, at][:R], rows[request, at][R:]
                expanded = w_uk_uv[head] @ latent
                scores.append(q_THX[token, head] @ torch.cat([expanded[:N], key]) * 0.3)
                values.append(expanded[N:])
            weights = torch.stack(scores).softmax(dim=0)
            torch.testing.assert_close(out_THV[token, head], weights @ torch.stack(values))


@pytest.mark.numerics
@pytest.mark.parametrize("action", ["INT8", "FP8"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("topk", [3, None])
def test_attention_over_quantised_rows_is_that_over_the_numbers_they_stand_for(
    action: AttentionAction, phase: str, topk: int | None
) -> None:
    rank = 256
    form = CacheFormat(action, rank + 4 * (rank // 128) + 2 * P, 16, {"INT8": 2, "FP8": 4}[action], action.lower())
    own = batch([9, 6], 2)
    latent, key = rand(own.blocks, BLOCK_TOKENS, rank), rand(own.blocks, BLOCK_TOKENS, P, seed=1)
    stored = cache_rows.latent_rows(latent, key, form)
    numbers = cache_rows.latent_values(stored, rank, form, torch.float64)
    q_THX, kv_b = rand(own.tokens, H, N + P), Weight(rand(H * (N + V), rank))
    sizes = AttentionSizes(H, N, P, rank, V, form, 0.3, topk)
    chosen = None if topk is None else ids(own.tokens, topk, below=6)
    (over_rows,), (over_numbers,) = (
        attention.multihead_latent_attention(
            q_THX, cache, chosen, own.block_tables, own.lengths_B, kv_b, given, None, phase=phase,
            quantized=given.cache.action != "DISABLED",
        )
        for cache, given in ((stored, sizes), (numbers, replace(sizes, cache=CACHE)))
    )  # fmt: skip
    assert torch.equal(over_rows, over_numbers)
    exact = attention.multihead_latent_attention(
        q_THX, torch.cat([latent, key], -1), chosen, own.block_tables, own.lengths_B, kv_b,
        replace(sizes, cache=CACHE), None, phase=phase, quantized=False,
    )[0]  # fmt: skip
    assert (over_rows - exact).norm() <= {"INT8": 0.05, "FP8": 0.15}[action] * exact.norm()


def test_attention_is_causal() -> None:
    """Rows after a query's own position, of the same request or of another, do not reach it."""
    own = batch([9, 12], 4)
    cache, q_THX = rand(own.blocks, BLOCK_TOKENS, R + P), rand(8, H, N + P)
    before = attend(own, cache, q_THX, None)
    for position in range(9):
        other = cache.clone()
        other[own.block_tables[0, position // BLOCK_TOKENS], position % BLOCK_TOKENS] += 1
        after = attend(own, other, q_THX, None)
        for query in range(4):
            assert torch.equal(after[query], before[query]) == (position > 5 + query)
        assert torch.equal(after[4:], before[4:])


def test_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prefills are scored a few queries at a time, with equal results."""
    own = batch([16, 13], 7)
    cache, q_THX = rand(own.blocks, BLOCK_TOKENS, R + P), rand(14, H, N + P)
    whole = attend(own, cache, q_THX, None)
    for elements in (1, 2 * H * 16 * 3):
        monkeypatch.setattr(attention, "SCORE_ELEMENTS", elements)
        torch.testing.assert_close(attend(own, cache, q_THX, None), whole)


def test_a_batch_of_padding_gives_zeros() -> None:
    own = batch([0, 0], 3)
    cache = rand(own.blocks, BLOCK_TOKENS, R + P)
    ids_TK = select(
        own, rand(own.blocks, BLOCK_TOKENS, INDEX_DIM), rand(6, D), rand(6, Q), -torch.ones(6), indexer_sizes()
    )
    assert (ids_TK == -1).all()
    for topk_TK in (ids_TK, None):
        assert torch.equal(attend(own, cache, rand(6, H, N + P), topk_TK), torch.zeros(6, H, V, dtype=torch.float64))


def test_rows_without_a_slot_are_dropped() -> None:
    """They land in the last row, which no block table names; all other rows are kept."""
    cache = rand(4, BLOCK_TOKENS, 5)
    before, rows = cache.clone(), rand(4, 5)
    mlapo.write_rows(cache, torch.tensor([2, -1, 9, -1]), rows)
    flat, kept = cache.view(-1, 5), before.view(-1, 5)
    assert torch.equal(flat[2], rows[0])
    assert torch.equal(flat[9], rows[2])
    others = [row for row in range(15) if row not in (2, 9)]
    assert torch.equal(flat[others], kept[others])


@pytest.mark.numerics
def test_rotations_are_rotations() -> None:
    """Lengths are kept, and the product of two vectors depends on the distance of their positions alone."""
    for rotate in (mlapo.rotate_interleaved, mlapo.rotate_half_split):
        a, b = rand(1, P, seed=1), rand(1, P, seed=2)

        def at(x: Any, position: int) -> Any:
            return rotate(x, *angles(torch.tensor([position])))[0]  # noqa: B023

        torch.testing.assert_close(at(a, 7).norm(), a.norm())
        torch.testing.assert_close(at(a, 7) @ at(b, 4), at(a, 103) @ at(b, 100))
        assert not torch.allclose(at(a, 7) @ at(b, 4), at(a, 7) @ at(b, 5))


@pytest.mark.numerics
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("normalize", [True, False])
def test_router_against_its_definition(groups: int, chosen_groups: int, *, normalize: bool) -> None:
    experts, chosen, scale = 8, 2, 2.5
    x, gate, bias = rand(20, D), rand(experts, D), rand(experts)
    weights_TK, experts_TK = moe.MOE_GATE(
        x, gate, bias, experts_per_token=chosen, groups=groups, chosen_groups=chosen_groups, scale=scale,
        normalize=normalize, appended=0,
    )  # fmt: skip
    size = experts // groups
    for token in range(20):
        scores = [float(torch.sigmoid(x[token] @ gate[expert])) for expert in range(experts)]
        choice = [score + float(bias[expert]) for expert, score in enumerate(scores)]
        by_group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda group: -by_group[group])[:chosen_groups]
        allowed = [expert for expert in range(experts) if expert // size in kept]
        best = sorted(allowed, key=lambda expert: -choice[expert])[:chosen]
        assert sorted(experts_TK[token].tolist()) == sorted(best)
        total = sum(scores[expert] for expert in best) if normalize else 1.0
        for weight, expert in zip(weights_TK[token].tolist(), experts_TK[token].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * scale)


def test_equal_experts_and_groups_go_to_the_lowest() -> None:
    gate, bias = torch.zeros(64, D, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for groups, chosen_groups in ((1, 1), (8, 3)):
        _, experts_TK = moe.MOE_GATE(
            rand(5, D), gate, bias, experts_per_token=8, groups=groups, chosen_groups=chosen_groups, scale=1.0,
            normalize=True, appended=0,
        )  # fmt: skip
        assert experts_TK.tolist() == [list(range(8))] * 5


@pytest.mark.property
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=30)
def test_experts_against_one_token_at_a_time(count: int, chosen: int, seed: int) -> None:
    """Permute, grouped products and weighted sum together; experts without a token and tokens without company too."""
    experts = 5
    generator = torch.Generator().manual_seed(seed)
    experts_TK = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(count)]).int()
    x, weights_TK = rand(count, D, seed=seed), rand(count, chosen, seed=seed)
    gate_up, down = Weight(rand(experts, 8, D)), Weight(rand(experts, D, 4))
    rows, order, counts = moe.moe_permute(x, experts_TK, experts)
    assert counts.tolist() == [int((experts_TK == expert).sum()) for expert in range(experts)]
    fused = moe.grouped_matmul_swiglu(rows, gate_up, counts, None)
    apart = moe.swiglu(moe.grouped_matmul(rows, gate_up, counts, None))
    assert torch.equal(fused, apart)
    out = moe.moe_unpermute(moe.grouped_matmul(fused, down, counts, None), weights_TK, order)
    for token in range(count):
        expected = torch.zeros(D, dtype=torch.float64)
        for weight, expert in zip(weights_TK[token], experts_TK[token].tolist(), strict=True):
            gate, up = (gate_up.values[expert] @ x[token]).chunk(2)
            expected += weight * (down.values[expert] @ (gate / (1 + (-gate).exp()) * up))
        torch.testing.assert_close(out[token], expected)


def test_norms_against_their_definition() -> None:
    x, y, weight = rand(T, D), rand(T, D, seed=1), Weight(rand(D))

    def normed(values: Any) -> Any:
        return values / (values.square().sum(-1, keepdim=True) / D + 0.1).sqrt() * weight.values

    torch.testing.assert_close(norm.rms_norm(x, weight, 0.1), normed(x))
    torch.testing.assert_close(norm.add_rms_norm(x, y, weight, 0.1), normed(x + y))
    torch.testing.assert_close(norm.add_rms_norm2(x, y, weight, 0.1), (normed(x + y), x + y))


def test_ends_of_the_model() -> None:
    table_VD, ids_T = Weight(rand(9, D)), torch.tensor([4, 0, 8, 4])
    assert torch.equal(tokens.embedding(ids_T, table_VD), table_VD.values[[4, 0, 8, 4]])
    # Of a vocabulary in pieces of three rows, the second.
    piece_TD = tokens.embedding(ids_T, Weight(table_VD.values[3:6]), first=3)
    assert torch.equal(piece_TD, table_VD.values[[4, 0, 8, 4]] * torch.tensor([1, 0, 0, 1])[:, None])
    x = rand(6, D)
    assert torch.equal(tokens.select_rows(x, 2), x[[2, 5]])
    assert torch.equal(tokens.concat(x, x[:, :1]), torch.cat([x, x[:, :1]], dim=1))
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -3.0, -0.5]])
    assert tokens.sample(logits).tolist() == [1, 0, 3], "ties to the lowest id"


def test_an_op_without_a_reference_says_so() -> None:
    with pytest.raises(NotImplementedError, match="send_recv"):
        collectives.SEND_RECV(rand(2, 2))
