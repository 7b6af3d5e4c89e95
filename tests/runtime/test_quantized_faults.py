"""Every fault of quantised values and scales is named."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from castoff.errors import CastoffError
from castoff.runtime.checkpoint import Checkpoint
from castoff.spec.model import load_model
from tests.runtime.quantized import EXPERT, SUFFIX, WEIGHT
from tests.runtime.tiny import Tiny, tensors_of, torch, write_tensors


def fault(tiny: Tiny) -> str:
    with pytest.raises(CastoffError) as caught:
        Checkpoint(tiny.directory, tiny.spec, mtp=True)
    return str(caught.value)


@pytest.mark.parametrize("name", [WEIGHT, EXPERT, "model.layers.4.self_attn.indexer.wq_b.weight"])
def test_missing_scales(copied: Tiny, action: str, name: str) -> None:
    tensors = tensors_of(copied.directory)
    del tensors[name + SUFFIX[action]]
    write_tensors(copied.directory, tensors)
    assert f"its scales {name}{SUFFIX[action]} are missing" in fault(copied)


@pytest.mark.parametrize("name", [WEIGHT, EXPERT])
def test_misshapen_scales(copied: Tiny, action: str, name: str) -> None:
    tensors = tensors_of(copied.directory)
    scales = tensors[name + SUFFIX[action]]
    tensors[name + SUFFIX[action]] = torch.cat([scales, scales])
    write_tensors(copied.directory, tensors)
    message = fault(copied)
    assert name + SUFFIX[action] in message
    assert str(list(scales.shape)) in message
    assert str([2 * scales.shape[0], scales.shape[1]]) in message


def test_scales_of_a_wrong_dtype(copied: Tiny, action: str) -> None:
    tensors = tensors_of(copied.directory)
    tensors[WEIGHT + SUFFIX[action]] = tensors[WEIGHT + SUFFIX[action]].half()
    write_tensors(copied.directory, tensors)
    message = fault(copied)
    assert WEIGHT + SUFFIX[action] in message
    assert "F16" in message


def test_scales_beside_an_unquantised_weight(copied: Tiny, action: str) -> None:
    tensors = tensors_of(copied.directory)
    tensors[WEIGHT] = tensors[WEIGHT].float()
    write_tensors(copied.directory, tensors)
    assert f"{WEIGHT} is stored as F32, but {WEIGHT}{SUFFIX[action]} stands beside it" in fault(copied)


def test_scales_of_the_other_kind(copied: Tiny, action: str) -> None:
    other = next(suffix for suffix in SUFFIX.values() if suffix != SUFFIX[action])
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {**tensors, WEIGHT + other: torch.ones(1, 1)})
    assert f"{WEIGHT}{other} stands beside it" in fault(copied)


def test_scales_of_no_tensor(copied: Tiny, action: str) -> None:
    name = "model.layers.1.self_attn.x_proj.weight" + SUFFIX[action]
    write_tensors(copied.directory, {**tensors_of(copied.directory), name: torch.ones(1, 1)})
    assert name in fault(copied)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.gate.weight",
        "model.layers.2.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.4.eh_proj.weight",
    ],
)
def test_what_is_never_quantised(copied: Tiny, action: str, name: str) -> None:
    tensors = tensors_of(copied.directory)
    tensors[name] = tensors[name].to(tensors[WEIGHT].dtype)
    tensors[name + SUFFIX[action]] = torch.ones(tensors[name].shape[0], 1)
    write_tensors(copied.directory, tensors)
    assert f"{name} is stored as" in fault(copied)
    assert "never quantised" in fault(copied)


def test_another_format_than_the_configs(copied: Tiny, action: str) -> None:
    other = {"W8A8_DYNAMIC": torch.float8_e4m3fn, "FP8": torch.int8}[action]
    tensors = tensors_of(copied.directory)
    write_tensors(copied.directory, {**tensors, WEIGHT: tensors[WEIGHT].float().to(other)})
    message = fault(copied)
    assert WEIGHT in message
    assert {"W8A8_DYNAMIC": "I8", "FP8": "F8_E4M3"}[action] in message


def test_a_config_that_does_not_speak_of_it(copied: Tiny) -> None:
    plain = replace(copied, spec=replace(copied.spec, checkpoint_quant=None))
    assert "unquantised weights are read from" in fault(plain)


def test_truncated_file(copied: Tiny) -> None:
    whole = (copied.directory / "model.safetensors").read_bytes()
    (copied.directory / "model.safetensors").write_bytes(whole[:-5])
    assert "model.safetensors" in fault(copied)


@pytest.mark.parametrize("action", ["FP8"], indirect=True)
def test_blocks_of_another_size(copied: Tiny) -> None:
    config = json.loads((copied.directory / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (copied.directory / "config.json").write_text(json.dumps(config))
    assert "weight_block_size is [64, 128]" in fault(replace(copied, spec=load_model(str(copied.directory))))
