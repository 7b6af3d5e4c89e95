"""Logits, selected tokens and the MTP block against transformers, float32 on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.model.inputs import NOTHING, Selected
from castoff.runtime.engine import Rows
from tests.runtime.tiny import (
    INDEX_TOPK,
    KINDS,
    Tiny,
    decode,
    engine,
    modeling_deepseek,
    modeling_glm,
    mtp_layer,
    prefill,
    record,
    token_ids,
    torch,
    weights_of,
)

pytestmark = pytest.mark.numerics

TOLERANCE = 1e-4
STEPS = 64
# Scores nearer than this at the k-th place may be ordered by rounding.
RELATIVE_GAP = 1e-5


def assert_close(own: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    # A NaN is not within any tolerance.
    assert (own - expected).abs().max().item() <= tolerance


def reference_logits(tiny: Tiny, ids_BS: Any) -> Any:
    with torch.no_grad():
        return tiny.hf(ids_BS).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("index_topk", "prompt"),
    [(INDEX_TOPK, 7), (INDEX_TOPK, 40), (128, 40)],
    ids=["passes index_topk while decoding", "longer than index_topk", "shorter than index_topk"],
)
def test_prefill_and_decode(tiny_checkpoint: Callable[..., Tiny], kind: str, index_topk: int, prompt: int) -> None:
    tiny = tiny_checkpoint(kind, index_topk)
    ids_BS = token_ids(2, prompt + STEPS, seed=prompt)
    expected = reference_logits(tiny, ids_BS)
    own = engine(tiny)
    assert_close(prefill(own, ids_BS[:, :prompt], [0, 1]), expected[:, :prompt])
    assert_close(decode(own, ids_BS, [0, 1], prompt), expected[:, prompt:])


def test_the_logits_are_worth_comparing(tiny_checkpoint: Callable[..., Tiny]) -> None:
    """Far from constant, and the choice of tokens matters to them: with other keys chosen they are others."""
    for kind in KINDS:
        ids_BS = token_ids(1, 60)
        sparse = reference_logits(tiny_checkpoint(kind), ids_BS)
        dense = reference_logits(tiny_checkpoint(kind, 128), ids_BS)
        assert sparse.std() > 0.3
        torch.testing.assert_close(sparse[:, :INDEX_TOPK], dense[:, :INDEX_TOPK])
        assert (sparse[:, INDEX_TOPK + 8 :] - dense[:, INDEX_TOPK + 8 :]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 41])
def test_prefill_in_chunks(tiny_checkpoint: Callable[..., Tiny], kind: str, chunk: int) -> None:
    tiny = tiny_checkpoint(kind)
    ids_BS = token_ids(1, 48, seed=3)
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, 1e-10)):
        whole = prefill(engine(tiny, dtype=dtype), ids_BS, [0])
        assert_close(prefill(engine(tiny, dtype=dtype), ids_BS, [0], chunk=chunk), whole, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_another_size(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    tiny = tiny_checkpoint(kind)
    ids_BS = token_ids(1, 45, seed=4)
    small = engine(tiny, num_blocks=16, block_tokens=3, dtype=torch.float64)
    large = engine(tiny, num_blocks=3, block_tokens=64, dtype=torch.float64)
    assert_close(prefill(small, ids_BS, [0]), prefill(large, ids_BS, [0]), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_lengths_with_padding(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """Rows of 40, 9 and 23 tokens and an empty one in the middle: prefilled together from the left, then decoded."""
    tiny = tiny_checkpoint(kind)
    lengths, requests = [40, 9, 0, 23], [5, 2, None, 9]
    steps, longest = 6, max(lengths)
    full = [token_ids(1, length + steps, seed=length)[0] for length in lengths]
    expected = [reference_logits(tiny, ids[None])[0] for ids in full]
    own = engine(tiny)
    for request, length in zip(requests, lengths, strict=True):
        if request is not None:
            own.pool.grow(request, length + steps)
    ids_BS = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids_BS[row, longest - length :] = full[row][:length]
    with torch.no_grad():
        out = own.forward(ids_BS, Rows(requests, lengths), prefill=True, last=False)
        logits_BSV = out.logits_TV.view(*ids_BS.shape, -1)
        assert torch.isfinite(logits_BSV).all()
        for row, length in enumerate(lengths):
            if length:
                assert_close(logits_BSV[row, longest - length :], expected[row][:length])
        for step in range(steps):
            now = [length + step + 1 if length else 0 for length in lengths]
            ids_B1 = torch.stack([ids[length + step] for ids, length in zip(full, lengths, strict=True)])[:, None]
            out = own.forward(ids_B1, Rows(requests, now), prefill=False, last=True)
            assert torch.isfinite(out.logits_TV).all()
            for row, length in enumerate(lengths):
                if length:
                    assert_close(out.logits_TV[row], expected[row][length + step])


def index_scores(kind: str, module: Any, hidden_SD: Any, qa_SQ: Any, cos: Any, sin: Any) -> Any:
    """Scores of an indexer of transformers by the published definition, in float64: (S, S), −inf for the future."""
    rope = module.qk_rope_head_dim
    if kind == "deepseek_v32":
        rotate = modeling_deepseek.apply_rotary_pos_emb
    else:
        rotate = modeling_glm.apply_rotary_pos_emb_interleave
    q = module.wq_b(qa_SQ).view(1, hidden_SD.shape[0], module.n_heads, module.head_dim)
    k = module.k_norm(module.wk(hidden_SD)).view(1, -1, 1, module.head_dim)
    q_rope, k_rope = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rope, q[..., rope:]], dim=-1)[0].double()
    k = torch.cat([k_rope, k[..., rope:]], dim=-1)[0, :, 0].double()
    weights = module.weights_proj(hidden_SD).double() * module.n_heads**-0.5 * module.head_dim**-0.5
    scores = torch.einsum("sh,shl->sl", weights, torch.einsum("she,le->shl", q, k).relu())
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf)


@contextmanager
def watched_indexers(tiny: Tiny) -> Iterator[dict[int, tuple[Any, Any]]]:
    """Ids and scores of every indexer of transformers, by layer, while it runs one sequence."""
    seen: dict[int, tuple[Any, Any]] = {}
    handles = []

    def watch(layer: int, module: Any) -> None:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ids: Any) -> None:
            hidden, qa, (cos, sin) = args[:3]
            seen[layer] = (ids[0], index_scores(tiny.kind, module, hidden[0], qa[0], cos, sin))

        handles.append(module.register_forward_hook(hook, with_kwargs=True))

    for layer, decoder_layer in enumerate(tiny.hf.model.layers):
        if getattr(decoder_layer.self_attn, "indexer", None) is not None:
            watch(layer, decoder_layer.self_attn.indexer)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", KINDS)
def test_selected_tokens(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    tiny, length = tiny_checkpoint(kind), 90
    ids_BS = token_ids(1, length, seed=5)
    with watched_indexers(tiny) as seen:
        reference_logits(tiny, ids_BS)
    own = engine(tiny)
    own.pool.grow(0, length)
    _, runner = record(own, weights_of(own), ids_BS, Rows([0], [length]), prefill=True)
    types = tiny.spec.indexer_types
    assert sorted(seen) == [layer for layer, kind in enumerate(types) if kind == "full"]
    compared = 0
    for layer, (ids_SK, scores_SL) in seen.items():
        topk_TK = runner.outputs[f"layer {layer}"][2]
        ranked = scores_SL.sort(dim=-1, descending=True).values
        for query in range(length):
            chosen = {token for token in topk_TK[query].tolist() if token >= 0}
            expected = {token for token in ids_SK[query].tolist() if token <= query}
            assert len(chosen) == min(query + 1, INDEX_TOPK), "every visible token, up to index_topk"
            assert max(chosen) <= query, "no token of the future"
            if query >= INDEX_TOPK:
                kth, following = ranked[query, INDEX_TOPK - 1], ranked[query, INDEX_TOPK]
                if kth - following <= RELATIVE_GAP * kth.abs():
                    continue
            assert chosen == expected, f"layer {layer}, query {query}"
            compared += 1
    # The gaps of random scores are wide: nearly all are compared.
    assert compared >= 0.98 * length * len(seen)


def test_shared_layers_use_their_owners_ids(tiny_checkpoint: Callable[..., Tiny]) -> None:
    tiny = tiny_checkpoint("glm52")
    types = tiny.spec.indexer_types
    # Full up to the offset, then three shared layers after each full one.
    assert types == ("full", "full", "full", "shared", "shared", "shared", "full", "shared")
    own = engine(tiny)
    own.pool.grow(0, 50)
    out, runner = record(own, weights_of(own), token_ids(1, 50), Rows([0], [50]), prefill=True)
    owner = 0
    chosen = []
    for layer, kind in enumerate(types):
        owner = layer if kind == "full" else owner
        assert runner.outputs[f"layer {layer}"][2] is runner.outputs[f"layer {owner}"][2]
        chosen.append(runner.outputs[f"layer {layer}"][2])
    assert out.topk_TK is chosen[6]
    assert not torch.equal(chosen[2].sort(dim=-1).values, chosen[6].sort(dim=-1).values), "owners differ"


def mtp_oracle(tiny: Tiny, ids_S: Any, hidden_SD: Any, prev_topk: Any = None) -> tuple[Any, Any]:
    """The MTP block from transformers' own decoder layer: hidden states after its norm, and logits."""
    model, length = tiny.hf.model, ids_S.shape[0]
    eps = tiny.spec.rms_norm_eps

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), tiny.mtp[name], eps)

    joined = torch.cat([norm(model.embed_tokens(ids_S), "enorm"), norm(hidden_SD, "hnorm")], dim=-1)
    x_1SD = (joined @ tiny.mtp["eh_proj"].T)[None]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    layer, given = tiny.mtp_layer, {}
    if prev_topk is not None:
        layer = mtp_layer(tiny.kind, INDEX_TOPK, indexer="shared")
        state = {name: value for name, value in tiny.mtp_layer.state_dict().items() if ".indexer." not in name}
        layer.load_state_dict(state)
        given = {"prev_topk_indices": prev_topk[None]}
    out = layer(
        x_1SD, attention_mask=mask, position_ids=positions, position_embeddings=model.rotary_emb(x_1SD, positions),
        **given,
    )  # fmt: skip
    out_SD = (out[0] if isinstance(out, tuple) else out)[0]
    hidden = norm(out_SD, "shared_head.norm")
    return hidden, tiny.hf.lm_head(hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [INDEX_TOPK - 4, 48], ids=["shorter than index_topk", "longer"])
