"""`castoff run`: a tiny model with random weights, from flags to tokens."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import CONFIG, exit_status

pytest.importorskip("torch")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run_of(model: str) -> list[str]:
    return ["run", model, "--random-weights", "0", "--dtype", "float32", "--max-new-tokens", "6"]


def test_json(capsys: Capture, model: str) -> None:
    assert exit_status(*run_of(model), "--random-prompts", "3x20", "--num-mtp-tokens", "2", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert [len(tokens) for tokens in report["tokens"]] == [6, 6, 6]
    assert {"ttft_s", "tpot_s", "tokens_per_s", "acceptance_length", "memory"} <= report.keys()
    assert report["sparse_steps"] == report["decode_steps"] > 0
    assert report["memory"]["weights_bytes"] > 0
    rates = report["acceptance_rates"]
    assert len(rates) == 2
    assert 1 >= rates[0] >= rates[1] >= 0
    assert report["acceptance_length"] == pytest.approx(1 + sum(rates))


def test_op_times_come_without_a_profile(capsys: Capture, model: str, tmp_path: Path) -> None:
    arguments = [*run_of(model)[:-2], "--max-new-tokens", "100", "--ignore-eos", "--random-prompts", "1x20"]
    target = tmp_path / "run.json"
    assert exit_status(*arguments, "--json", str(target)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "decode mlapo: 297 calls" in captured.out
    report = json.loads(target.read_text())
    ops = {(op["phase"], op["name"]): op for op in report["ops"]}
    # One prefill and 99 decode steps of three layers, of one token.
    for phase, passes in (("prefill", 1), ("decode", 99)):
        assert ops[phase, "mlapo"]["calls"] == ops[phase, "dsa_indexer"]["calls"] == passes * 3
        assert ops[phase, "sample"]["calls"] == passes * 2
    for op in ops.values():
        assert op["mean_s"] == pytest.approx(op["total_s"] / op["calls"])
        assert op["origin"] == "measured"
    assert [op["total_s"] for op in report["ops"]] == sorted((op["total_s"] for op in ops.values()), reverse=True)


def test_nothing_is_timed_unasked(capsys: Capture, model: str) -> None:
    assert exit_status(*run_of(model), "--random-prompts", "1x20") == 0
    assert "mlapo" not in capsys.readouterr().out


def test_profile(capsys: Capture, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = [*run_of(model), "--random-prompts", "1x20", "--profile", str(trace), "--json", "-"]
    assert exit_status(*arguments) == 0
    ops = {(op["phase"], op["name"]): op for op in json.loads(capsys.readouterr().out)["ops"]}
    # One prefill and five decode steps of three layers.
    for name in ("mlapo", "dsa_indexer"):
        assert (ops["prefill", name]["calls"], ops["decode", name]["calls"]) == (3, 5 * 3)
        assert ops["decode", name]["mean_s"] > 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"mlapo", "dsa_indexer", "multihead_latent_attention"} <= names


def test_prompt_files_of_ids(capsys: Capture, model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[1, 2, 3], [4, 5]]")
    assert exit_status(*run_of(model), "--prompt-file", str(prompts)) == 0
    out = capsys.readouterr().out
    assert out.startswith("[0] ")
    assert "\n[1] " in out
    assert "decode steps" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "give one of --prompt"),
        (["--prompt", "hello"], "tokenizer.json"),
        (["--random-prompts", "3"], "4x1000"),
        (["--random-prompts", "1x5", "--prompt", "x"], "give one of --prompt"),
        (["--random-prompts", "1x5", "--batch", "0"], "--batch"),
        (["--random-prompts", "1x5", "--kv-block-tokens", "8"], "from 16 to 256"),
        (["--random-prompts", "1x5", "--num-mtp-tokens", "99"], "--num-mtp-tokens"),
        (["--random-prompts", "1x5", "--top-p", "0"], "--top-p"),
        (["--prompt-file", "/nowhere.json"], "cannot read --prompt-file"),
        (["--random-prompts", "1x5", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no directory"),
        (["--random-prompts", "1x5", "--profile", "/nowhere/x"], "--profile /nowhere/x: there is no directory"),
        (["--random-prompts", "1x5", "--profile", "/"], "--profile /: is a directory"),
        (["--random-prompts", "1x5", "--json", "x", "--profile", "./x"], "--json and --profile name the same file"),
    ],
)
def test_errors(capsys: Capture, model: str, flags: list[str], says: str) -> None:
    assert exit_status(*run_of(model), *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says in captured.err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[]", "holds no prompt"),
        (b"", "holds no prompt"),
        (b" \n\t\n\r\n", "holds no prompt"),
        (b"\xef\xbb\xbf", "holds no prompt"),
        (b"[[]]", "prompt 0 is empty"),
        (b"[[1], []]", "prompt 1 is empty"),
        (b"[1, 2]", "list of lists of token ids"),
        (b"[[[1]]]", "list of lists of token ids"),
        (b"[[1.5]]", "list of lists of token ids"),
        (b"[[1.0]]", "list of lists of token ids"),
        (b"[[true]]", "list of lists of token ids"),
        (b"[[null]]", "list of lists of token ids"),
        (b'["text"]', "list of lists of token ids"),
        (b"[[-1]]", "prompt 0 has token -1; the vocabulary of"),
        (b"[[1], [5, 61]]", "prompt 1 has token 61; the vocabulary of"),
        (b"[[1]", "is not JSON"),
        (b"[[1]] x", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[[" + b"9" * 5000 + b"]]", "is not JSON"),
        (b"\xff\xfe[\x00", "cannot read --prompt-file"),
        (b"\xef\xbb\xbfhello", "tokenizer.json"),
    ],
)
def test_odd_prompt_files(capsys: Capture, model: str, tmp_path: Path, content: bytes, says: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_bytes(content)
    assert exit_status(*run_of(model), "--prompt-file", str(prompts)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_a_prompt_file_may_begin_with_a_byte_order_mark(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbf[[1, 2]]")
    assert exit_status(*run_of(model), "--prompt-file", str(tmp_path / "prompts")) == 0


def test_a_config_without_weights(capsys: Capture, model: str) -> None:
    assert exit_status("run", model, "--random-prompts", "1x5") == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err
    assert exit_status("run", "zai-org/GLM-5.2", "--random-prompts", "1x5") == 2
    assert "--random-weights SEED" in capsys.readouterr().err


@pytest.fixture
def cast_and_run(capsys: Capture, model: str, tmp_path: Path) -> tuple[str, str]:
    """JSON of a cast of a decode step with the backend `castoff`, and of a run."""
    cast_json, run_json = str(tmp_path / "cast.json"), str(tmp_path / "run.json")
    plain = ["--device", "h200_sxm", "--backend", "castoff", "--quantize-linear-action", "DISABLED"]
    assert exit_status("cast", model, *plain, "--context-length", "20", "--json", cast_json) == 0
    assert exit_status(*run_of(model), "--random-prompts", "1x20", "--json", run_json) == 0
    capsys.readouterr()
    return cast_json, run_json


def test_compare(capsys: Capture, cast_and_run: tuple[str, str]) -> None:
    cast_json, run_json = cast_and_run
    assert exit_status("compare", cast_json, run_json, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    ops = {op["name"]: op for op in found["ops"]}
    predicted = {op["name"]: op["mean_s"] for op in json.loads(Path(cast_json).read_text())["ops"]}
    assert ops["mlapo"]["predicted_s"] == predicted["mlapo"]
    # The run's decode passes alone, five of three layers, and exactly the cast's ops.
    assert ops["mlapo"]["calls"] == 5 * 3
    assert (found["mode"], found["not_run"], ops.keys()) == ("decode", [], predicted.keys())
    assert found["predicted_s"] == pytest.approx(sum(op["calls"] * op["predicted_s"] for op in found["ops"]))
    assert found["ratio"] == pytest.approx(found["predicted_s"] / found["measured_s"])
    assert exit_status("compare", cast_json, run_json) == 0
    assert "total ms" in capsys.readouterr().out


def test_compare_with_the_wrong_files(capsys: Capture, cast_and_run: tuple[str, str], tmp_path: Path) -> None:
    cast_json, run_json = cast_and_run
    (tmp_path / "other.json").write_text('{"ops": []}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name, wrong in (("other", "lists no op times"), ("deep", "is not JSON"), ("missing", "cannot read")):
        assert exit_status("compare", str(tmp_path / f"{name}.json"), run_json) == 2
        assert wrong in capsys.readouterr().err
    for files in ((run_json, cast_json), (cast_json, cast_json), (run_json, run_json)):
        assert exit_status("compare", *files) == 2
        assert "lists no op times; make it with castoff" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", [1]), ("calls", "x"), ("calls", None), ("calls", 0), ("calls", -1), ("calls", 1e400), ("mean_s", "x"),
        ("mean_s", None), ("mean_s", 10**400), ("mean_s", float("nan")), ("mean_s", -1.0), ("total_s", []),
    ],
)  # fmt: skip
def test_compare_with_odd_figures(
    capsys: Capture, cast_and_run: tuple[str, str], key: str, value: object, tmp_path: Path
) -> None:
    for index in (0, 1):
        files = list(cast_and_run)
        report = json.loads(Path(files[index]).read_text())
        report["ops"][0][key] = value
        files[index] = str(tmp_path / "odd.json")
        Path(files[index]).write_text(json.dumps(report))
        assert exit_status("compare", *files) == 2
        error = capsys.readouterr().err
        assert "no numbers of calls and seconds" in error
        assert error.count("\n") == 1


def test_an_op_that_took_no_time(capsys: Capture, cast_and_run: tuple[str, str]) -> None:
    cast_json, run_json = cast_and_run
    report = json.loads(Path(run_json).read_text())
    for op in report["ops"]:
        op["mean_s"] = op["total_s"] = 0.0
    Path(run_json).write_text(json.dumps(report))
    assert exit_status("compare", cast_json, run_json, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["ratio"] is None
    assert exit_status("compare", cast_json, run_json) == 0


@pytest.mark.parametrize("linear", ["DISABLED", "W8A8_DYNAMIC", "W8A16_STATIC", "FP8"])
@pytest.mark.parametrize("attention", ["DISABLED", "INT8", "FP8"])
def test_number_formats(capsys: Capture, tmp_path: Path, linear: str, attention: str) -> None:
    """Smaller weights and caches; the same seed of weights, so tokens may differ, and there are as many."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "kv_lora_rank": 128, "num_nextn_predict_layers": 1}))
    arguments = [*run_of(str(tmp_path)), "--random-prompts", "2x20", "--num-mtp-tokens", "2", "--json", "-"]
    formats = ["--quantize-linear-action", linear, "--quantize-attention-action", attention]
    reports = []
    for more in ([], formats):
        assert exit_status(*arguments, *more) == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, own = reports
    assert [len(tokens) for tokens in own["tokens"]] == [6, 6]
    names = {op["name"] for op in own["ops"]}
    assert ("linear_quant" in names) == (linear != "DISABLED")
    assert ("multihead_latent_attention_quant" in names) == (attention != "DISABLED")
    memory = [report["memory"] for report in reports]
    assert (memory[1]["weights_bytes"] < memory[0]["weights_bytes"]) == (linear != "DISABLED")
    assert (memory[1]["cache_bytes"] < memory[0]["cache_bytes"]) == (attention != "DISABLED")
    if linear == attention == "DISABLED":
        assert own["tokens"] == plain["tokens"]


