"""Reading checkpoints: every fault is named before any tensor is read; what is read lands where it belongs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.errors import CastoffError
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, Piece, RandomTensors, model_pieces
from castoff.runtime.engine import Engine
from tests.runtime.tiny import Tiny, deal, engine, prefill, setup_of, tensors_of, token_ids, torch, write_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture
def tiny(tiny_checkpoint: Callable[..., Tiny]) -> Tiny:
    return tiny_checkpoint("glm5")


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Tiny:
    """The same checkpoint at a place where it may be spoilt."""
    shutil.copytree(tiny.directory, tmp_path / "model")
    return replace(tiny, directory=tmp_path / "model")


def fault(tiny: Tiny, *, mtp: bool = False) -> str:
    """What opening the checkpoint complains of: nothing has been read at that point."""
    with pytest.raises(CastoffError) as caught:
        Checkpoint(tiny.directory, tiny.spec, mtp=mtp)
    return str(caught.value)


def loaded(tiny: Tiny, *, mtp_tokens: int = 0, dtype: Any = torch.float32) -> LoadedWeights:
    checkpoint = Checkpoint(tiny.directory, tiny.spec, mtp=mtp_tokens > 0)
    return LoadedWeights(setup_of(tiny.spec, mtp_tokens=mtp_tokens), checkpoint, dtype=dtype, device=CPU)


MISSING = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.indexer.k_norm.bias",
    "model.layers.3.mlp.experts.7.gate_proj.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
]


@pytest.mark.parametrize("name", MISSING)
def test_missing_tensor(copied: Tiny, name: str) -> None:
    tensors = tensors_of(copied.directory)
    del tensors[name]
    write_tensors(copied.directory, tensors)
    message = fault(copied)
    assert name in message
    assert "missing" in message


def test_many_missing_tensors_are_counted(copied: Tiny) -> None:
    tensors = tensors_of(copied.directory)
    kept = {name: values for name, values in tensors.items() if "experts" not in name}
    write_tensors(copied.directory, kept)
    # Two sparse layers: 3 tensors of each of 8 experts, and 3 of the shared one. Three are named.
    assert f"and {2 * (3 * 8 + 3) - 3} more" in fault(copied)


@pytest.mark.parametrize("name", ["enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.indexer.wk"])
def test_missing_tensor_of_the_mtp_block(copied: Tiny, name: str) -> None:
    tensors = tensors_of(copied.directory)
    del tensors[f"{copied.prefix}{name}.weight"]
    write_tensors(copied.directory, tensors)
    assert f"{copied.prefix}{name}.weight" in fault(copied, mtp=True)
    Checkpoint(copied.directory, copied.spec, mtp=False)


def test_a_checkpoint_without_the_mtp_block(copied: Tiny) -> None:
    tensors = tensors_of(copied.directory)
    own = {name: values for name, values in tensors.items() if not name.startswith(copied.prefix)}
    write_tensors(copied.directory, own)
    assert torch.isfinite(prefill(engine(copied), token_ids(1, 5), [0])).all()
    assert copied.prefix in fault(copied, mtp=True)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_up_proj.weight", "visual.patch.weight"],
)
def test_unknown_tensor(copied: Tiny, name: str) -> None:
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {**tensors, name: torch.zeros(2, 2)})
    assert name in fault(copied)


def test_known_extras(copied: Tiny) -> None:
    """The MTP block's copies of embedding and head are there already; older exports store rotary frequencies too."""
    tensors = tensors_of(copied.directory)
    assert f"{copied.prefix}embed_tokens.weight" in tensors
    assert f"{copied.prefix}shared_head.head.weight" in tensors
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    write_tensors(copied.directory, {**tensors, **extra})
    for mtp in (False, True):
        Checkpoint(copied.directory, copied.spec, mtp=mtp)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.2.self_attn.indexer.weights_proj.weight",
        "model.layers.2.mlp.experts.0.down_proj.weight",
        "model.layers.2.mlp.gate.weight",
    ],
)
def test_misshapen_tensor(copied: Tiny, name: str) -> None:
    tensors = tensors_of(copied.directory)
    right = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    wrong = list(tensors[name].shape)
    write_tensors(copied.directory, tensors)
    message = fault(copied)
    assert name in message
    assert str(wrong) in message
    assert str(right) in message


