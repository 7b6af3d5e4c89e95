"""The trace that Perfetto opens: rows, times, names."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from castoff.api import cast
from castoff.casting.prediction import Prediction
from castoff.report.chrome_trace import chrome_trace
from castoff.report.plain import json_text
from castoff.spec.scenario import Compilation, Mtp, Parallel, Scenario, Workload
from tests.cli.commands import CAST, DEVICE, MODEL, TP16, exit_status

Event = dict[str, Any]
SCENARIOS = {
    "decode": Scenario(parallel=Parallel(num_devices=16, tp_size=16, ep_size=16)),
    "streams": Scenario(
        workload=Workload(num_queries=1, query_length=4096, context_length=61000),
        parallel=Parallel(num_devices=16, tp_size=16, ep_size=16),
        mtp=Mtp(num_mtp_tokens=3),
        compilation=Compilation(compile=True),
    ),
    "pipeline": Scenario(
        workload=Workload(num_queries=8, context_length=4096),
        parallel=Parallel(num_devices=16, tp_size=4, pp_size=4, ep_size=4),
    ),
}


@pytest.fixture(params=SCENARIOS, scope="module")
def prediction(request: pytest.FixtureRequest) -> Prediction:
    return cast(MODEL, DEVICE, SCENARIOS[request.param])


def parsed(prediction: Prediction) -> list[Event]:
    events: list[Event] = json.loads(json_text(chrome_trace(prediction), indent=None))["traceEvents"]
    return events


def complete(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def row_names(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_events_are_well_formed_and_in_named_rows(prediction: Prediction) -> None:
    events = parsed(prediction)
    names = row_names(events)
    stages = {event["pid"] for event in events}
    assert {event["pid"] for event in events if event["name"] == "process_name"} == stages
    assert all(
        event["args"]["name"].startswith(DEVICE)
        for event in events
        if event["ph"] == "M" and "process" in event["name"]
    )
    for event in complete(events):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in names


def test_events_of_a_row_do_not_overlap(prediction: Prediction) -> None:
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in complete(parsed(prediction)):
        rows[event["pid"], event["tid"]].append(event)
    for events in rows.values():
        for one, next_one in pairwise(sorted(events, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 1e-9


def test_durations_add_up_to_the_busy_time_of_each_stream(prediction: Prediction) -> None:
    events = parsed(prediction)
    names = row_names(events)
    busy: dict[str, float] = defaultdict(float)
    count = 0
    for event in complete(events):
        busy[names[event["pid"], event["tid"]]] += event["dur"]
        count += 1
    for stream, seconds in prediction.cast.timeline.busy_s.items():
        # Both ends of an event are rounded to ns.
        assert busy[stream] == pytest.approx(float(seconds) * 1e6, abs=count * 1e-3)
    assert busy["host"] == pytest.approx(prediction.cast.host_s * 1e6)
    assert max(event["ts"] + event["dur"] for event in complete(events)) == pytest.approx(
        (prediction.cast.host_s + float(prediction.cast.timeline.end_s)) * 1e6, abs=2e-3
    )


def test_every_op_has_its_layer_and_cost(prediction: Prediction) -> None:
    events = parsed(prediction)
    ops = [event for event in complete(events) if "shapes" in event["args"]]
    assert [event["name"] for event in ops] == [call.op.name for _, call in prediction.cast.program.calls()]
    for event in ops:
        arguments = event["args"]
        terms = [arguments[f"{bound}_us"] for bound in ("compute", "vector", "memory", "communication", "launch")]
        assert event["dur"] == pytest.approx(terms[-1] + max(terms[:-1]), abs=3e-3)
        assert set(arguments) >= {"layer", "shapes", "bound", "flops", "bytes", "origin"}
    assert "layer 17" in {event["args"]["layer"] for event in ops}


def test_layers_have_a_row(prediction: Prediction) -> None:
    events = parsed(prediction)
    names = row_names(events)
    layers = [event for event in complete(events) if names[event["pid"], event["tid"]] == "layers"]
    assert [event["name"] for event in layers] == [entry.label for entry in prediction.cast.program.schedule]
    attention = next(
        event for event in complete(events) if event["name"] == "dsa_indexer" and event["args"]["layer"] == "layer 2"
    )
    layer = next(event for event in layers if event["name"] == "layer 2")
    assert layer["ts"] <= attention["ts"] < layer["ts"] + layer["dur"]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "trace.json"
    assert exit_status(*CAST, *TP16, "--chrome-trace", str(target)) == 0
    assert "traceEvents" in json.loads(target.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
