"""generate() over latent rows in host memory says what it says without."""

from functools import cache

import pytest

from castoff.spec.model import load_model, raw_config
from castoff.spec.offload import Offload

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.hf.structure import setup_of  # noqa: E402
from tests.hf.models import MODES, NONE, POOL, Generated, generate, model_of, opened, shared_model  # noqa: E402
from tests.runtime.tiny import INDEX_TOPK, token_ids, transformers  # noqa: E402

pytestmark = pytest.mark.numerics
LONG = 6 * POOL + 5
each_way = pytest.mark.parametrize("options", [NONE, *MODES], ids=lambda options: options.offload)
each_mode = pytest.mark.parametrize("options", MODES, ids=lambda options: options.offload)


@cache
def reference(kind: str, seed: int, length: int) -> Generated:
    return generate(shared_model(kind, seed), token_ids(1, length, seed))


@each_way
@pytest.mark.parametrize(
    ("kind", "seed", "length"),
    [
        ("glm52", 0, 1),
        ("glm52", 1, INDEX_TOPK - 2),
        ("glm52", 2, POOL + 1),
        ("glm52", 3, LONG),
        ("glm52", 4, LONG),
        ("glm5", 5, LONG),
        ("deepseek_v32", 6, LONG),
    ],
)
def test_tokens_are_those_of_transformers(kind: str, seed: int, length: int, options: Offload) -> None:
    model, expected = shared_model(kind, seed), reference(kind, seed, length)
    with opened(model, options) as cache:
        generate(model, token_ids(1, length, seed), cache).agrees_with(expected, within=1e-5)
        report = cache.report()
    assert model.config._attn_implementation == "sdpa"
    if not options.offloads:
        assert report is None
    elif length == LONG:
        assert report is not None
        assert report.link_bytes > 0
        assert report.hit_rate > 0


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_are_those_of_castoffs_attention_over_rows_on_the_device(options: Offload, dtype: object) -> None:
    model, ids = shared_model("glm52", 7, dtype), token_ids(2, LONG, 7)
    with opened(model, NONE, batch=2) as cache:
        resident = generate(model, ids, cache)
    with opened(model, options, batch=2) as cache:
        generate(model, ids, cache).equals(resident)


def test_float32_logits_are_those_of_transformers() -> None:
    model, ids = shared_model("glm52", 8, torch.float32), token_ids(1, LONG + 6, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with opened(model, MODES[-1]) as cache:
            prompt = model(ids[:, :LONG], cache=cache).logits
            steps = [model(ids[:, i : i + 1], cache=cache).logits for i in range(LONG, LONG + 6)]
    torch.testing.assert_close(torch.cat([prompt, *steps], dim=1), expected, rtol=0, atol=1e-4)


@each_way
def test_a_batch_with_left_padding(options: Offload) -> None:
    model, ids = shared_model("glm52", 9), token_ids(3, LONG, 9)
    mask = torch.ones_like(ids)
    mask[1, : LONG - INDEX_TOPK // 2] = 0
    mask[2, : LONG - 3 * POOL] = 0
    # Room for more requests than there are.
    with opened(model, options, batch=4) as cache:
        own = generate(model, ids, cache, attention_mask=mask)
    own.agrees_with(generate(model, ids, attention_mask=mask), within=1e-5)


@each_mode
def test_prompts_in_chunks(options: Offload) -> None:
    """The last chunk has one token, and is decoded as it were."""
    model, ids = shared_model("glm52", 10), token_ids(2, 4 * POOL + 1, 10)
    expected = generate(model, ids)
    with opened(model, options, batch=2) as cache:
        generate(model, ids, cache, prefill_chunk_size=POOL).agrees_with(expected, within=1e-5)


@each_mode
def test_a_second_turn_and_then_another_prompt(options: Offload) -> None:
    """Decode, prefill, decode: rows of the second prompt are in no ring, and those of the first are in pools."""
    model, first, more = shared_model("glm52", 11), token_ids(1, 3 * POOL, 11), token_ids(1, POOL, 12)
    other = token_ids(2, 2 * POOL, 13)
    theirs = transformers.DynamicCache(config=model.config)
    expected = [generate(model, first, theirs)]
    second = torch.cat([expected[0].sequences, more], dim=1)
    expected += [generate(model, second, theirs), generate(model, other)]
    with opened(model, options, batch=2) as cache:
        generate(model, first, cache).agrees_with(expected[0], within=1e-5)
        generate(model, second, cache).agrees_with(expected[1], within=1e-5)
        cache.reset()
        generate(model, other, cache).agrees_with(expected[2], within=1e-5)


@each_mode
def test_a_pass_that_was_interrupted_is_made_again(options: Offload) -> None:
    model, ids = model_of("glm52", 14), token_ids(1, LONG, 14)
    expected = generate(model, ids)
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 4):
            raise KeyboardInterrupt

    # In the middle of an index group, during the prompt, and then during the third step.
    handle = model.model.layers[3].mlp.register_forward_pre_hook(interrupt)
    with opened(model, options) as cache, torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model(ids, cache=cache)
        model(ids, cache=cache)
        model(expected.sequences[:, LONG : LONG + 1], cache=cache)
        with pytest.raises(KeyboardInterrupt):
            model(expected.sequences[:, LONG + 1 : LONG + 2], cache=cache)
        handle.remove()
        own = [model(expected.sequences[:, i : i + 1], cache=cache).logits[:, -1] for i in range(LONG + 1, LONG + 5)]
    torch.testing.assert_close(torch.stack(own).float(), expected.logits[2:], rtol=0, atol=1e-5)


@each_mode
def test_a_cache_from_inside_inference_mode_works_outside(options: Offload) -> None:
    model, ids, expected = shared_model("glm52", 3), token_ids(1, LONG, 3), reference("glm52", 3, LONG)
    with torch.inference_mode():
        cache = opened(model, options)
        generate(model, ids, cache)
    with cache:
        cache.reset()
        generate(model, ids, cache).agrees_with(expected, within=1e-5)


def test_rows_in_host_memory_are_latents_and_rotated_keys() -> None:
    model, ids = shared_model("glm52", 15), token_ids(1, LONG, 15)
    theirs = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=theirs)
    with torch.no_grad(), opened(model, MODES[-1]) as cache:
        model(ids, cache=cache)
        report = cache.report()
        assert report is not None
        memory = cache._store._offload.memory
        for layer, rows in memory.layers.items():
            latents, keys = theirs.layers[layer].keys[0, 0], theirs.layers[layer].values[0, 0]
            torch.testing.assert_close(rows.host.flatten(0, 1)[:LONG], torch.cat([latents, keys], dim=-1))
            assert rows.region.shape[0] == POOL + 3, "a pool, a ring of two rows, and a spare"
    rows_bytes = 8 * latents.shape[-1] + 8 * keys.shape[-1]
    assert report.host_bytes == 8 * 3 * 128 * rows_bytes, "8 layers of 3 blocks, one of which is a spare"


def test_the_published_glm52() -> None:
    config = transformers.GlmMoeDsaConfig(**raw_config("zai-org/GLM-5.2"))
    spec, own = load_model("zai-org/GLM-5.2"), setup_of(config, "GLM-5.2").model
    assert own.index_groups == spec.index_groups
    assert own.indexer is not None
    assert spec.indexer is not None
    assert own.indexer.index_topk == spec.indexer.index_topk
