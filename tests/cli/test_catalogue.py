"""`castoff models`, `devices`, `show` and `shapes`."""

import csv
import io
import json
from pathlib import Path

import pytest

from castoff.spec.backend import load_backend, shipped_backends
from castoff.spec.device import load_device, shipped_devices
from castoff.spec.model import load_model, shipped_models
from tests.cli.commands import DEVICE, MODEL, TP16, exit_status

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *arguments: str) -> str:
    assert exit_status(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def words(text: str) -> str:
    return " ".join(text.split())


def test_models(capsys: Capture) -> None:
    table = shown(capsys, "models")
    rows = {row["id"]: row for row in json.loads(shown(capsys, "models", "--json"))}
    assert tuple(rows) == shipped_models()
    assert all(name in table for name in rows)
    glm = rows[MODEL]
    assert (glm["num_hidden_layers"], glm["num_full_layers"], glm["num_shared_layers"]) == (78, 21, 57)
    assert glm["parameters"] == 743_377_019_904
    assert (glm["aliases"], glm["checkpoint"]) == (["glm52"], "bfloat16")
    assert rows["zai-org/GLM-5.2-FP8"]["checkpoint"] == "fp8"
    assert (rows["deepseek-ai/DeepSeek-V3"]["num_full_layers"], "none" in table) == (0, True)


def test_devices(capsys: Capture) -> None:
    table = shown(capsys, "devices")
    rows = {row["name"]: row for row in json.loads(shown(capsys, "devices", "--json", "-"))}
    assert tuple(rows) == shipped_devices()
    assert all(name in table for name in rows)
    assert rows[DEVICE]["memory_bytes"] == 64 * 2**30
    assert rows[DEVICE]["matrix_flops_per_s"]["int8"] == 752e12


def test_list_into_a_file(capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "models.json"
    assert shown(capsys, "models", "--json", str(target)) == ""
    assert len(json.loads(target.read_text())) == len(shipped_models())


def test_show_model(capsys: Capture) -> None:
    text = words(shown(capsys, "show", "glm52"))
    assert "21: 0, 1, 2-5, 6-9, " in text
    assert "DISABLED 89,856 5,376 95,232" in text
    assert "FP8 51,168 2,772 53,940" in text
    assert json.loads(shown(capsys, "show", MODEL, "--json"))["vocab_size"] == 154_880


@pytest.mark.parametrize("name", shipped_models())
def test_show_every_model(capsys: Capture, name: str) -> None:
    assert shown(capsys, "show", name).startswith(name)
    assert json.loads(shown(capsys, "show", name, "--json"))["num_hidden_layers"] == load_model(name).num_hidden_layers


@pytest.mark.parametrize("name", shipped_devices())
def test_show_device_with_sources(capsys: Capture, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = words(shown(capsys, "show", name))
    device = load_device(name)
    assert all(words(source) in text for source in device.sources.values())
    assert json.loads(shown(capsys, "show", name, "--json"))["host_link"]["source"] == device.host_link.source


@pytest.mark.parametrize("name", shipped_backends())
def test_show_backend_with_sources(capsys: Capture, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = words(shown(capsys, "show", name))
    backend = load_backend(name)
    assert all(words(source) in text for source in backend.sources.values())
    assert json.loads(shown(capsys, "show", name, "--json"))["fusions"] == sorted(backend.fusions)


def test_show_files(capsys: Capture, tmp_path: Path) -> None:
    data = Path(load_model.__code__.co_filename).parent.parent / "data"
    for kind, name in (("devices", "h200_sxm"), ("backends", "nvidia")):
        copy = tmp_path / f"{kind}.toml"
        copy.write_text((data / kind / f"{name}.toml").read_text())
        assert shown(capsys, "show", str(copy)) == shown(capsys, "show", name)
    (tmp_path / "config.json").write_text((data / "models" / "zai-org--GLM-5.json").read_text())
    assert "78 full, 0 shared" in words(shown(capsys, "show", str(tmp_path)))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_shapes_of_a_decode_step(capsys: Capture) -> None:
    arguments = ["shapes", MODEL, *TP16, "--batch", "1,8", "--length", "4096,65536"]
    rows = rows_of(shown(capsys, *arguments))
    assert {(row["batch"], row["length"]) for row in rows} == {
        *(("1", "4096"), ("1", "65536"), ("8", "4096"), ("8", "65536"))
    }
    keys = [tuple(value for key, value in row.items() if key != "calls") for row in rows]
    assert len(keys) == len(set(keys))
    for batch in ("1", "8"):
        mine = [row for row in rows if (row["batch"], row["length"]) == (batch, "4096")]
        indexer = next(row for row in mine if row["name"] == "dsa_indexer")
        assert indexer["calls"] == "21"
        assert indexer["shapes"].startswith(f"[{batch}, 6144], [{batch}, 2048]")
        assert indexer["output_shapes"] == f"[{batch}, 2048]"


def test_shapes_of_prefill_and_its_file(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["shapes", MODEL, *TP16, "--batch", "2", "--length", "0", "--query-length", "512"]
    text = shown(capsys, *arguments)
    embedding = next(row for row in rows_of(text) if row["name"] == "embedding")
    assert embedding["shapes"].startswith("[1024]")
    assert shown(capsys, *arguments, "-o", str(tmp_path / "shapes.csv")) == ""
    assert (tmp_path / "shapes.csv").read_text() == text


def test_shapes_do_not_depend_on_the_device(capsys: Capture) -> None:
    arguments = ["shapes", MODEL, *TP16, "--batch", "1", "--length", "4096", "--backend", "ascend"]
    assert shown(capsys, *arguments) == shown(capsys, *arguments, "--device", "h200_sxm")


def test_version(capsys: Capture) -> None:
    from castoff import __version__

    assert shown(capsys, "--version").strip() == __version__
