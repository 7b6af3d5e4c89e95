"""Quantised checkpoints: what is stored is what runs, and every fault of values and scales is named."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from castoff.model.weights import layer_parameters
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, RandomTensors
from castoff.runtime.engine import Engine
from castoff.runtime.stored import Part, Piece, read_quantized
from castoff.spec.quant import linear_format
from tests.runtime.fake_quant import Held, RoundedInputs, dequantized
from tests.runtime.quantized import ACTIONS, EXPERT, SUFFIX, WEIGHT, Given, form_of, plain_weight, same
from tests.runtime.tiny import KINDS, Tiny, prefill, setup_of, tensors_of, token_ids, torch, write_tensors

CPU = torch.device("cpu")


def loaded(tiny: Tiny, action: str, *, mtp_tokens: int = 0, dtype: Any = torch.float32) -> LoadedWeights:
    source = Checkpoint(tiny.directory, tiny.spec, mtp=mtp_tokens > 0)
    return LoadedWeights(setup_of(tiny.spec, mtp_tokens=mtp_tokens, action=action), source, dtype=dtype, device=CPU)


def engine_of(tiny: Tiny, weights: Any, action: str, dtype: Any, mtp_tokens: int = 0) -> Engine:
    setup = setup_of(tiny.spec, mtp_tokens=mtp_tokens, action=action)
    return Engine(setup, weights, num_blocks=32, block_tokens=16, dtype=dtype, device=CPU)


def without_scales(weights: LoadedWeights, layers: int, dtype: Any) -> tuple[Held, list[Any]]:
    """The same weights, dequantised, and those that were quantised."""
    held = [{name: plain_weight(w, dtype) for name, w in weights.layer(at).items()} for at in range(layers)]
    quantized = [
        held[at][name].values for at in range(layers) for name, w in weights.layer(at).items() if w.scales is not None
    ]
    return Held(held, dict(weights.outer())), quantized


@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_rounded_products(converted: Callable[[str, str], Tiny], kind: str, action: str) -> None:
    """Plain products of the dequantised weights with inputs rounded by hand, in otherwise the same engine.

    In float64, where no value comes so near the middle of two steps that rounding could take it either way.
    """
    dtype, tolerance = torch.float64, 1e-9
    tiny, ids_BS = converted(kind, action), token_ids(1, 40, seed=1)
    weights = loaded(tiny, action, dtype=dtype)
    own = prefill(engine_of(tiny, weights, action, dtype), ids_BS, [0])
    plain, quantized = without_scales(weights, tiny.spec.num_hidden_layers, dtype)
    oracle = engine_of(tiny, plain, "DISABLED", dtype)
    unrounded = prefill(engine_of(tiny, plain, "DISABLED", dtype), ids_BS, [0])
    with RoundedInputs(quantized, action) as mode:
        expected = prefill(oracle, ids_BS, [0])
    assert mode.products > 10 * tiny.spec.num_hidden_layers
    assert (own - expected).abs().max() <= tolerance
    assert (own - unrounded).abs().max() > 10 * tolerance


def in_transformers(hf: Any, tiny: Tiny, weights: LoadedWeights) -> tuple[Any, list[Any]]:
    """transformers' model with the weights of a checkpoint, dequantised by hand, and those that were quantised.

    Gate and up are those of `weights`: in FP8, their 32 and 96 rows fill no blocks, so that they are quantised anew.
    """
    stored, own = tensors_of(tiny.directory), copy.deepcopy(hf)
    # Other implementations of the experts multiply by functions that RoundedInputs does not see.
    own.set_experts_implementation("eager")
    plain, _ = without_scales(weights, tiny.spec.num_hidden_layers, torch.float32)
    for at, layer in enumerate(plain.layers):
        for stem in ("mlp", "mlp.shared_experts"):
            if f"{stem}.gate_up_proj" in layer:
                for name, values in zip("gate up".split(), layer[f"{stem}.gate_up_proj"].values.chunk(2), strict=True):
                    stored[f"model.layers.{at}.{stem}.{name}_proj.weight"] = values
    quantized = []
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                parameter.copy_(plain.layers[int(name.split(".")[2])]["mlp.experts.gate_up_proj"].values)
            elif name.endswith("experts.down_proj"):
                downs = [name.replace("down_proj", f"{expert}.down_proj.weight") for expert in range(len(parameter))]
                parameter.copy_(torch.stack([dequantized(stored, down) for down in downs]))
            else:
                parameter.copy_(dequantized(stored, name))
            kept = ("kv_b_proj", "weights_proj", "mlp.gate.", "lm_head", "embed_tokens")
            if parameter.dim() > 1 and not any(word in name for word in kept):
                quantized.append(parameter)
    return own, quantized


@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_transformers(
    tiny_checkpoint: Callable[..., Tiny], converted: Callable[[str, str], Tiny], kind: str, action: str
) -> None:
    """A value in the middle between two may round either way, and an FP8 step is a sixteenth: hence the median."""
    tiny, ids_BS = converted(kind, action), token_ids(4, 14, seed=1)
    weights = loaded(tiny, action)
    hf, quantized = in_transformers(tiny_checkpoint(kind).hf, tiny, weights)
    with torch.no_grad():
        unrounded = tiny_checkpoint(kind).hf(ids_BS).logits
        with RoundedInputs(quantized, action):
            expected = hf(ids_BS).logits
    own = prefill(engine_of(tiny, weights, action, torch.float32), ids_BS, list(range(4)))
    assert (own - expected).abs().median() <= 1e-5
    assert (unrounded - expected).abs().median() >= 0.02


def test_stored_values_are_held_as_they_are(converted: Callable[[str, str], Tiny], action: str) -> None:
    tiny = converted("glm5", action)
    stored, weights = tensors_of(tiny.directory), loaded(tiny, action, mtp_tokens=1)
    suffix, prefix = SUFFIX[action], f"model.layers.{tiny.spec.num_hidden_layers}."
    for layer, name in ((1, "self_attn.o_proj"), (4, "self_attn.indexer.wk"), (0, "mlp.down_proj")):
        weight, key = weights.layer(layer)[name], f"model.layers.{layer}.{name}.weight"
        assert weight.format == linear_format(action)  # type: ignore[arg-type]
        assert same(weight.values, stored[key])
        assert same(weight.scales, stored[key + suffix])
    experts = weights.layer(4)["mlp.experts.down_proj"]
    assert tuple(experts.values.shape) == (8, 64, 32)
    assert same(experts.values[5], stored[f"{prefix}mlp.experts.5.down_proj.weight"])
    assert same(experts.scales[5], stored[f"{prefix}mlp.experts.5.down_proj.weight{suffix}"])
    for name in ("self_attn.kv_b_proj", "self_attn.indexer.weights_proj", "mlp.gate", "eh_proj"):
        assert weights.layer(4)[name].scales is None
    assert weights.outer()["lm_head"].scales is None


def test_bytes_count_scales(converted: Callable[[str, str], Tiny], action: str) -> None:
    tiny = converted("glm5", action)
    weights = loaded(tiny, action)
    held = [*weights.outer().values(), *(w for at in range(4) for w in weights.layer(at).values())]
    assert weights.bytes == sum(w.values.nbytes + (w.scales.nbytes if w.scales is not None else 0) for w in held)


def test_gate_and_up_are_joined(converted: Callable[[str, str], Tiny], action: str) -> None:
    """INT8 rows are put together as they are; FP8 blocks over the seam are made anew, within a step of them."""
    tiny = converted("glm5", action)
    stored, own = tensors_of(tiny.directory), loaded(tiny, action).layer(0)["mlp.gate_up_proj"]
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    expected = torch.cat([dequantized(stored, name) for name in names])
    found = plain_weight(own, torch.float32).values
    if action == "W8A8_DYNAMIC":
        assert same(own.values, torch.cat([stored[name] for name in names]))
        assert same(found, expected)
    else:
        assert tuple(own.scales.shape) == (2, 1)
        # Three bits of mantissa: half a step is a sixteenth of a value, and no less than the smallest number's.
        assert ((found - expected).abs() <= expected.abs() / 16 + own.scales.max() * 2**-10).all()


def test_a_plain_run_of_a_quantised_checkpoint(converted: Callable[[str, str], Tiny], action: str) -> None:
    """DISABLED dequantises on reading, every tensor."""
    tiny = converted("glm5", action)
    stored, weights = tensors_of(tiny.directory), loaded(tiny, "DISABLED")
    assert all(weight.scales is None for at in range(4) for weight in weights.layer(at).values())
    for name in ("self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "mlp.down_proj"):
        expected = dequantized(stored, f"model.layers.0.{name}.weight")
        assert same(weights.layer(0)[name].values, expected)
    joined = torch.cat(
        [dequantized(stored, f"model.layers.3.mlp.experts.6.{name}_proj.weight") for name in ("gate", "up")]
    )
    assert same(weights.layer(3)["mlp.experts.gate_up_proj"].values[6], joined)


def test_a_quantised_run_of_a_plain_checkpoint(
    tiny_checkpoint: Callable[..., Tiny], converted: Callable[[str, str], Tiny], action: str
) -> None:
    """Quantising on reading gives what converting gives; FP8's gate and up are quantised together, and once."""
    plain, quantized = loaded(tiny_checkpoint("glm5"), action), loaded(converted("glm5", action), action)
    for layer in range(4):
        for name, weight in quantized.layer(layer).items():
            own = plain.layer(layer)[name]
            assert own.format == weight.format, name
            if action == "W8A8_DYNAMIC" or "gate_up" not in name:
                assert same(own.values, weight.values), name
                assert weight.scales is None or same(own.scales, weight.scales), name


