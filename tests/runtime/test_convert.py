"""`castoff convert`: what is written, and that an interrupted conversion goes on as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.errors import CastoffError
from castoff.runtime import safetensors_file
from castoff.runtime.checkpoint import Checkpoint
from castoff.runtime.convert import STATE_FILE, convert
from castoff.runtime.generate import default_action
from castoff.spec.model import load_model
from tests.runtime.fake_quant import FP8, dequantized
from tests.runtime.tiny import Tiny, deal, safetensors_torch, tensors_of, torch, write_tensors

ACTIONS = ("W8A8_DYNAMIC", "FP8")
SUFFIX = {"W8A8_DYNAMIC": "_scale", "FP8": "_scale_inv"}
DTYPE = {"W8A8_DYNAMIC": torch.int8, "FP8": FP8}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILES = 4


@pytest.fixture(params=ACTIONS)
def action(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def source(tiny_checkpoint: Callable[..., Tiny], tmp_path: Path) -> Path:
    """A checkpoint in one file, with a tokenizer and a README beside it."""
    directory = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("glm5").directory, directory)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "README.md").write_text("weights\n")
    return directory


@pytest.fixture
def sharded(source: Path) -> Path:
    deal(source, FILES)
    return source


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def all_tensors(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in directory.glob("*.safetensors"):
        found |= safetensors_torch.load_file(path)
    return found


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one.double(), other.double())


KEPT = ("kv_b_proj", "weights_proj", "mlp.gate.", "lm_head", "embed_tokens", "eh_proj", "shared_head", "norm")


def test_what_is_written(source: Path, tmp_path: Path, action: Any) -> None:
    """Every linear layer and expert quantised, MTP block included; all else is copied, its duplicates too."""
    report = convert(str(source), action, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    quantized = {name for name in before if before[name].dim() == 2 and not any(word in name for word in KEPT)}
    assert report.quantized == len(quantized) > 100
    assert {name for name in quantized if name.startswith("model.layers.4.")}
    assert after.keys() == before.keys() | {name + SUFFIX[action] for name in quantized}
    for name, values in before.items():
        if name not in quantized:
            assert same(after[name], values), name
            continue
        assert after[name].dtype == DTYPE[action]
        assert after[name + SUFFIX[action]].dtype == torch.float32
        step = values.abs().amax(dim=1, keepdim=True) / 127 if action == "W8A8_DYNAMIC" else values.abs() / 8
        smallest = 0 if action == "W8A8_DYNAMIC" else after[name + SUFFIX[action]].max() * 2**-10
        assert ((dequantized(after, name) - values).abs() <= 0.5001 * step + smallest).all(), name
    assert report.size_bytes == (tmp_path / "out" / SINGLE).stat().st_size
    assert (report.shards, report.kept_shards) == (1, 0)


def test_what_lies_beside_the_weights(source: Path, tmp_path: Path, action: Any) -> None:
    convert(str(source), action, tmp_path / "out")
    names = {"config.json", "generation_config.json", "tokenizer.json", SINGLE}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    before, after = (json.loads((at / "config.json").read_text()) for at in (source, tmp_path / "out"))
    quant = after.pop("quantization_config")
    assert after == before
    kept = quant["ignore" if action == "W8A8_DYNAMIC" else "modules_to_not_convert"]
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.self_attn.kv_b_proj", "model.layers.4.eh_proj"):
        assert name in kept
    assert not any("experts" in name or "o_proj" in name for name in kept)


def test_the_config_is_in_the_standard_form(source: Path, tmp_path: Path, action: Any) -> None:
    convert(str(source), action, tmp_path / "out")
    quant = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if action == "FP8":
        assert quant["quant_method"] == "fp8"
        assert (quant["fmt"], quant["activation_scheme"], quant["weight_block_size"]) == ("e4m3", "dynamic", [128, 128])
    else:
        assert (quant["quant_method"], quant["format"]) == ("compressed-tensors", "int-quantized")
        group = quant["config_groups"]["group_0"]
        assert group["weights"] == {
            "num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False
        }  # fmt: skip
        assert group["input_activations"] == {
            "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True
        }  # fmt: skip
    spec = load_model(str(tmp_path / "out"))
    assert default_action(spec) == action
    assert default_action(load_model(str(source))) == "DISABLED"
    assert replace(spec, checkpoint_quant=None, name="") == replace(load_model(str(source)), name="")


def test_sharded_equals_single_file(source: Path, tmp_path: Path, action: Any) -> None:
    convert(str(source), action, tmp_path / "single")
    deal(source, FILES)
    report = convert(str(source), action, tmp_path / "sharded")
    single, sharded = all_tensors(tmp_path / "single"), all_tensors(tmp_path / "sharded")
    assert single.keys() == sharded.keys()
    assert all(same(values, sharded[name]) for name, values in single.items())
    weight_map = json.loads((tmp_path / "sharded" / INDEX).read_text())["weight_map"]
    assert weight_map.keys() == sharded.keys()
    for name, file in weight_map.items():
        assert file == json.loads((source / INDEX).read_text())["weight_map"][name.removesuffix(SUFFIX[action])]
    assert report.shards == FILES
    Checkpoint(tmp_path / "sharded", load_model(str(tmp_path / "sharded")), mtp=True)


def test_files_are_ordinary_safetensors(sharded: Path, tmp_path: Path, action: Any) -> None:
    """As large as those that safetensors itself writes of the same tensors, and aligned."""
    convert(str(sharded), action, tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors"):
        whole, tensors = path.read_bytes(), safetensors_torch.load_file(path)
        assert len(safetensors_torch.save(tensors, metadata={"format": "pt"})) == len(whole)
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        assert length % 8 == 0
        assert all(header[name]["data_offsets"][0] % tensors[name].element_size() == 0 for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("first", "second"), [ACTIONS, ACTIONS[::-1]])
def test_from_one_format_to_the_other(source: Path, tmp_path: Path, first: Any, second: Any, dtype: Any) -> None:
    """Dequantised and quantised anew; scales may lie in another file than their weight."""
    write_tensors(source, {name: values.to(dtype) for name, values in tensors_of(source).items()})
    convert(str(source), first, tmp_path / "first")
    stored = tensors_of(tmp_path / "first")
    deal(tmp_path / "first", FILES)
    index = json.loads((tmp_path / "first" / INDEX).read_text())["weight_map"]
    assert any(index[name] != index[name + SUFFIX[first]] for name in index if name + SUFFIX[first] in index)
    convert(str(tmp_path / "first"), second, tmp_path / "second")
    after = all_tensors(tmp_path / "second")
    assert not any(name.endswith(SUFFIX[first]) for name in after if not name.endswith(SUFFIX[second]))
    for name, values in stored.items():
        if values.dtype != DTYPE[first]:
            assert name.endswith(SUFFIX[first]) or same(after[name], values)
            continue
        expected = dequantized(stored, name)
        step = expected.abs().amax(dim=1, keepdim=True) / 127 if second == "W8A8_DYNAMIC" else expected.abs() / 8
        smallest = 0 if second == "W8A8_DYNAMIC" else after[name + SUFFIX[second]].max() * 2**-10
        assert ((dequantized(after, name) - expected).abs() <= 0.5001 * step + smallest).all(), name
    Checkpoint(tmp_path / "second", load_model(str(tmp_path / "second")), mtp=True)


def test_kv_b_of_an_fp8_checkpoint(source: Path, tmp_path: Path) -> None:
    """Published FP8 checkpoints quantise it; here it becomes plain, in the model's dtype."""
    convert(str(source), "FP8", tmp_path / "fp8")
    name, tensors = "model.layers.1.self_attn.kv_b_proj.weight", tensors_of(tmp_path / "fp8")
    tensors |= {name: (tensors[name] / 0.01).to(FP8), f"{name}_scale_inv": torch.full((2, 1), 0.01)}
    write_tensors(tmp_path / "fp8", tensors)
    convert(str(tmp_path / "fp8"), "W8A8_DYNAMIC", tmp_path / "int8")
    after = tensors_of(tmp_path / "int8")
    dtype = getattr(torch, load_model(str(source)).dtype)
    assert same(after[name], dequantized(tensors, name).to(dtype))
    assert not any(key.startswith(f"{name}_") for key in after)


