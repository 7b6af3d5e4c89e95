"""Faults of weights, files and surroundings that a run must name in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import CONFIG, exit_status
from tests.cli.test_run import run_of

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from castoff.ops.dsa_indexer import _best  # noqa: E402
from castoff.ops.tokens import sample  # noqa: E402
from castoff.runtime.checkpoint import RandomTensors, model_pieces  # noqa: E402
from castoff.runtime.sampling import Sampling, choose  # noqa: E402
from castoff.spec.model import load_model  # noqa: E402

Capture = pytest.CaptureFixture[str]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of random weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    spec = load_model(str(directory))
    tensors = {piece.name: RandomTensors(0).read(piece) for piece in model_pieces(spec, mtp=False)}
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    return directory


def edit(model: Path, name: str, change: Any) -> None:
    tensors = safetensors_torch.load_file(model / "model.safetensors")
    change(tensors[name])
    safetensors_torch.save_file(tensors, model / "model.safetensors")


def index(model: Path, weight_map: object) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def refused(capsys: Capture, *arguments: str) -> str:
    """The one sentence of a command that is refused."""
    assert exit_status(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def run_of_checkpoint(model: Path, *more: str) -> list[str]:
    return ["run", str(model), "--dtype", "float32", "--max-new-tokens", "4", "--random-prompts", "1x5", *more]


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("more", [[], ["--temperature", "1"]], ids=["greedy", "drawn"])
def test_numbers_that_are_none(capsys: Capture, model: Path, name: str, bad: float, more: list[str]) -> None:
    edit(model, name, lambda tensor: tensor.view(-1)[:3].fill_(bad))
    assert "are not finite" in refused(capsys, *run_of_checkpoint(model, *more))


def test_numbers_that_grow_out_of_float16(capsys: Capture, model: Path) -> None:
    edit(model, "model.norm.weight", lambda tensor: tensor.fill_(6e4))
    edit(model, "lm_head.weight", lambda tensor: tensor.fill_(100.0))
    arguments = run_of_checkpoint(model)
    arguments[arguments.index("float32")] = "float16"
    assert "--dtype" in refused(capsys, *arguments)


def test_no_token_is_outside_the_vocabulary() -> None:
    assert sample(torch.tensor([[1.0, torch.nan, 2.0], [3.0, 1.0, 3.0]])).tolist() == [2, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_temperatures_near_zero_take_the_largest(temperature: float) -> None:
    logits = torch.tensor([[0.5, 2.0, 1.999]])
    assert choose(logits, Sampling(temperature=temperature), 0, 0) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_score_that_is_none_comes_first_and_unused_columns_last(dtype: Any) -> None:
    negative_nan = -torch.tensor(torch.nan, dtype=dtype).abs()
    for nan in (negative_nan, -negative_nan):
        scores = torch.tensor([[[1.0, 0.0, 3.0, -torch.inf]]], dtype=dtype)
        scores[..., 1] = nan
        assert _best(scores, 4).tolist() == [[[1, 2, 0, -1]]]


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff"])
def test_a_broken_tokenizer(capsys: Capture, model: Path, text: bytes) -> None:
    pytest.importorskip("tokenizers")
    (model / "tokenizer.json").write_bytes(text)
    assert "cannot read" in refused(capsys, *run_of_checkpoint(model))


def test_a_prompt_that_the_tokenizer_cannot_read(capsys: Capture, model: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    tokenizer.save(str(model / "tokenizer.json"))
    arguments = ["run", str(model), "--dtype", "float32", "--prompt"]
    for prompt in ("zzz", "\udcff"):
        assert "the tokenizer cannot read the prompt" in refused(capsys, *arguments, prompt)


@pytest.mark.parametrize("most", ["1000000000000", "100000000000000000", "1" + "0" * 30])
def test_more_tokens_than_memory(capsys: Capture, model: Path, most: str) -> None:
    arguments = run_of_checkpoint(model)
    arguments[arguments.index("--max-new-tokens") + 1] = most
    error = refused(capsys, *arguments)
    assert "are free" in error or "--max-new-tokens must be" in error


def test_a_model_larger_than_memory(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 10**9}))
    assert "bytes for weights" in refused(capsys, *run_of(str(tmp_path)), "--random-prompts", "1x5")


@pytest.mark.parametrize("count", ["1x" + "9" * 5000, "9" * 5000 + "x1"])
def test_numbers_of_thousands_of_digits(capsys: Capture, model: Path, count: str) -> None:
    assert "4x1000" in refused(capsys, "run", str(model), "--random-prompts", count)


@pytest.mark.parametrize("size", ["abc", "", "-2"])
def test_an_odd_world_size(capsys: Capture, model: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert "WORLD_SIZE" in refused(capsys, *run_of_checkpoint(model))


def test_an_odd_yaml_tag(capsys: Capture, model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("ignore_eos: !!bool x\n")
    assert "not valid YAML" in refused(capsys, *run_of_checkpoint(model), "--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("command", ["run", "convert"])
@pytest.mark.parametrize("kind", ["list", "null", "number", "nested", "elsewhere", "absent", "deep"])
def test_odd_indexes(capsys: Capture, model: Path, tmp_path: Path, command: str, kind: str) -> None:
    spec = load_model(str(model))
    names = [piece.name for piece in model_pieces(spec, mtp=False)]
    maps: dict[str, object] = {
        "list": names,
        "null": None,
        "number": dict.fromkeys(names, 5),
        "nested": {name: ["a"] for name in names},
        "elsewhere": dict.fromkeys(names, "../model/model.safetensors"),
        "absent": dict.fromkeys(names, "model-00001.safetensors"),
    }
    index(model, maps.get(kind))
    if kind == "deep":
        (model / INDEX).write_text("[" * 100_000)
    arguments = run_of_checkpoint(model)
    if command == "convert":
        arguments = ["convert", str(model), "--quantize-linear-action", "FP8", "-o", str(tmp_path / "out")]
    assert INDEX in refused(capsys, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_tied_head_may_be_stored(capsys: Capture, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert exit_status(*run_of_checkpoint(model)) == 0


def test_drafts_without_an_mtp_block(capsys: Capture, model: Path) -> None:
    assert "leave out --num-mtp-tokens" in refused(capsys, *run_of_checkpoint(model, "--num-mtp-tokens", "1"))


def test_requests_longer_than_the_model_is_made_for(capsys: Capture, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 8}))
    assert exit_status(*run_of_checkpoint(model)) == 0
    assert "note: a request may reach 9 tokens" in capsys.readouterr().err


def test_nan_weights_are_not_converted(capsys: Capture, model: Path, tmp_path: Path) -> None:
    edit(model, "model.layers.0.self_attn.o_proj.weight", lambda tensor: tensor.fill_(torch.nan))
    for action in ("FP8", "W8A8_DYNAMIC"):
        arguments = ["convert", str(model), "--quantize-linear-action", action, "-o", str(tmp_path / action)]
        assert "o_proj.weight holds NaN or infinity" in refused(capsys, *arguments)


def test_tensors_in_files_that_convert_writes(capsys: Capture, model: Path, tmp_path: Path) -> None:
    spec = load_model(str(model))
    for name in (".castoff-convert.json", "config.json", "tokenizer.json"):
        source = tmp_path / f"from-{name}"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(CONFIG))
        tensors = safetensors_torch.load_file(model / "model.safetensors")
        if name != "config.json":
            safetensors_torch.save_file(tensors, source / name)
            index(source, dict.fromkeys((piece.name for piece in model_pieces(spec, mtp=False)), name))
            arguments = ["convert", str(source), "--quantize-linear-action", "FP8", "-o", str(tmp_path / "out")]
            assert f"keeps tensors in {name}" in refused(capsys, *arguments)


def test_outputs_that_are_no_directories(capsys: Capture, model: Path, tmp_path: Path) -> None:
    loop, dangling = tmp_path / "loop", tmp_path / "dangling"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "nowhere")
    for output in (loop, dangling):
        assert "-o" in refused(capsys, "convert", str(model), "--quantize-linear-action", "FP8", "-o", str(output))