@pytest.mark.parametrize(("stored", "wanted"), [ACTIONS, ACTIONS[::-1]])
def test_another_format_than_the_stored_one(converted: Callable[[str, str], Tiny], stored: str, wanted: str) -> None:
    tiny = converted("glm5", stored)
    own = loaded(tiny, wanted).layer(1)["self_attn.o_proj"]
    expected = dequantized(tensors_of(tiny.directory), WEIGHT)
    assert own.format == linear_format(wanted)  # type: ignore[arg-type]
    found = plain_weight(own, torch.float32).values
    step = own.scales / 2 if wanted == "W8A8_DYNAMIC" else expected.abs() / 16 + own.scales.max() * 2**-10
    assert ((found - expected).abs() <= 1.001 * step).all()


def test_weights_without_activations(converted: Callable[[str, str], Tiny]) -> None:
    """W8A16 holds what W8A8 stores."""
    tiny = converted("glm5", "W8A8_DYNAMIC")
    own, stored = loaded(tiny, "W8A16_DYNAMIC").layer(1)["self_attn.o_proj"], tensors_of(tiny.directory)
    assert same(own.values, stored[WEIGHT])
    assert not own.quantizes_activations


def test_plain_pieces_in_a_quantised_checkpoint(
    copied: Tiny, tiny_checkpoint: Callable[..., Tiny], action: str
) -> None:
    """What is stored decides, tensor by tensor: plain up beside quantised gate, an expert and a projection."""
    tensors, plain = tensors_of(copied.directory), tensors_of(tiny_checkpoint("glm5").directory)
    names = [WEIGHT, EXPERT, "model.layers.0.mlp.up_proj.weight"]
    for name in names:
        tensors[name] = plain[name]
        del tensors[name + SUFFIX[action]]
    write_tensors(copied.directory, tensors)
    before = loaded(tiny_checkpoint("glm5"), action)
    for layer, name in ((1, "self_attn.o_proj"), (3, "mlp.experts.down_proj")):
        assert same(loaded(copied, action).layer(layer)[name].values, before.layer(layer)[name].values)
    assert torch.isfinite(plain_weight(loaded(copied, action).layer(0)["mlp.gate_up_proj"], torch.float32).values).all()


