"""Files are written whole or not at all; numbers and values as people and JSON read them."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from castoff.errors import CastoffError
from castoff.report import units
from castoff.report.output import check_outputs, write_file
from castoff.report.plain import json_text, number, plain
from castoff.spec.scenario import Scenario, Workload


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")
    target.chmod(0o640)
    write_file(target, "new")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CastoffError, match="No space left"):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")

    def interrupt(*_: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_file(tmp_path / "x.json", "new")
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null")
def test_a_device_is_written_to_not_replaced() -> None:
    null = Path("/dev/null")
    check_outputs({"--json": null, "--chrome-trace-file": null})
    write_file(null, "text")
    assert stat.S_ISCHR(null.stat().st_mode)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_outputs({"--json": pipe})
    write_file(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    check_outputs({"--json": None, "--chrome-trace-file": tmp_path / "x"})
    for path in (tmp_path, tmp_path / "no" / "x", Path("a" * 5000), Path("a\0b")):
        with pytest.raises(CastoffError, match="--json"):
            check_outputs({"--json": path})
    with pytest.raises(CastoffError, match="the same file"):
        check_outputs({"--json": tmp_path / "x", "--chrome-trace-file": tmp_path / ".." / tmp_path.name / "x"})


def test_json_is_strict() -> None:
    assert json.loads(json_text({"a": (1, 2.5), "b": frozenset("yx"), "c": np.float64(2), "d": np.arange(2)})) == {
        "a": [1, 2.5],
        "b": ["x", "y"],
        "c": 2.0,
        "d": [0, 1],
    }
    assert plain(Scenario(workload=Workload(context_length=(1, 2))))["workload"]["context_length"] == [1, 2]
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text(float("nan"))
    with pytest.raises(TypeError):
        plain(object())
    assert (number(2.0), number(2.5), number(np.float64(3))) == (2, 2.5, 3)
    assert isinstance(number(2.0), int)


def test_units() -> None:
    assert units.gib(3 * 2**29) == "1.50"
    assert units.gib_text(2**40) == "1,024.00 GiB"
    assert units.milliseconds(0.0123456) == "12.346"
    assert units.microseconds(1.25e-5) == "12.5"
    assert units.bandwidth(1.6e12) == "1,600.0 GB/s"
    assert units.flops_rate(353.9e12) == "353.9 TFLOP/s"
    assert (units.rate(4644.99), units.rate(29.031)) == ("4,645", "29.03")
    assert (units.count(61000), units.percent(0.5)) == ("61,000", "50.0%")


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / f".castoff-{os.getpid()}.tmp"
    foreign.write_text("theirs")
    write_file(tmp_path / "mine.json", "{}")
    assert foreign.read_text() == "theirs"
    assert (tmp_path / "mine.json").read_text() == "{}"


def test_writers_side_by_side(tmp_path: Path) -> None:
    targets = [tmp_path / f"{index}.json" for index in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: [write_file(path, path.name) for _ in range(20)], targets))
    assert [path.read_text() for path in targets] == [path.name for path in targets]
    assert sorted(tmp_path.iterdir()) == targets