def test_a_transposed_tensor_is_misshapen(copied: Tiny) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {**tensors, name: tensors[name].T})
    assert name in fault(copied)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool], ids=str)
def test_wrong_dtype(copied: Tiny, dtype: Any) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {**tensors, name: tensors[name].to(dtype)})
    message = fault(copied)
    assert name in message
    assert "BF16" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_stored_dtypes(copied: Tiny, dtype: Any) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {key: values.to(dtype) for key, values in tensors.items()})
    read = loaded(copied).layer(0)["self_attn.o_proj"].values
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, tensors[name].to(dtype).float(), rtol=0, atol=0)


def test_sharded_equals_single_file(tiny: Tiny, copied: Tiny) -> None:
    deal(copied.directory)
    single, sharded = loaded(tiny, mtp_tokens=1), loaded(copied, mtp_tokens=1)
    assert single.bytes == sharded.bytes > 0
    for layer in range(tiny.spec.num_hidden_layers + 1):
        assert single.layer(layer).keys() == sharded.layer(layer).keys()
        for name, weight in single.layer(layer).items():
            assert torch.equal(weight.values, sharded.layer(layer)[name].values), name
    for name, weight in single.outer().items():
        assert torch.equal(weight.values, sharded.outer()[name].values), name


def test_truncated_single_file(copied: Tiny) -> None:
    whole = (copied.directory / SINGLE).read_bytes()
    (copied.directory / SINGLE).write_bytes(whole[:-1000])
    assert SINGLE in fault(copied)


@pytest.mark.parametrize("keep", [0, 4, 200, -1], ids=["empty", "half a length", "half a header", "one byte short"])
def test_truncated_shard(copied: Tiny, keep: int) -> None:
    file = sorted(set(deal(copied.directory).values()))[1]
    whole = (copied.directory / file).read_bytes()
    (copied.directory / file).write_bytes(whole[:keep])
    assert file in fault(copied)


def test_missing_shard(copied: Tiny) -> None:
    file = sorted(set(deal(copied.directory).values()))[2]
    (copied.directory / file).unlink()
    assert file in fault(copied)


def test_tensor_missing_from_the_index(copied: Tiny) -> None:
    weight_map = deal(copied.directory)
    del weight_map["model.norm.weight"]
    (copied.directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "model.norm.weight" in fault(copied)


def test_tensor_that_its_shard_does_not_hold(copied: Tiny) -> None:
    weight_map = deal(copied.directory)
    name = "model.layers.0.input_layernorm.weight"
    other = next(file for file in weight_map.values() if file != weight_map[name])
    (copied.directory / INDEX).write_text(json.dumps({"weight_map": {**weight_map, name: other}}))
    assert name in fault(copied)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 3}}']
)
def test_broken_index(copied: Tiny, text: str) -> None:
    deal(copied.directory)
    (copied.directory / INDEX).write_text(text)
    assert str(copied.directory) in fault(copied)


def test_no_weights(copied: Tiny) -> None:
    (copied.directory / SINGLE).unlink()
    assert "--random-weights" in fault(copied)


def test_tied_embeddings(copied: Tiny) -> None:
    """A tied checkpoint has no lm_head of its own: transformers leaves it out."""
    tensors = tensors_of(copied.directory)
    del tensors["lm_head.weight"]
    write_tensors(copied.directory, tensors)
    tied = replace(copied, spec=replace(copied.spec, tie_word_embeddings=True))
    outer = loaded(tied).outer()
    assert torch.equal(outer["lm_head"].values, outer["embed_tokens"].values)