def test_mtp_block(tiny_checkpoint: Callable[..., Tiny], kind: str, length: int) -> None:
    tiny = tiny_checkpoint(kind)
    ids_BS = token_ids(1, length + 1, seed=6)
    with torch.no_grad():
        hidden_SD = tiny.hf.model(ids_BS[:, :-1]).last_hidden_state[0]
        expected_SD, expected_SV = mtp_oracle(tiny, ids_BS[0, 1:], hidden_SD)
        own = engine(tiny, mtp_tokens=1)
        own.pool.grow(0, length)
        main = own.forward(ids_BS[:, :-1], Rows([0], [length]), prefill=True, last=False)
        assert_close(main.hidden_TD, hidden_SD)
        out = own.draft(ids_BS[:, 1:], main.hidden_TD, NOTHING, Rows([0], [length]), prefill=True, last=False)
    assert_close(out.hidden_TD, expected_SD)
    assert_close(out.logits_TV, expected_SV)
    assert torch.equal(out.ids_T, expected_SV.argmax(dim=-1))


@pytest.mark.parametrize("kind", KINDS)
def test_mtp_block_in_chunks(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """The block's caches carry over from call to call: 20 tokens at once, then one by one."""
    tiny, length, first = tiny_checkpoint(kind), 32, 20
    ids_S = token_ids(1, length, seed=7)[0]
    hidden_SD = torch.randn(length, 64, generator=torch.Generator().manual_seed(8))
    own = engine(tiny, mtp_tokens=1)
    own.pool.grow(0, length)
    with torch.no_grad():
        _, expected_SV = mtp_oracle(tiny, ids_S, hidden_SD)
        out = own.draft(ids_S[None, :first], hidden_SD[:first], NOTHING, Rows([0], [first]), prefill=True, last=False)
        assert_close(out.logits_TV, expected_SV[:first])
        for at in range(first, length):
            step = slice(at, at + 1)
            out = own.draft(ids_S[None, step], hidden_SD[step], NOTHING, Rows([0], [at + 1]), prefill=False, last=False)
            assert_close(out.logits_TV, expected_SV[step])


@pytest.mark.parametrize("kind", ["glm5", "glm52"])
def test_mtp_block_with_a_frozen_topk(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """Ids given are used as they are; the keys are written all the same, so that a later call can score them."""
    tiny, length = tiny_checkpoint(kind), 40
    ids_S = token_ids(1, length, seed=9)[0]
    generator = torch.Generator().manual_seed(10)
    hidden_SD = torch.randn(length, 64, generator=generator)
    # Any visible tokens, in any order; those that come after the own count for nothing.
    picks = [torch.cat([torch.randperm(at + 1, generator=generator), torch.arange(at + 1, 99)]) for at in range(length)]
    topk_TK = torch.stack([ids[:INDEX_TOPK] for ids in picks]).to(torch.int32)
    frozen, scored = engine(tiny, mtp_tokens=1), engine(tiny, mtp_tokens=1)
    with torch.no_grad():
        _, expected_SV = mtp_oracle(tiny, ids_S, hidden_SD, prev_topk=topk_TK)
        _, anew_SV = mtp_oracle(tiny, ids_S, hidden_SD)
        for own in (frozen, scored):
            own.pool.grow(0, length)
        rows = Rows([0], [length])
        out = frozen.draft(ids_S[None], hidden_SD, Selected(topk_TK), rows, prefill=False, last=False)
        scored.draft(ids_S[None], hidden_SD, NOTHING, rows, prefill=False, last=False)
    assert_close(out.logits_TV, expected_SV)
    assert (expected_SV - anew_SV).abs().max() > 100 * TOLERANCE
    assert torch.equal(out.topk_TK, topk_TK)
    layer = tiny.spec.num_hidden_layers
    torch.testing.assert_close(frozen.caches.indexer(layer), scored.caches.indexer(layer))
    assert frozen.caches.indexer(layer).any()
