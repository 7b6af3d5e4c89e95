"""Who owns which block, what save and restore move, and that no request or layer sees another's rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.errors import CastoffError
from castoff.runtime.caches import BlockPool
from castoff.runtime.engine import Engine, Rows
from tests.runtime.tiny import KINDS, Tiny, decode, engine, prefill, record, token_ids, torch, weights_of

actions = st.lists(
    st.tuples(st.sampled_from(["grow", "release", "share"]), st.integers(0, 4), st.integers(0, 60)), max_size=40
)


@pytest.mark.property
@given(blocks=st.integers(1, 12), block_tokens=st.integers(1, 9), actions=actions)
def test_blocks_are_free_or_owned(blocks: int, block_tokens: int, actions: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(blocks, block_tokens)
    held: dict[int, list[int]] = {}
    for action, request, tokens in actions:
        before = list(pool.blocks(request))
        if action == "release":
            pool.release(request)
            held[request] = []
        elif action == "share":
            donor = tokens % 5
            if not before and donor != request and pool.blocks(donor):
                count = 1 + tokens % len(pool.blocks(donor))
                pool.share(request, donor, count)
                assert pool.blocks(request) == pool.blocks(donor)[:count]
            held[request] = list(pool.blocks(request))
        else:
            needed = max(-(-tokens // block_tokens) - len(before), 0)
            if needed > pool.free_blocks:
                free = pool.free_blocks
                with pytest.raises(CastoffError, match="KV cache is full"):
                    pool.grow(request, tokens)
                # Refused as a whole: nothing is handed out.
                assert (pool.blocks(request), pool.free_blocks) == (before, free)
            else:
                pool.grow(request, tokens)
                assert pool.blocks(request)[: len(before)] == before, "blocks keep their places"
                assert len(pool.blocks(request)) == len(before) + needed
            held[request] = list(pool.blocks(request))
        for owner, own in held.items():
            assert pool.blocks(owner) == own, "nobody else's blocks changed"
        owned = {block for own in held.values() for block in own}
        assert owned <= set(range(blocks))
        assert pool.free_blocks == blocks - len(owned), "a block is free when its last owner has gone"
    for request in held:
        pool.release(request)
    assert pool.free_blocks == blocks
    pool.grow(99, blocks * block_tokens)
    assert sorted(pool.blocks(99)) == list(range(blocks)), "every block came back, once"


def test_release_of_an_unknown_request() -> None:
    pool = BlockPool(3, 16)
    pool.release(7)
    assert pool.free_blocks == 3


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_restore(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """A request saved, its blocks taken by another, and restored elsewhere: decode goes on as if nothing was."""
    tiny = tiny_checkpoint(kind)
    ids_BS, prompt = token_ids(1, 56, seed=1), 44
    undisturbed = engine(tiny)
    prefill(undisturbed, ids_BS[:, :prompt], [0])
    expected = decode(undisturbed, ids_BS, [0], prompt)

    own = engine(tiny)
    prefill(own, ids_BS[:, :prompt], [0])
    blocks = list(own.pool.blocks(0))
    saved = own.caches.save(blocks)
    own.pool.release(0)
    # Another request overwrites the old blocks; what was saved is a copy.
    prefill(own, token_ids(1, 60, seed=2), [1])
    assert set(blocks) <= set(own.pool.blocks(1))
    own.pool.grow(2, prompt)
    assert not set(own.pool.blocks(2)) & set(blocks)
    others = own.caches.save(own.pool.blocks(1))
    own.caches.restore(saved, own.pool.blocks(2))
    torch.testing.assert_close(decode(own, ids_BS, [2], prompt), expected, rtol=0, atol=1e-5)
    after = own.caches.save(own.pool.blocks(1))
    for layer, rows in others.latent.items():
        assert torch.equal(rows, after.latent[layer])
    for layer, rows in others.indexer.items():
        assert torch.equal(rows, after.indexer[layer])


def test_latent_rows_and_indexer_keys_are_both_needed(tiny_checkpoint: Callable[..., Tiny]) -> None:
    tiny = tiny_checkpoint("glm52")
    ids_BS, prompt = token_ids(1, 46, seed=1), 44
    own = engine(tiny)
    prefill(own, ids_BS[:, :prompt], [0])
    saved = own.caches.save(own.pool.blocks(0))
    expected = decode(own, ids_BS, [0], prompt)
    assert len(saved.latent) == tiny.spec.num_hidden_layers
    assert list(saved.indexer) == [0, 1, 2, 6], "keys on full layers alone"
    blocks = own.pool.blocks(0)
    for name in ("latent", "indexer"):
        if name == "latent":
            half = replace(saved, latent={layer: torch.zeros_like(rows) for layer, rows in saved.latent.items()})
        else:
            half = replace(saved, indexer={layer: torch.zeros_like(rows) for layer, rows in saved.indexer.items()})
        own.caches.restore(half, blocks)
        assert (decode(own, ids_BS, [0], prompt) - expected).abs().max() > 1e-2, name
    own.caches.restore(saved, blocks)
    torch.testing.assert_close(decode(own, ids_BS, [0], prompt), expected, rtol=0, atol=1e-5)


def test_restore_keeps_the_order_of_blocks(tiny_checkpoint: Callable[..., Tiny]) -> None:
    own = engine(tiny_checkpoint("glm5"))
    prefill(own, token_ids(1, 40), [0])
    saved = own.caches.save(own.pool.blocks(0))
    own.caches.restore(saved, [9, 20, 4])
    again = own.caches.save([9, 20, 4])
    for rows, moved in zip(saved.latent.values(), again.latent.values(), strict=True):
        assert torch.equal(rows, moved)
        assert rows.any()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_an_earlier_request_leave_no_trace(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    tiny = tiny_checkpoint(kind)
    ids_BS = token_ids(1, 40, seed=3)
    fresh, used = engine(tiny, num_blocks=4, dtype=torch.float64), engine(tiny, num_blocks=4, dtype=torch.float64)
    prefill(used, token_ids(1, 64, seed=4), [0])
    used.pool.release(0)
    for own in (fresh, used):
        prefill(own, ids_BS[:, :20], [1])
    torch.testing.assert_close(decode(used, ids_BS, [1], 20), decode(fresh, ids_BS, [1], 20), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_do_not_see_each_other(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """Interleaved blocks of three requests, decoded together and in another order than they were prefilled."""
    tiny = tiny_checkpoint(kind)
    ids_BS = token_ids(3, 40, seed=5)
    alone = []
    for row in range(3):
        own = engine(tiny, dtype=torch.float64)
        prefill(own, ids_BS[row : row + 1, :20], [0])
        alone.append(decode(own, ids_BS[row : row + 1], [0], 20))
    together = engine(tiny, block_tokens=4, num_blocks=30, dtype=torch.float64)
    # Chunks of four tokens take blocks in turn.
    prefill(together, ids_BS[:, :20], [4, 8, 6], chunk=4)
    order = [2, 0, 1]
    out = decode(together, ids_BS[order], [[4, 8, 6][row] for row in order], 20)
    torch.testing.assert_close(out, torch.cat([alone[row] for row in order]), rtol=0, atol=1e-10)


def test_padding_writes_to_no_request(tiny_checkpoint: Callable[..., Tiny]) -> None:
    own = engine(tiny_checkpoint("glm5"), num_blocks=3)
    ids_BS = token_ids(1, 48)
    prefill(own, ids_BS, [0])
    assert own.pool.free_blocks == 0
    before = own.caches.save(own.pool.blocks(0))
    with torch.no_grad():
        own.forward(token_ids(2, 4), Rows([None, None], [0, 0]), prefill=True, last=False)
        own.forward(token_ids(1, 1), Rows([None], [0]), prefill=False, last=True)
    after = own.caches.save(own.pool.blocks(0))
    for layer, rows in before.latent.items():
        assert torch.equal(rows, after.latent[layer])
    for layer, rows in before.indexer.items():
        assert torch.equal(rows, after.indexer[layer])


def _caches(own: Engine) -> list[tuple[str, int, Any]]:
    caches: list[tuple[str, int, Any]] = []
    for layer in range(own.setup.model.num_hidden_layers):
        caches.append(("latent", layer, own.caches.latent(layer).cache))
        if own.setup.model.indexer_types[layer] == "full":
            caches.append(("indexer", layer, own.caches.indexer(layer)))
    return caches


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_reads_its_own_rows_alone(tiny_checkpoint: Callable[..., Tiny], kind: str) -> None:
    """Every cache but a layer's own is filled with NaN: the layer, given its usual input, gives its usual output.

    With another marker in its own cache it does not.
    """
    own = engine(tiny_checkpoint(kind), num_blocks=4)
    weights, ids_BS = weights_of(own), token_ids(1, 41)
    own.pool.grow(0, 41)
    prefill(own, ids_BS[:, :40], [0])
    step, rows = ids_BS[:, 40:], Rows([0], [41])
    kept = [(name, layer, cache, cache.clone()) for name, layer, cache in _caches(own)]

    def output(layer: int, marker: Callable[[str, int], float | None]) -> Any:
        """Of one layer on the recorded inputs, with markers in the caches."""
        for name, owner, cache, values in kept:
            value = marker(name, owner)
            if value is None:
                cache.copy_(values)
            else:
                cache.fill_(value)
        _, runner = record(own, weights, step, rows, prefill=False, given=usual.inputs)
        return runner.outputs[f"layer {layer}"]

    _, usual = record(own, weights, step, rows, prefill=False)
    for layer in range(own.setup.model.num_hidden_layers):
        expected = usual.outputs[f"layer {layer}"]
        x_TD, _, topk_TK = output(layer, lambda _, owner: None if owner == layer else torch.nan)  # noqa: B023
        assert torch.equal(x_TD, expected[0]), layer
        assert torch.equal(topk_TK, expected[2]), layer
        x_TD, _, _ = output(layer, lambda name, owner: 3.0 if (name, owner) == ("latent", layer) else None)  # noqa: B023
        assert not torch.allclose(x_TD, expected[0]), layer
        if own.setup.model.indexer_types[layer] == "full":
            mine = ("indexer", layer)
            _, _, topk_TK = output(layer, lambda name, owner: 0.0 if (name, owner) == mine else None)  # noqa: B023
            assert not torch.equal(topk_TK.sort().values, expected[2].sort().values), layer


def test_cache_bytes(tiny_checkpoint: Callable[..., Tiny]) -> None:
    """7 + 1 blocks of 16 rows, fp32: 8 layers of 32 + 16 latent values, 4 full ones of 32; one of each for MTP."""
    tiny = tiny_checkpoint("glm52")
    rows = 8 * 16 * 4
    assert engine(tiny, num_blocks=7).caches.bytes == rows * (8 * 48 + 4 * 32)
    assert engine(tiny, num_blocks=7, mtp_tokens=1).caches.bytes == rows * (9 * 48 + 5 * 32)
