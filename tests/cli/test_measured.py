"""`--performance-model profiling`: measured op times from a CSV file."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from castoff.casting.measured import load_measured, normal_list
from castoff.errors import CastoffError
from tests.cli.commands import CAST, MODEL, TP16, exit_status

Capture = pytest.CaptureFixture[str]
HEADER = "name,shapes,dtypes,seconds\n"


def database(tmp_path: Path, text: str) -> str:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    return str(path)


def profiled(path: str) -> list[str]:
    return [*CAST, *TP16, "--performance-model", "profiling", "--profiling-database", path]


def json_of(capsys: Capture, arguments: list[str]) -> dict[str, Any]:
    assert exit_status(*arguments, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def shapes_of_a_step(capsys: Capture) -> list[dict[str, str]]:
    """The rows of `castoff shapes` for the step of CAST: one request, an empty cache."""
    assert exit_status("shapes", MODEL, *TP16, "--batch", "1", "--length", "0") == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def written(rows: list[dict[str, str]], seconds: float) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["name", "shapes", "dtypes", "seconds", "machine"])
    writer.writerows([row["name"], row["shapes"], row["dtypes"], seconds, "here"] for row in rows)
    return text.getvalue()


def test_every_shape_measured(capsys: Capture, tmp_path: Path) -> None:
    rows = shapes_of_a_step(capsys)
    shapes = {(row["name"], row["shapes"], row["dtypes"]) for row in rows}
    unique = [dict(zip(("name", "shapes", "dtypes"), key, strict=True)) for key in sorted(shapes)]
    found = json_of(capsys, profiled(database(tmp_path, written(unique, 1e-5))))
    assert found["measured"]["shapes"] == found["measured"]["measured_shapes"] == len(shapes)
    assert found["streams"]["main"] == pytest.approx(1e-5 * sum(int(row["calls"]) for row in rows))
    assert {op["origin"] for op in found["ops"]} == {"measured"}


def test_some_shapes_measured(capsys: Capture, tmp_path: Path) -> None:
    rows = [row for row in shapes_of_a_step(capsys) if row["name"] == "multihead_latent_attention"]
    arguments = profiled(database(tmp_path, written(rows, 1e-3)))
    assert exit_status(*arguments) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("measured: "))
    assert line.startswith("measured: 1 of ")
    assert "78 of " in line
    ops = {op["name"]: op for op in json_of(capsys, arguments)["ops"]}
    assert ops["multihead_latent_attention"]["total_s"] == pytest.approx(78e-3)
    assert ops["multihead_latent_attention"]["origin"] == "measured"
    assert ops["linear_quant"]["origin"] != "measured"


def test_nothing_measured_is_an_error(capsys: Capture, tmp_path: Path) -> None:
    assert exit_status(*profiled(database(tmp_path, HEADER + 'linear,"[7, 7]",bf16,1\n'))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "covers 0 of the " in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name, shapes, dtypes, seconds"),
        ("name,dtypes,seconds\nx,bf16,1\n", "column shapes is missing"),
        (HEADER + "x,[1],bf16,fast\n", "line 2: seconds must be greater than 0 .* got 'fast'"),
        (HEADER + "x,[1],bf16,0\n", "line 2: seconds must be"),
        (HEADER + "x,[1],bf16,nan\n", "line 2: seconds must be"),
        (HEADER + "x,[1],bf16\n", "line 2: seconds must be"),
        (HEADER + 'x,"[1, 2]",bf16,1\nx,"[1,2]",bf16,1\n', "line 3: x with shapes .* measured twice"),
        (HEADER + 'x,"[1, 2]"y,bf16,1\n', "not a CSV file"),
    ],
)
def test_databases_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CastoffError, match=message):
        load_measured(Path(database(tmp_path, text)))


def test_a_database_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CastoffError, match="No such file"):
        load_measured(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CastoffError, match="not UTF-8"):
        load_measured(tmp_path / "binary.csv")


def test_spaces_in_shapes_do_not_matter(tmp_path: Path) -> None:
    assert normal_list(" [1,2] ,[ 3 ,4 ],[5] ") == "[1, 2], [3, 4], [5]"
    measured = load_measured(Path(database(tmp_path, HEADER + 'linear,"[1,2],[3]","bf16,int8",0.5\n')))
    assert measured.seconds == {("linear", "[1, 2], [3]", "bf16, int8"): 0.5}
