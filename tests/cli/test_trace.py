"""`castoff trace`: info, cut and convert."""

import json
from pathlib import Path

import numpy as np
import pytest

from castoff import __version__
from castoff.trace.reader import open_trace
from castoff.trace.steps import Int32Array
from castoff.trace.writer import TraceWriter
from tests.cli.commands import CONFIG, exit_status

Capture = pytest.CaptureFixture[str]
# 3 requests with 40 tokens before the first of 6 steps of 2 query tokens; the model has 3 groups and index_topk 16.
LENGTHS = 42 + 2 * np.arange(6)[:, None] + np.zeros(3, int)
CONVERT = ["convert", "ids.npy", "--model", "model.json"]
CUT = ["cut", "x.topk"]
OUT = ["-o", "out.topk"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A model, arrays, and the trace of them, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))
    every_id = np.broadcast_to(np.arange(40), (6, 3, 3, 2, 40))
    np.save("ids.npy", np.random.default_rng(6).permuted(every_id, axis=-1)[..., :16])
    np.save("lengths.npy", LENGTHS)
    assert exit_status("trace", *CONVERT, "--lengths", "lengths.npy", "-o", "x.topk") == 0
    size = Path("x.topk").stat().st_size
    expected = f"x.topk: steps 6, index groups 3, requests per step at most 3, {size:,} bytes\n"
    assert capsys.readouterr() == (expected, "")


def names() -> set[str]:
    return {path.name for path in Path().iterdir()}


def info(capsys: Capture, file: str) -> dict[str, object]:
    assert exit_status("trace", "info", file, "--json") == 0
    values: dict[str, object] = json.loads(capsys.readouterr().out)
    return values


def test_convert_and_info(capsys: Capture) -> None:
    values = info(capsys, "x.topk")
    distinct = values.pop("mean_distinct_ids")
    assert isinstance(distinct, float)
    assert 16 < distinct < 32
    assert values == {
        "file": "x.topk", "bytes": Path("x.topk").stat().st_size, "format_version": 1,
        "written_by": f"castoff {__version__}", "model": "model.json", "groups": 3, "owner_layers": [0, 1, 2],
        "query_length": 2, "index_topk": 16, "batch": 3, "steps": 6,
        "requests": 3, "request_steps": 18, "lengths_known": True, "min_length": 42, "max_length": 52,
        "provenance": {"converted_from": "ids.npy", "lengths_from": "lengths.npy"},
    }  # fmt: skip


def test_info_as_a_table_and_into_a_file(capsys: Capture) -> None:
    assert exit_status("trace", "info", "x.topk", "--json", "info.json") == 0
    text = " ".join(capsys.readouterr().out.split())
    for fact in (
        *("x.topk: top-k trace of model.json", "steps 6", "requests 3, at most 3 in a step", "42 to 52 tokens"),
        *(
            "index groups 3, selected by layers 0, 1, 2",
            "converted_from ids.npy",
            f"written by castoff {__version__}, format version 1",
        ),
    ):
        assert fact in text
    assert json.loads(Path("info.json").read_text()) == info(capsys, "x.topk")