def test_experts_and_gates_are_stacked(tiny: Tiny) -> None:
    own = loaded(tiny)
    mlp = tiny.hf.model.layers[2].mlp
    weights = own.layer(2)
    assert torch.equal(weights["mlp.experts.gate_up_proj"].values, mlp.experts.gate_up_proj)
    assert torch.equal(weights["mlp.experts.down_proj"].values, mlp.experts.down_proj)
    assert torch.equal(weights["mlp.gate.e_score_correction_bias"].values, mlp.gate.e_score_correction_bias)
    shared = torch.cat([mlp.shared_experts.gate_proj.weight, mlp.shared_experts.up_proj.weight])
    assert torch.equal(weights["mlp.shared_experts.gate_up_proj"].values, shared)
    dense = tiny.hf.model.layers[0].mlp
    assert torch.equal(
        own.layer(0)["mlp.gate_up_proj"].values, torch.cat([dense.gate_proj.weight, dense.up_proj.weight])
    )


@pytest.mark.parametrize(
    ("dtype", "router"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_the_router_is_no_narrower_than_fp32(tiny: Tiny, dtype: Any, router: Any) -> None:
    for name, weight in loaded(tiny, dtype=dtype).layer(3).items():
        assert weight.values.dtype == (router if "mlp.gate" in name and "proj" not in name else dtype), name


def test_every_dtype_runs(tiny: Tiny) -> None:
    """Coarsely like float32: a wrong conversion shows at once, and rounding does not."""
    ids_BS = token_ids(1, 12)
    expected = prefill(engine(tiny), ids_BS, [0])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        own = prefill(engine(tiny, dtype=dtype), ids_BS, [0])
        assert own.dtype == dtype
        distance = (own.double() - expected.double()).abs().mean() / expected.double().abs().mean()
        assert distance < (1e-4 if dtype == torch.float64 else 0.1)


def pieces_of(tiny: Tiny) -> list[Piece]:
    return list(model_pieces(tiny.spec, mtp=True))


def test_random_tensors_depend_on_seed_and_name_alone(tiny: Tiny) -> None:
    pieces = pieces_of(tiny)
    forwards = {piece.name: RandomTensors(1).read(piece) for piece in pieces}
    source = RandomTensors(1)
    torch.manual_seed(5)
    for piece in reversed(pieces):
        values = source.read(piece)
        assert tuple(values.shape) == piece.shape
        assert torch.equal(values, forwards[piece.name]), piece.name
        assert torch.isfinite(values).all()
    drawn = [piece for piece in pieces if not piece.name.endswith("norm.weight")]
    first = {tuple(forwards[piece.name].flatten()[:4].tolist()) for piece in drawn}
    assert len(first) == len(drawn), "no two tensors alike"
    for piece in drawn[:20]:
        assert not torch.equal(RandomTensors(2).read(piece), forwards[piece.name])


def test_random_tensors_leave_the_generator_alone(tiny: Tiny) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for piece in pieces_of(tiny)[:10]:
        RandomTensors(0).read(piece)
    assert torch.equal(torch.rand(4), expected)


def test_random_weights_run(tiny: Tiny) -> None:
    weights = LoadedWeights(setup_of(tiny.spec), RandomTensors(0), dtype=torch.float32, device=CPU)
    own = Engine(setup_of(tiny.spec), weights, num_blocks=8, block_tokens=16, dtype=torch.float32, device=CPU)
    logits = prefill(own, token_ids(1, 40), [0])
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_progress_names_every_layer(tiny: Tiny) -> None:
    said: list[str] = []
    LoadedWeights(setup_of(tiny.spec), RandomTensors(0), dtype=torch.float32, device=CPU, progress=said.append)
    assert said == ["embedding and head", *(f"layer {number} of 4" for number in range(1, 5))]