def test_without_the_mtp_block(source: Path, tmp_path: Path, action: Any) -> None:
    own = {name: values for name, values in tensors_of(source).items() if not name.startswith("model.layers.4.")}
    write_tensors(source, own)
    convert(str(source), action, tmp_path / "out")
    assert not any(name.startswith("model.layers.4.") for name in tensors_of(tmp_path / "out"))


class Stop(Exception):  # noqa: N818
    """Raised by a test in the middle of a conversion."""


def stopping_at(text: str, error: type[BaseException]) -> Callable[[str], None]:
    def progress(said: str) -> None:
        if said.startswith(text):
            raise error

    return progress


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["file 1 of 4: tensor 1 of", "file 1 of 4: tensor 9 of", "file 3 of 4: tensor 20 of"])
def test_an_interrupted_conversion_goes_on(
    sharded: Path, tmp_path: Path, action: Any, at: str, error: type[BaseException]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(error):
        convert(str(sharded), action, out, progress=stopping_at(at, error))
    done = int(at.split()[1]) - 1
    assert sorted(contents(out)) == [STATE_FILE, *sorted(path.name for path in sharded.glob("*.safetensors"))[:done]]
    with pytest.raises(CastoffError, match=r"no config\.json"):
        load_model(str(out))
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    said: list[str] = []
    report = convert(str(sharded), action, out, progress=said.append)
    assert report.kept_shards == done
    assert said[0].startswith(f"file {done + 1} of 4")
    assert all((out / name).stat().st_mtime_ns == time for name, time in times.items())
    convert(str(sharded), action, tmp_path / "at once")
    assert contents(out) == contents(tmp_path / "at once")


def test_ctrl_c(sharded: Path, tmp_path: Path) -> None:
    """A real SIGINT to a real process: status 130, whole files only; then the rest."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, str(sharded), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("*.safetensors")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (output, errors) == ("", "")
    left = sorted(contents(out))
    assert STATE_FILE in left
    assert all(name == STATE_FILE or name.endswith(".safetensors") for name in left)
    assert 1 < len(left) <= FILES
    assert convert(str(sharded), "FP8", out).kept_shards == len(left) - 1
    convert(str(sharded), "FP8", tmp_path / "at once")
    assert contents(out) == contents(tmp_path / "at once")


# Slow enough to be stopped in the middle.
SLOW = """
import sys, time
from castoff import cli
convert = cli.converting.convert
def slow(*arguments, progress):
    return convert(*arguments, progress=lambda text: time.sleep(0.005))
cli.converting.convert = slow
sys.exit(cli.main(["convert", sys.argv[1], "--quantize-linear-action", "FP8", "-o", sys.argv[2]]))
"""


@pytest.fixture
def begun(sharded: Path, tmp_path: Path) -> Path:
    """A conversion to FP8 with two of four files finished."""
    with pytest.raises(Stop):
        convert(str(sharded), "FP8", tmp_path / "out", progress=stopping_at("file 3", Stop))
    return tmp_path / "out"


def test_what_a_killed_process_left_is_removed(sharded: Path, begun: Path) -> None:
    left = begun / ".castoff-model-00003-of-00004.safetensors.tmp"
    left.write_bytes(b"half")
    convert(str(sharded), "FP8", begun)
    assert not left.exists()
    assert not list(begun.glob(".*"))


@pytest.mark.parametrize("spoilt", ["cut", "other tensors", "empty"])
def test_a_spoilt_file_is_written_anew(sharded: Path, begun: Path, tmp_path: Path, spoilt: str) -> None:
    path = begun / "model-00001-of-00004.safetensors"
    if spoilt == "other tensors":
        shutil.copy(sharded / path.name, path)
    else:
        path.write_bytes(path.read_bytes()[: -1 if spoilt == "cut" else 0])
    assert convert(str(sharded), "FP8", begun).kept_shards == 1
    convert(str(sharded), "FP8", tmp_path / "at once")
    assert contents(begun) == contents(tmp_path / "at once")


def refused(source: Path, action: Any, out: Path) -> str:
    before = contents(out) if out.is_dir() else None
    with pytest.raises(CastoffError) as caught:
        convert(str(source), action, out)
    assert (contents(out) if out.is_dir() else None) == before, "nothing is written"
    return str(caught.value)


def test_another_conversions_leftovers(sharded: Path, begun: Path, tmp_path: Path) -> None:
    message = refused(sharded, "W8A8_DYNAMIC", begun)
    assert "another conversion" in message
    assert "to FP8" in message
    assert "delete this one" in message
    os.utime(sharded / "model-00002-of-00004.safetensors", ns=(1, 1))
    assert "another conversion" in refused(sharded, "FP8", begun)
    (begun / STATE_FILE).write_text("{")
    assert f"{STATE_FILE} cannot be read" in refused(sharded, "FP8", begun)


def test_foreign_files(source: Path, tmp_path: Path, begun: Path) -> None:
    (begun / "notes.txt").write_text("x")
    assert "holds notes.txt, which this conversion does not write" in refused(source, "FP8", begun)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("x")
    assert "holds notes.txt and no conversion" in refused(source, "FP8", other)


def test_a_finished_conversion_is_left_alone(source: Path, tmp_path: Path, action: Any) -> None:
    convert(str(source), action, tmp_path / "out")
    assert "holds a checkpoint already" in refused(source, action, tmp_path / "out")


def test_an_empty_directory_will_do(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(str(source), "FP8", tmp_path / "out")


@pytest.mark.parametrize("action", ["DISABLED", "W4A8_STATIC", "W4A8_DYNAMIC", "W8A8_STATIC", "W8A16_DYNAMIC", "MXFP4"])
def test_formats_that_are_not_written(source: Path, tmp_path: Path, action: Any) -> None:
    message = refused(source, action, tmp_path / "out")
    assert f"{action} can be cast, not converted" in message
    assert "W8A8_DYNAMIC or FP8" in message


def test_places_that_will_not_do(source: Path, tmp_path: Path) -> None:
    assert "is the checkpoint itself" in refused(source, "FP8", source)
    assert "is the checkpoint itself" in refused(source, "FP8", source / ".." / "source")
    assert "there is no directory" in refused(source, "FP8", tmp_path / "not" / "there")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(source, "FP8", tmp_path / "file")
    assert "is no directory" in refused(source / "config.json", "FP8", tmp_path / "out")
    assert "is no directory" in refused(Path("zai-org/GLM-5.2"), "FP8", tmp_path / "out")


def test_what_is_quantised_already(source: Path, tmp_path: Path, action: Any) -> None:
    convert(str(source), action, tmp_path / "out")
    assert f"is stored in {action} already" in refused(tmp_path / "out", action, tmp_path / "again")


def test_a_checkpoint_that_is_not_whole(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    del tensors["model.layers.4.eh_proj.weight"]
    write_tensors(source, tensors)
    assert "lacks model.layers.4.eh_proj.weight" in refused(source, "FP8", tmp_path / "out")


def test_file_names_that_leave_the_directory(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    file = next(iter(index["weight_map"].values()))
    moved = {name: f"../source/{own}" if own == file else own for name, own in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert "which is no file beside it" in refused(sharded, "FP8", tmp_path / "out")


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 0, 5000))
    message = refused(source, "FP8", tmp_path / "out")
    assert "5,000 are free" in message


def test_a_disk_that_fills_up(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if len(list((tmp_path / "out").glob("model*"))) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(safetensors_file.os, "fsync", full)
    with pytest.raises(CastoffError, match="No space left on device; the same command goes on"):
        convert(str(sharded), "FP8", tmp_path / "out")
    monkeypatch.undo()
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert convert(str(sharded), "FP8", tmp_path / "out").kept_shards == 2
