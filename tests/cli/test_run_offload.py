"""`castoff run --offload`: flags, what they refuse, and what is said at the end."""

import json
from pathlib import Path

import pytest

from castoff.config_file import shipped_runs
from castoff.errors import CastoffError
from castoff.runtime import generate
from castoff.runtime.options import RunOptions
from castoff.spec.offload import Offload
from tests.cli.commands import CONFIG, exit_status

pytest.importorskip("torch")

Capture = pytest.CaptureFixture[str]
POOL = ["--pool-tokens", "32", "--ways", "4"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run_of(model: str, *more: str) -> list[str]:
    return [
        *("run", model, "--random-weights", "0", "--dtype", "float32", "--max-new-tokens", "6"),
        *("--random-prompts", "3x40", *more),
    ]


@pytest.mark.parametrize("mode", ["gather", "serve_install", "direct"])
def test_the_tokens_are_those_of_a_resident_cache_and_the_figures_are_said(
    capsys: Capture, model: str, mode: str
) -> None:
    assert exit_status(*run_of(model, "--json", "-")) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["offload"] is None
    pool = [] if mode == "gather" else POOL
    assert exit_status(*run_of(model, "--offload", mode, *pool, "--check", "--json", "-")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == plain["tokens"]
    offload = report["offload"]
    assert offload["mode"] == mode
    assert report["sparse_steps"] == report["decode_steps"] == 5
    assert len(offload["groups"]) == 3
    for group in offload["groups"]:
        rows = sum(group[key] for key in ("hits", "unique_misses", "repeated_misses", "window_reads", "promoted_rows"))
        # Three requests, five steps, 16 selected rows.
        assert rows == 3 * 5 * 16
        assert 0 < group["occupancy"] <= 1
    # kv_lora_rank 16 and a rope part of 8, in fp32.
    misses = sum(group["unique_misses"] for group in offload["groups"])
    own = 0 if mode == "direct" else sum(g["repeated_misses"] + g["window_reads"] for g in offload["groups"])
    assert offload["link_bytes"] == (misses + own) * 24 * 4
    assert offload["written_bytes"] == 3 * 3 * 5 * 24 * 4
    assert offload["stall_s"] >= 0
    assert exit_status(*run_of(model, "--offload", mode, *pool)) == 0
    text = capsys.readouterr().out
    assert f"offload {mode}:" in text
    assert text.count("% hits") == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pool-tokens", "64"], "--offload serve_install or direct, and this run has --offload none"),
        (["--offload", "gather", "--ways", "4"], "--ways 4 is for --offload serve_install or direct"),
        (["--offload", "gather", "--policy", "lru"], "gather keeps each query's last selection"),
        (["--offload", "serve_install", "--policy", "lru"], "the published route is first in, first out"),
        (["--offload", "serve_install", "--prefetch"], "--prefetch is for --offload direct"),
        (["--offload", "direct", "--no-install-stream"], "--no-install-stream is for --offload serve_install"),
        (["--offload", "direct", "--no-mtp-gather-reuse"], "--no-mtp-gather-reuse is for --offload gather"),
        (["--offload", "direct", "--pool-tokens", "30", "--ways", "4"], "multiple of --ways 4, got 30; the nearest is"),
        (["--offload", "direct", "--pool-tokens", "0"], "--pool-tokens must be a positive multiple"),
        (["--offload", "direct", "--ways", "33"], "--ways must be from 1 to 32, got 33"),
        (["--offload", "direct", "--ways", "0"], "--ways must be from 1 to 32, got 0"),
        (["--host-gib", "1"], "--host-gib is for an offloaded KV cache"),
        (["--check"], "--check is for an offloaded KV cache"),
        (["--offload", "direct", "--host-gib", "0"], "--host-gib must be above 0, got 0"),
        (["--offload", "direct", "--host-gib", "nan"], "--host-gib"),
        (["--offload", "direct", *POOL, "--host-gib", "0.00001"], "and --host-gib allows 10,737"),
        (["--offload", "direct", "--check", "--graph", "compile"], "--check looks at every step from outside"),
        (["--offload", "shared"], "shared"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence(capsys: Capture, model: str, flags: list[str], said: str) -> None:
    assert exit_status(*run_of(model, *flags)) == 2
    captured = capsys.readouterr()
    assert said in " ".join(captured.err.split())
    assert captured.out == ""


def test_a_published_route_without_offload_is_an_error_in_a_file_too(
    capsys: Capture, model: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("pool_tokens: 8192\nways: 16\n")
    assert exit_status(*run_of(model, "--config", str(config))) == 2
    assert "--pool-tokens 8192 is for --offload" in capsys.readouterr().err


def test_dense_attention_is_refused(capsys: Capture) -> None:
    arguments = ["run", "deepseek-ai/DeepSeek-V3", "--num-hidden-layers-override", "1", "--random-weights", "0"]
    assert exit_status(*arguments, "--random-prompts", "1x8", "--offload", "direct") == 2
    assert "has no sparse attention" in capsys.readouterr().err


def test_the_command_line_displaces_what_a_file_says_of_another_mode(
    capsys: Capture, model: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("offload: direct\npool_tokens: 64\npolicy: lru\nrandom_prompts: 9x9\n")
    for mode, has_pool in (("none", False), ("gather", False), ("direct", True)):
        arguments = run_of(model, "--config", str(config), "--offload", mode, "--json", "-")
        assert exit_status(*arguments) == 0, capsys.readouterr().err
        report = json.loads(capsys.readouterr().out)
        assert len(report["tokens"]) == 3, "the prompts of the command line"
        assert (report["offload"] or {}).get("pool_tokens") == {False: report["offload"] and 16, True: 64}[has_pool]


def test_unknown_settings_are_told_with_those_that_there_are(capsys: Capture, model: str) -> None:
    assert exit_status(*run_of(model, "--config", "glm-5.2-drect")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "castoff has no settings of this name; it has glm-5.2-direct-mtp3-8k, glm-5.2-gather" in said


def test_no_numba_is_told_at_the_start(capsys: Capture, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "has_numba", lambda: False)
    assert exit_status(*run_of(model, "--offload", "direct", *POOL)) == 0
    assert "pip install 'castoff[lab]' brings numba" in " ".join(capsys.readouterr().err.split())


def test_a_run_without_decode_steps_says_so(capsys: Capture, model: str) -> None:
    arguments = [item if item != "6" else "1" for item in run_of(model, "--offload", "direct", *POOL)]
    assert exit_status(*arguments) == 0
    assert "no decode step has selected anything" in capsys.readouterr().out


@pytest.mark.parametrize("offload", [Offload(offload="foo"), Offload(offload="direct", policy="mru")])  # type: ignore[arg-type]
def test_unknown_words_are_refused_from_python_too(offload: Offload, model: str) -> None:
    with pytest.raises(CastoffError, match="must be"):
        generate.run(model, RunOptions(random_prompts="1x8", random_weights=0), offload=offload)


@pytest.mark.parametrize("name", shipped_runs())
def test_shipped_settings_can_be_run_small(capsys: Capture, model: str, name: str) -> None:
    """Their flags are all known; on one process and with a tiny model they run."""
    small = [
        *("run", model, "--config", name, "--random-weights", "0", "--device", "cpu", "--dtype", "float32"),
        *("--batch", "2", "--random-prompts", "2x40", "--max-new-tokens", "4", "--json", "-"),
        *("--quantize-linear-action", "DISABLED"),
    ]
    assert exit_status(*small) == 2
    assert "does not divide the 1 process(es) of this run" in capsys.readouterr().err
    sizes = ("--dp-size", "--ep-size", "--lmhead-tp-size", "--word-embedding-tp-size")
    assert exit_status(*small, *(part for size in sizes for part in (size, "1"))) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["offload"]["mode"] in name.replace("-", "_")
