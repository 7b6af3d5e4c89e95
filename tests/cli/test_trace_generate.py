"""`castoff trace generate`."""

import json
from pathlib import Path

import pytest

from castoff.report.progress import progress_bar
from castoff.trace.reader import open_trace
from tests.cli.commands import CONFIG, exit_status

Capture = pytest.CaptureFixture[str]
GENERATE = ["trace", "generate", "--model", "model.json", "--window", "4"]
SMALL = [*GENERATE, "--context-length", "60", "--steps", "5", "--mtp", "1"]


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the current directory: 3 groups, index_topk 16, 512 positions."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))


def test_generate_and_info(capsys: Capture) -> None:
    assert exit_status(*SMALL, "--requests", "2", "--noise", "0.5", "-o", "x.topk") == 0
    size = Path("x.topk").stat().st_size
    expected = f"x.topk: steps 5, index groups 3, requests per step at most 2, {size:,} bytes\n"
    assert capsys.readouterr() == (expected, "")
    assert exit_status("trace", "info", "x.topk", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["query_length"], values["min_length"], values["requests"]) == (2, 62, 2)
    provenance = values["provenance"]
    assert provenance["generator"] == "castoff trace generate"
    assert (provenance["seed"], provenance["noise"], provenance["window"], provenance["num_mtp_tokens"]) == (
        *(0, 0.5),
        *(4, 1),
    )


def test_seeds() -> None:
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        assert exit_status(*SMALL, "--seed", str(seed), "-o", f"{name}.topk") == 0
    first, same, other = (open_trace(f"{name}.topk").steps().ids_NGBSK for name in "abc")
    assert (first == same).all()
    assert (first != other).any()
    assert Path("a.topk").read_bytes() == Path("b.topk").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "castoff trace generate needs --output"),
        (["-o", "missing/x.topk"], "there is no directory"),
        (["-o", "x.topk", "--steps", "0"], "--steps must be from 1 to"),
        (["-o", "x.topk", "--steps", "1.5"], "--steps must be a whole number, got '1.5'"),
        (["-o", "x.topk", "--noise", "nan"], "--noise must be a number, got 'nan'"),
        (["-o", "x.topk", "--noise", "-1"], "--noise must be from 0 to 1,000, got -1"),
        (
            ["-o", "x.topk", "--context-length", "60", "--steps", "5", "--sinks", "13"],
            "--sinks 13 and --window 4 together are more than the 16 tokens",
        ),
        (["-o", "x.topk"], "could come to 65,836 tokens, and model.json has positions for 512"),
        (["-o", "x.topk", "--model", "deepseek-ai/DeepSeek-R1"], "parameter --model specified multiple times"),
        (["-o", "x.topk", "--windw", "3"], "unknown option: --windw"),
    ],
)
def test_errors(arguments: list[str], says: str, capsys: Capture) -> None:
    before = sorted(Path().iterdir())
    assert exit_status(*GENERATE, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert sorted(Path().iterdir()) == before


def test_a_model_without_an_indexer(capsys: Capture) -> None:
    assert exit_status("trace", "generate", "--model", "deepseek-ai/DeepSeek-R1", "-o", "x.topk") == 2
    assert "DeepSeek-R1 has no indexer" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("castoff.trace.writer.TraceWriter.append_record", interrupted)
    assert exit_status(*SMALL, "-o", "x.topk") == 130
    assert [path.name for path in Path().iterdir()] == ["model.json"]


def test_help_explains_every_flag(capsys: Capture) -> None:
    assert exit_status("trace", "generate", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--topic-turnover FLOAT Chance that a topic adds something else in the next step." in text
    assert "--num-mtp-tokens --mtp INT" in text


def test_the_bar_shows_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with progress_bar("x") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("x[1].topk: steps") as progress:
        progress(2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "x[1].topk: steps" in captured.err
    assert "2/2" in captured.err
