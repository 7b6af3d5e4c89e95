"""Measured tables as files: what is read, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from castoff.accuracy.tables import TIME_OF, Rows, TimeColumn, find_tables, read_rows
from castoff.errors import CastoffError
from tests.accuracy.measured import GEMM, repeated, write_table

WORDS, NUMBERS = ("gemm_dtype",), ("m", "n", "k")


def test_paths_say_what_a_table_is_of(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm", system="b200_sxm", backend="vllm")
    for folder in (tmp_path, tmp_path / "data"):
        (file,) = find_tables(folder)
        assert (file.name, file.system, file.backend, file.version) == ("gemm", "b200_sxm", "vllm", "1.0")


def test_latencies_are_seconds(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm")
    rows = read_rows(find_tables(tmp_path)[0], WORDS, NUMBERS)
    assert rows.latency_s == pytest.approx([0.2e-3])
    assert (rows.word("gemm_dtype"), rows.number("n")) == ("bfloat16", 6144)


def test_sites_are_a_partition() -> None:
    random = np.random.default_rng(3)
    columns = {name: random.integers(0, 4, 200) for name in ("n", "k")}
    rows = Rows(columns, np.ones(200))
    sites = [*rows.sites(("n", "k"))]
    assert sorted(np.concatenate(sites)) == [*range(200)]
    pairs = [{*zip(columns["n"][site], columns["k"][site], strict=True)} for site in sites]
    assert all(len(pair) == 1 for pair in pairs)
    assert len({pair.pop() for pair in pairs}) == len(sites)
    assert [*rows.where(np.zeros(200, bool)).sites(("n",))] == []


def test_no_tables(tmp_path: Path) -> None:
    with pytest.raises(CastoffError, match="holds no measured tables, which lie at data/SYSTEM"):
        find_tables(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({name: GEMM[name] for name in GEMM if name != "k"}, "has no column k; it has gemm_dtype"),
        (repeated(GEMM, 1, m=["many"]), "m must be whole numbers of at least 1"),
        (repeated(GEMM, 1, m=[0]), "m must be whole numbers of at least 1"),
        (repeated(GEMM, 1, latency=["long"]), "latency must be numbers, in ms"),
        (repeated(GEMM, 2, n=[1, None]), "n lacks a value in 1 rows"),
    ],
    ids=["column", "words", "zero", "latency", "null"],
)
def test_refused(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    write_table(tmp_path, columns, "gemm")
    with pytest.raises(CastoffError, match=message):
        read_rows(find_tables(tmp_path)[0], WORDS, NUMBERS)


def test_no_parquet(tmp_path: Path) -> None:
    path = write_table(tmp_path, GEMM, "gemm")
    for content in (b"", b"PAR1 and no more", path.read_bytes()[:-40]):
        path.write_bytes(content)
        with pytest.raises(CastoffError, match=r"gemm_perf.parquet cannot be read as parquet: \S"):
            read_rows(find_tables(tmp_path)[0], WORDS, NUMBERS)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, GEMM, "gemm")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CastoffError, match=r"need pyarrow: pip install 'castoff\[tables\]'"):
        read_rows(find_tables(tmp_path)[0], WORDS, NUMBERS)


def test_times_of_several_things_are_rows_of_each(tmp_path: Path) -> None:
    write_table(tmp_path, {"m": [1, 2], "there_us": [10.0, 20.0], "back_us": [30.0, 40.0]}, "x")
    (file,) = find_tables(tmp_path)
    rows = read_rows(file, (), ("m",), {"there": TimeColumn("there_us", "µs"), "back": TimeColumn("back_us", "ms")})
    assert rows.latency_s == pytest.approx([1e-5, 2e-5, 3e-2, 4e-2])
    assert rows.columns["m"].tolist() == [1, 2, 1, 2]
    assert rows.columns[TIME_OF].tolist() == ["there", "there", "back", "back"]