def test_convert_without_lengths(capsys: Capture) -> None:
    arguments = ["trace", "convert", "ids.npy", "--model", "model.json", "--note", "LongBench, vLLM", "-o", "y.topk"]
    assert exit_status(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("note: ids.npy came without lengths, so every id counts as committed")
    assert captured.err.count("\n") == 1
    assert exit_status("trace", "info", "y.topk") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "lengths not known: every id counts as committed" in text
    assert "note LongBench, vLLM" in text
    assert info(capsys, "y.topk")["min_length"] is None


def test_cut_of_a_cut(capsys: Capture) -> None:
    assert exit_status("trace", "cut", "x.topk", "--steps", "1:", "--groups", "0,2", "--output", "y.topk") == 0
    assert exit_status("trace", "cut", "y.topk", "--steps", ":3", "--requests", "2", "-o", "z.topk") == 0
    assert capsys.readouterr().out.count("\n") == 2
    whole, part = open_trace("x.topk").steps(1, 4), open_trace("z.topk")
    assert (part.steps().ids_NGBSK == whole.ids_NGBSK[:, [0, 2]][:, :, 2:]).all()
    assert part.header.owner_layers == (0, 2)
    assert info(capsys, "z.topk")["max_length"] == 48


def test_a_trace_without_requests(capsys: Capture) -> None:
    header = open_trace("x.topk").header
    with TraceWriter("empty.topk", header):
        pass
    assert exit_status("trace", "info", "empty.topk") == 0
    assert "none, as no request takes part" in capsys.readouterr().out
    values = info(capsys, "empty.topk")
    assert (values["steps"], values["min_length"], values["mean_distinct_ids"]) == (0, None, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inof", "x.topk"], '"inof". Did you mean "info"?'),
        (["info"], "castoff trace info needs FILE"),
        (["info", "x.topk", "y.topk"], "unexpected argument 'y.topk'"),
        (["info", "none.topk"], "cannot read none.topk: No such file"),
        (["info", "."], ". is a directory"),
        (["info", "ids.npy"], "ids.npy is no trace: it begins with"),
        (["info", "short.topk"], "short.topk is cut short"),
        (["info", "bad.topk"], "bad.topk: step 5: request 2, group 2, query 1, rank 15: id -2"),
        (["info", "x.topk", "--json", "missing/info.json"], "there is no directory"),
        ([*CUT, *OUT], "nothing to cut: give --steps A:B, --groups or --requests"),
        ([*CUT, "--steps", "0:1"], "castoff trace cut needs --output"),
        ([*CUT, *OUT, "--steps", "0:7"], "x.topk has 6 steps; 0:7 are not among them"),
        ([*CUT, *OUT, "--steps", "7:"], "x.topk has 6 steps"),
        ([*CUT, *OUT, "--steps", "3"], "--steps must be A:B, the first step and the one behind the last, got '3'"),
        ([*CUT, *OUT, "--steps", "a:b"], "--steps must be A:B"),
        ([*CUT, *OUT, "--steps", f":{'9' * 5000}"], "--steps must be A:B"),
        ([*CUT, *OUT, "--steps=-2:3"], "--steps must be A:B"),
        ([*CUT, *OUT, "--steps", "3:3"], "--steps 3:3: the first step must come before"),
        ([*CUT, *OUT, "--groups", "3"], "x.topk has the index groups 0 to 2, not 3"),
        ([*CUT, *OUT, "--groups", "x"], "--groups: whole numbers separated by commas are needed, got 'x'"),
        ([*CUT, *OUT, "--requests", "0,5"], "x.topk has the requests 0, 1, 2 in steps 0:6, not 5"),
        ([*CUT, "--groups", "0", "-o", "x.topk"], "x.topk is what is read"),
        ([*CUT, "--groups", "0", "-o", "missing/x.topk"], "there is no directory"),
        ([*CUT, "--groups", "0", "-o", "/dev/null"], "/dev/null: it is no regular file"),
        (["cut", "bad.topk", *OUT, "--groups", "2"], "bad.topk: step 5: request 2, group 0, query 1, rank 15: id -2"),
        (["convert", "ids.npy", *OUT], "castoff trace convert needs --model"),
        (["convert", "--model", "glm52", *OUT], "castoff trace convert needs IDS"),
        ([*CONVERT], "castoff trace convert needs --output"),
        ([*CONVERT, "-o", "ids.npy"], "ids.npy is what is read"),
        ([*CONVERT, *OUT, "--lengths", "none.npy"], "cannot read none.npy"),
        ([*CONVERT, *OUT, "--lengths", "ids.npy"], "ids.npy: lengths must have the axes steps, requests"),
        (
            ["convert", "x.topk", "--model", "model.json", *OUT],
            "x.topk is neither an .npy array nor a .safetensors file",
        ),
        (["convert", "float.npy", "--model", "model.json", *OUT], "float.npy: ids must be integers, got float64"),
        (["convert", "large.npy", "--model", "model.json", *OUT], "rank 0: id 10995116277"),
        (["convert", "ids.npy", "--model", "glm52", *OUT], "ids.npy has 3 index groups, but zai-org/GLM-5.2 has 21"),
        (["convert", "ids.npy", "--model", "deepseek-ai/DeepSeek-R1", *OUT], "DeepSeek-R1 has no indexer"),
        (["convert", "ids.npy", "--model", "glm53", *OUT], "unknown model 'glm53'"),
    ],
)
def test_errors(capsys: Capture, arguments: list[str], says: str) -> None:
    data = Path("x.topk").read_bytes()
    Path("short.topk").write_bytes(data[:-1])
    Path("bad.topk").write_bytes(data[:-4] + b"\xfe\xff\xff\xff")
    np.save("float.npy", np.load("ids.npy") * 1.0)
    np.save("large.npy", np.load("ids.npy") + 2**40)
    before = names()
    assert exit_status("trace", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert names() == before


def test_ctrl_c_leaves_nothing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TraceWriter, record_W: Int32Array) -> None:
        assert len(names()) == len(before) + 1
        raise KeyboardInterrupt

    before = names()
    monkeypatch.setattr(TraceWriter, "append_record", interrupt)
    assert exit_status("trace", *CUT, "--groups", "0", *OUT) == 130
    assert exit_status("trace", *CONVERT, *OUT) == 130
    assert capsys.readouterr() == ("", "")
    assert names() == before


def test_progress_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert exit_status("trace", *CUT, "--groups", "0", *OUT) == 0
    shown = capsys.readouterr().err
    assert "out.topk: step 3 of 6" in shown
    assert shown.endswith("\r\033[K")


@pytest.mark.parametrize("command", [[], ["--help"], ["info", "--help"], ["cut", "--help"], ["convert", "--help"]])
def test_help(capsys: Capture, command: list[str]) -> None:
    assert exit_status("trace", *command) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"Usage: castoff trace {command[0] if len(command) > 1 else 'COMMAND'}")
    assert captured.err == ""
