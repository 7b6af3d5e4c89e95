"""`castoff cast --offload` and `castoff shapes --offload`: tables, JSON, refusals."""

import csv
import io
import json

import pytest

from tests.cli.commands import CAST, DEVICE, MODEL, exit_status

Capture = pytest.CaptureFixture[str]
DEPLOYMENT = ["--num-devices", "32", "--dp-size", "32", "--ep-size", "32", "--num-mtp-tokens", "3"]
DECODE = [*CAST, *DEPLOYMENT, "--num-queries", "64", "--context-length", "65536", "--decode"]


def test_the_report_says_what_offload_does(capsys: Capture) -> None:
    assert exit_status(*DECODE, "--offload", "direct", "--pool-tokens", "4096", "--ways", "16") == 0
    text = capsys.readouterr().out
    assert "offload direct, pools of 4,096 tokens in sets of 16" in text
    for fact in (
        "KV offload, direct",
        "selected rows that are in the pool",
        "read from the host per step and device",
        "stall of the host link",
        "latency over the spread of the misses",
        "saves device memory from a context of",
        "gives more tokens/s at those from a hit rate of",
        "of it, stall of the host link",
        "capacity, per device",
        "staging",
        "copy",
    ):
        assert fact in text


def test_a_given_rate_has_no_spread(capsys: Capture) -> None:
    assert exit_status(*DECODE, "--offload", "gather", "--hit-rate", "0.6") == 0
    assert "over the spread" not in capsys.readouterr().out


def test_json_has_the_figures(capsys: Capture) -> None:
    assert exit_status(*DECODE, "--offload", "serve_install", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["offload"]) == {
        *("hit_rate", "unique_misses", "link_bytes", "written_bytes", "latency_low_s", "latency_high_s"),
        *("break_even_context_tokens", "break_even_hit_rate", "batch_without", "tokens_per_s_without", "batch_with"),
        "tokens_per_s_with",
    }
    assert 0 < found["stall_s"] < found["latency_s"]
    assert found["scenario"]["offload"]["offload"] == "serve_install"
    assert found["scenario"]["hits"] == {"hit_rate": None, "hit_profile": None}
    assert exit_status(*DECODE, "--json", "-") == 0
    without = json.loads(capsys.readouterr().out)
    assert (without["offload"], without["stall_s"]) == (None, 0.0)


def test_what_does_not_fit_the_host_says_so(capsys: Capture) -> None:
    many = ["--num-queries", "1024", "--context-length", "65536", "--decode"]
    assert exit_status(*CAST, *DEPLOYMENT, *many, "--offload", "direct", "--pool-tokens", "2048") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("DOES NOT FIT: ")
    assert "of a device's share of host memory, 64.00 GiB" in text
    assert "too much of host memory per device" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--offload", "sideways"], "--offload must be one of none, gather, serve_install, direct, got 'sideways'"),
        (["--hit-rate", "0.5"], "--hit-rate is for --offload gather, serve_install or direct"),
        (["--offload", "direct", "--hit-rate", "nan"], "--hit-rate must be a number"),
        (["--offload", "direct", "--hit-rate", "2"], "--hit-rate must be from 0 to 1, got 2.0"),
        (["--offload", "direct", "--pool-tokens", "100"], "multiple of --ways 16, got 100; the nearest is 96"),
        (["--offload", "direct", "--pool-tokens", str(2**62)], "--pool-tokens must be at most"),
        (["--offload", "direct", "--hit-profile", ""], ": cannot read this file"),
        (["--offload", "direct", "--hit-profile", "none.json"], "none.json: cannot read this file"),
        (["--offload", "gather", "--pool-tokens", "8192"], "gather keeps index_topk rows per query"),
        (["--query-length", "100", "--offload", "direct", "--hit-rate", "0.5"], "--hit-rate is for decode steps"),
        (["--offload", "direct", "--num-mtp-tokens", "5"], "at 6 query tokens a request; it has"),
    ],
)
def test_what_is_refused(arguments: list[str], said: str, capsys: Capture) -> None:
    assert exit_status(*CAST, "--context-length", "65536", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_shapes_are_those_of_offload_too(capsys: Capture) -> None:
    asked = ["shapes", MODEL, "--device", DEVICE, "--batch", "1", "--length", "65536", "--offload", "direct"]
    assert exit_status(*asked) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    calls = {row["name"]: sum(int(each["calls"]) for each in rows if each["name"] == row["name"]) for row in rows}
    assert (calls["offload_plan"], calls["offload_fetch"], calls["host_row_write"]) == (21, 78, 78)