@pytest.mark.parametrize("spelling", ["flat", "bf16"])
def test_other_spellings_of_scales(copied: Tiny, action: str, spelling: str) -> None:
    if (action, spelling) == ("FP8", "flat"):
        pytest.skip("scales of blocks have two axes")
    tensors = tensors_of(copied.directory)
    name = WEIGHT + SUFFIX[action]
    before = tensors[name]
    tensors[name] = before.reshape(-1) if spelling == "flat" else before.bfloat16()
    write_tensors(copied.directory, tensors)
    own = loaded(copied, action).layer(1)["self_attn.o_proj"].scales
    assert own.dtype == torch.float32
    assert same(own, before if spelling == "flat" else before.bfloat16().float())


def test_kv_b_may_be_stored_quantised(copied: Tiny, action: str) -> None:
    """As published FP8 checkpoints do; it is held plain."""
    name, tensors = "model.layers.2.self_attn.kv_b_proj.weight", tensors_of(copied.directory)
    values, scales = read_quantized(Given({name: tensors[name]}), [(Piece(name, (176, 32)), Part())], form_of(action))
    tensors |= {name: values, name + SUFFIX[action]: scales}
    write_tensors(copied.directory, tensors)
    own = loaded(copied, action).layer(2)["self_attn.kv_b_proj"]
    assert own.scales is None
    assert same(own.values, dequantized(tensors, name))


def test_random_weights_are_quantised(converted: Callable[[str, str], Tiny], action: str) -> None:
    tiny = converted("glm5", action)
    weights = LoadedWeights(setup_of(tiny.spec, action=action), RandomTensors(0), dtype=torch.float32, device=CPU)
    logits = prefill(engine_of(tiny, weights, action, torch.float32), token_ids(1, 20), [0])
    assert torch.isfinite(logits).all()


def test_every_parameter_has_the_shapes_of_its_format(converted: Callable[[str, str], Tiny], action: str) -> None:
    tiny = converted("glm52", action)
    weights = loaded(tiny, action)
    for layer in range(tiny.spec.num_hidden_layers):
        for parameter in layer_parameters(tiny.spec, layer):
            weight = weights.layer(layer)[parameter.name]
            assert tuple(weight.values.shape) == parameter.shape
            if weight.scales is not None:
                shape = (*parameter.shape[:-2], *form_of(action).weight_scales(*parameter.shape[-2:]))
                assert tuple(weight.scales.shape) == shape