def test_indexer_keys_have_a_format_of_their_own(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "kv_lora_rank": 128}))
    arguments = [*run_of(str(tmp_path)), "--random-prompts", "2x20", "--json", "-"]
    both = ["--quantize-attention-action", "INT8"]
    cache_bytes = []
    for more in ([], both, ["--quantize-indexer-action", "INT8"], [*both, "--quantize-indexer-action", "DISABLED"]):
        assert exit_status(*arguments, *more) == 0
        report = json.loads(capsys.readouterr().out)
        assert [len(tokens) for tokens in report["tokens"]] == [6, 6]
        cache_bytes.append(report["memory"]["cache_bytes"])
    plain, quantised, keys, rows = cache_bytes
    assert quantised < min(keys, rows) < max(keys, rows) < plain
    assert (plain - keys) + (plain - rows) == plain - quantised


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--quantize-linear-action", "W4A8_STATIC"], "can be cast, and cannot be run; choose among DISABLED"),
        (["--quantize-attention-action", "INT8"], "does not divide kv_lora_rank 16"),
        (["--graph", "cudagraph"], "--graph cudagraph needs --device cuda"),
        (["--graph", "fast"], "--graph"),
    ],
)
def test_formats_and_graphs_that_cannot_run(capsys: Capture, model: str, flags: list[str], says: str) -> None:
    assert exit_status(*run_of(model), "--random-prompts", "1x5", *flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
