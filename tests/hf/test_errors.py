"""What offload cannot do is told in one sentence."""

from typing import Any

import pytest

from castoff.errors import CastoffError
from castoff.spec.offload import Offload

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.hf import offload  # noqa: E402
from tests.hf.models import MODES, NONE, generate, model_of, opened, shared_model  # noqa: E402
from tests.runtime.tiny import config_of, token_ids, transformers  # noqa: E402

DIRECT = MODES[-1]
IDS = token_ids(1, 20)


@pytest.fixture
def model() -> Any:
    return shared_model("glm5", 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 2}, "beam search reorders the cache, which castoff's cannot"),
        ({"num_return_sequences": 3, "do_sample": True}, "room for batch=2 requests, and this call brings 3"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation takes tokens back"),
        ({"new_tokens": 50}, "room for max_tokens=64 tokens of each request, and this call would make them 65"),
    ],
)
def test_what_generate_is_asked(model: Any, given: dict[str, Any], said: str) -> None:
    with opened(model, DIRECT, max_tokens=64, batch=2) as cache, pytest.raises(CastoffError, match=said):
        generate(model, IDS, cache, **given)
    # What it could not do left no trace.
    with opened(model, DIRECT, max_tokens=64) as cache:
        generate(model, IDS, cache)


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        (Offload(offload="gather", ways=4), {}, "--ways 4 is for --offload serve_install or direct"),
        (Offload(offload="direct", pool_tokens=30, ways=4), {}, "--pool-tokens must be a positive multiple"),
        (Offload(offload="gather", mtp_gather_reuse=True), {}, "transformers' models have no MTP block"),
        (DIRECT, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        (DIRECT, {"batch": 0}, "batch must be at least 1, got 0"),
        (DIRECT, {"max_tokens": 2**50}, "bytes of host memory, and .* are free"),
    ],
)
def test_what_offload_is_asked(model: Any, options: Offload, given: dict[str, Any], said: str) -> None:
    with pytest.raises(CastoffError, match=said):
        offload(model, options, **{"max_tokens": 64, **given})
    assert model.config._attn_implementation == "sdpa"


def test_models_that_it_is_not_for() -> None:
    def refuses(model: Any, said: str) -> None:
        with pytest.raises(CastoffError, match=said):
            offload(model, DIRECT, max_tokens=64)

    refuses(torch.nn.Linear(2, 2), "takes a model of transformers, got Linear")
    tiny = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    refuses(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, num_attention_heads=1)), 'model_type is "llama"'
    )
    dense = transformers.DeepseekV3Config(**config_of("deepseek_v32").to_diff_dict())
    refuses(transformers.DeepseekV3ForCausalLM(dense), "has no indexer")
    with torch.device("meta"):
        refuses(transformers.GlmMoeDsaForCausalLM(config_of("glm5")), "layers are on meta")

    class Adapted(torch.nn.Linear):
        """As adapters and quantised layers are."""

    adapted = model_of("glm5")
    projection = adapted.model.layers[1].self_attn.kv_b_proj
    adapted.model.layers[1].self_attn.kv_b_proj = Adapted(projection.in_features, projection.out_features, bias=False)
    refuses(adapted, "layer 1: castoff multiplies by the weights of kv_b_proj itself, and this one is a Adapted")
    split = model_of("glm5")
    projection = split.model.layers[2].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight[:10])
    refuses(split, "layer 2 has some of its heads")


def test_calls_that_it_is_not_for(model: Any) -> None:
    with torch.no_grad(), opened(model, DIRECT, batch=2) as cache:
        with pytest.raises(CastoffError, match="the model has an OffloadedCache already"):
            opened(model, DIRECT)
        with pytest.raises(CastoffError, match="pass it as cache="):
            model(IDS)
        with torch.enable_grad(), pytest.raises(CastoffError, match=r"under torch.no_grad\(\)"):
            model(IDS, cache=cache)
        with pytest.raises(CastoffError, match=r"after eval\(\)"):
            model.train()(IDS, cache=cache)
        model.eval()
        with pytest.raises(CastoffError, match="takes a boolean attention mask"):
            model(IDS, cache=cache, attention_mask=torch.zeros(1, 1, 20, 20))
        model(IDS, cache=cache)
        with pytest.raises(CastoffError, match="holds 1 requests, and this call brings 2"):
            model(IDS.expand(2, -1), cache=cache)
        for call, said in (
            (lambda: cache.crop(-1), "cannot give up its last tokens"),
            (lambda: cache.batch_repeat_interleave(2), "cannot repeat its requests"),
            (lambda: cache.batch_select_indices(torch.tensor([0])), "cannot drop some of its requests"),
            (lambda: model.model.layers[1].self_attn(
                torch.zeros(1, 1, 64).double(), (torch.zeros(1, 1, 16).double(),) * 2,
                torch.ones(1, 1, 1, 21, dtype=torch.bool), cache,
            ), "layer 1 came out of turn"),
        ):  # fmt: skip
            with pytest.raises(CastoffError, match=said):
                call()
    with torch.no_grad(), pytest.raises(CastoffError, match='works with attn_implementation="castoff"'):
        model(IDS, cache=cache)
    with opened(model, NONE) as second:
        cache.close()
        generate(model, IDS, second)


def test_a_model_that_changed_since() -> None:
    changing = model_of("glm5", 0, torch.float32)
    with torch.no_grad(), opened(changing, DIRECT) as cache:
        changing.to(torch.bfloat16)
        with pytest.raises(
            CastoffError, match=r"made for rows of torch.float32 on cpu, and these are of torch.bfloat16"
        ):
            changing(IDS, cache=cache)
