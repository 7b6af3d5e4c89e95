"""`castoff cast`: the published command, tables, JSON, files."""

import json
from pathlib import Path
from typing import Any

import pytest

from castoff import __version__
from castoff.spec.model import config_text
from tests.cli.commands import CAST, DEVICE, MODEL, PUBLISHED, TP16, exit_status

Capture = pytest.CaptureFixture[str]


def json_of(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert exit_status(*arguments, "--json", "-") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(capsys.readouterr().out, parse_constant=refuse)  # type: ignore[no-any-return]


def test_the_published_command(capsys: Capture) -> None:
    assert exit_status(*PUBLISHED) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == f"{MODEL}, prefill: 1 request of 4,096 new tokens after 61,000 cached"
    assert "[4096, 6144], [4096, 6144], [6144]" in captured.out
    for title in ("Ops", "Inside dsa_indexer", "Layers by kind", "Streams", "Memory of the fullest device", "Result"):
        assert title in lines
    assert "Bound by " in captured.out
    assert "it fits" in captured.out


def test_json_keys_are_a_contract(capsys: Capture) -> None:
    found = json_of(capsys, *PUBLISHED)
    assert set(found) >= {
        *("castoff_version", "model", "device", "backend", "scenario", "mode", "latency_s", "tokens_per_s"),
        *("tokens_per_s_per_device", "origin", "fits", "ops", "streams", "footprint", "max_batch_per_device"),
    }
    assert (found["castoff_version"], found["model"], found["device"]) == (__version__, MODEL, DEVICE)
    assert (found["backend"], found["mode"], found["fits"]) == ("ascend", "prefill", True)
    for op in found["ops"]:
        assert set(op) >= {
            *("name", "calls", "total_s", "mean_s", "bound", "origin", "flops", "bytes", "shapes", "buckets"),
        }
        assert op["mean_s"] == pytest.approx(op["total_s"] / op["calls"])
        assert sum(shape["calls"] for shape in op["shapes"]) == op["calls"]
    assert set(found["footprint"]) == {
        *("device_bytes_capacity", "weights_bytes", "kv_bytes", "indexer_cache_bytes", "pool_bytes"),
        *("selection_bytes", "staging_bytes", "metadata_bytes", "activation_bytes", "communication_bytes"),
        *("reserved_bytes", "free_bytes", "host_kv_bytes", "host_bytes_capacity"),
    }
    others = ("device_bytes_capacity", "host_kv_bytes", "host_bytes_capacity")
    used = sum(size for key, size in found["footprint"].items() if key not in others)
    assert used == found["footprint"]["device_bytes_capacity"]
    assert found["tokens_per_s"] == pytest.approx(4096 / found["latency_s"])
    assert found["tokens_per_s_per_device"] == pytest.approx(found["tokens_per_s"] / 16)
    assert found["scenario"]["parallel"]["tp_size"] == 16
    assert found["scenario"]["mtp"]["num_mtp_tokens"] == 3


def test_one_indexer_per_index_group(capsys: Capture) -> None:
    calls = {op["name"]: op["calls"] for op in json_of(capsys, *CAST, *TP16)["ops"]}
    assert calls["dsa_indexer"] == 21
    assert calls["multihead_latent_attention"] == 78


def test_json_dash_prints_json_alone(capsys: Capture) -> None:
    assert exit_status(*CAST, *TP16, "--json=-") == 0
    with_equals = capsys.readouterr()
    assert exit_status(*CAST, "--json", *TP16) == 0
    assert capsys.readouterr() == with_equals
    assert json.loads(with_equals.out)["model"] == MODEL


def test_json_file_stands_beside_the_tables(capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    assert exit_status(*CAST, *TP16, "--json", str(target)) == 0
    assert "Bound by" in capsys.readouterr().out
    assert json.loads(target.read_text())["model"] == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["step.json"]


def test_the_same_command_gives_the_same_bytes(capsys: Capture) -> None:
    outputs = set()
    for _ in range(2):
        assert exit_status(*PUBLISHED) == 0
        assert exit_status(*PUBLISHED, "--json", "-") == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_what_does_not_fit_is_said_first(capsys: Capture) -> None:
    arguments = [*CAST, *TP16, "--num-queries", "32", "--context-length", "65536"]
    assert exit_status(*arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("DOES NOT FIT: ")
    found = json_of(capsys, *arguments)
    assert not found["fits"]
    assert found["footprint"]["free_bytes"] < 0
    batch, context = found["max_batch_per_device"], found["max_context_length"]
    first = " ".join(text.partition("\n\n")[0].split())
    assert f"is {batch} request" in first
    assert f"is {context:,} tokens" in first
    assert json_of(capsys, *CAST, *TP16, "--num-queries", str(batch), "--context-length", "65536")["fits"]
    assert not json_of(capsys, *CAST, *TP16, "--num-queries", str(batch + 1), "--context-length", "65536")["fits"]
    assert json_of(capsys, *CAST, *TP16, "--num-queries", "32", "--context-length", str(context))["fits"]
    assert not json_of(capsys, *CAST, *TP16, "--num-queries", "32", "--context-length", str(context + 1))["fits"]


def test_weights_that_do_not_fit_are_named(capsys: Capture) -> None:
    assert exit_status(*CAST) == 0
    assert "Not even one request fits" in capsys.readouterr().out.partition("\n\n")[0]


def test_ragged_lengths_equal_their_sum_of_classes(capsys: Capture) -> None:
    arguments = [*CAST, *TP16, "--context-length"]
    ragged = json_of(capsys, *arguments, "61000,30000")
    assert ragged["scenario"]["workload"]["context_length"] == [61000, 30000]
    assert json_of(capsys, *arguments, "30000,61000")["latency_s"] == ragged["latency_s"]
    shorter, longer = (json_of(capsys, *arguments, length, "--num-queries", "2") for length in ("30000", "61000"))
    assert shorter["latency_s"] < ragged["latency_s"] < longer["latency_s"]
    assert json_of(capsys, *arguments, "5,5")["latency_s"] == pytest.approx(
        json_of(capsys, *arguments, "5", "--num-queries", "2")["latency_s"], rel=1e-12
    )


def test_unrolled_pricing_changes_nothing(capsys: Capture) -> None:
    folded, unrolled = (json_of(capsys, *PUBLISHED, *more) for more in ([], ["--disable-repetition"]))
    assert unrolled["latency_s"] == pytest.approx(folded["latency_s"], rel=1e-9)
    assert unrolled["footprint"] == folded["footprint"]
    assert {op["name"]: op["calls"] for op in unrolled["ops"]} == {op["name"]: op["calls"] for op in folded["ops"]}


def test_bound_results_are_shares_of_each_term(capsys: Capture) -> None:
    assert exit_status(*CAST, *TP16, "--dump-op-bound-results") == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("op "))
    assert header.split()[-6:] == ["compute", "vector", "memory", "communication", "host_link", "launch"]


def test_fewer_layers_take_less_time(capsys: Capture) -> None:
    whole, cut = (json_of(capsys, *CAST, *TP16, *more) for more in ([], ["--num-hidden-layers-override", "7"]))
    assert cut["latency_s"] < whole["latency_s"]
    assert {op["name"]: op["calls"] for op in cut["ops"]}["dsa_indexer"] == 4


def test_beyond_the_models_context_is_a_note(capsys: Capture) -> None:
    arguments = [*CAST, *TP16, "--context-length", "1048576"]
    assert exit_status(*arguments) == 0
    assert "note: requests reach 1048577 tokens" in " ".join(capsys.readouterr().out.split())
    assert any("max_position_embeddings" in note for note in json_of(capsys, *arguments)["notes"])


def test_unknown_config_keys_are_notes(capsys: Capture, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config_text(MODEL)) | {"rotary_twist": 3}))
    assert exit_status("cast", str(tmp_path), "--device", DEVICE, *TP16, "--json", "-") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("note: ")
    assert captured.err.count("rotary_twist") == 1
    assert any("rotary_twist" in note for note in json.loads(captured.out)["notes"])


def test_output_is_plain_and_wide_off_a_terminal(capsys: Capture) -> None:
    assert exit_status(*PUBLISHED) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert 120 < max(len(line) for line in text.splitlines()) <= 160


def test_alias_and_id_are_one_model(capsys: Capture) -> None:
    assert json_of(capsys, "cast", "glm52", *CAST[2:], *TP16) == json_of(capsys, *CAST, *TP16)


def test_log_level_reaches_standard_error(capsys: Capture) -> None:
    assert exit_status(*CAST, *TP16, "--log-level", "info") == 0
    assert "INFO castoff: " in capsys.readouterr().err
    assert exit_status(*CAST, *TP16) == 0
    assert capsys.readouterr().err == ""
