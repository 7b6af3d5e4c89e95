"""`castoff run`: a tiny model with random weights, from flags to tokens."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import exit_status

pytest.importorskip("torch")

Capture = pytest.CaptureFixture[str]

CONFIG = {
    "model_type": "glm_moe_dsa", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_attention_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "index_topk": 16,
    "index_n_heads": 16, "index_head_dim": 16, "max_position_embeddings": 512, "num_hidden_layers": 3,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_nextn_predict_layers": 1,
    "norm_topk_prob": True, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


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


def test_profile(capsys: Capture, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = [*run_of(model), "--random-prompts", "1x20", "--profile", str(trace), "--json", "-"]
    assert exit_status(*arguments) == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)["ops"]}
    # One prefill and five decode steps of three layers.
    assert ops["mlapo"]["calls"] == ops["dsa_indexer"]["calls"] == 6 * 3
    assert ops["mlapo"]["mean_s"] > 0
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
    ],
)
def test_errors(capsys: Capture, model: str, flags: list[str], says: str) -> None:
    assert exit_status(*run_of(model), *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert says in captured.err


def test_a_config_without_weights(capsys: Capture, model: str) -> None:
    assert exit_status("run", model, "--random-prompts", "1x5") == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err
    assert exit_status("run", "zai-org/GLM-5.2", "--random-prompts", "1x5") == 2
    assert "--random-weights SEED" in capsys.readouterr().err


def test_compare(capsys: Capture, model: str, tmp_path: Path) -> None:
    cast_json, run_json = str(tmp_path / "cast.json"), str(tmp_path / "run.json")
    plain = ["--device", "h200_sxm", "--quantize-linear-action", "DISABLED", "--context-length", "20"]
    assert exit_status("cast", model, *plain, "--json", cast_json) == 0
    profile = ["--profile", str(tmp_path / "trace.json")]
    assert exit_status(*run_of(model), "--random-prompts", "1x20", *profile, "--json", run_json) == 0
    capsys.readouterr()
    assert exit_status("compare", cast_json, run_json, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    ops = {op["name"]: op for op in found["ops"]}
    predicted = {op["name"]: op["mean_s"] for op in json.loads(Path(cast_json).read_text())["ops"]}
    assert ops["mlapo"]["predicted_s"] == predicted["mlapo"]
    assert found["predicted_s"] == pytest.approx(
        sum(op["calls"] * op["predicted_s"] for op in found["ops"] if op["predicted_s"] is not None)
    )
    assert found["ratio"] == pytest.approx(found["predicted_s"] / found["measured_s"])
    assert exit_status("compare", cast_json, run_json) == 0
    assert "total ms" in capsys.readouterr().out


def test_compare_with_the_wrong_file(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"ops": []}')
    assert exit_status("compare", str(tmp_path / "other.json"), str(tmp_path / "missing.json")) == 2
    assert "lists no op times" in capsys.readouterr().err
