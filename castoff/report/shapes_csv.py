"""Op shapes of a model over a grid of batch and length, as CSV: what a kernel benchmark has to run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from castoff.casting.hits import Pool
from castoff.casting.prediction import pool_of_step
from castoff.casting.price import call_key
from castoff.casting.rank import batch_of_rank, offload_of
from castoff.model.record import record_step
from castoff.model.setup import Setup, resolve_setup
from castoff.ops.program import Abstract, OpCall
from castoff.spec.backend import load_backend
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario, request_classes

COLUMNS = ("batch", "length", "name", "calls", "shapes", "dtypes", "output_shapes")
Row = tuple[int, int, str, int, str, str, str]


def shapes_csv(
    model: ModelSpec, device: Device, scenario: Scenario, batches: Sequence[int], lengths: Sequence[int]
) -> str:
    """One line per batch, length, op and shapes. batches: requests of the deployment; lengths: tokens in the cache.

    The shapes are those of the heaviest rank. Raises CastoffError where the structure cannot run.
    """
    backend = load_backend(device.default_backend if scenario.backend is None else scenario.backend)
    setup = resolve_setup(model, device, backend, scenario, scenario.workload.mode)
    pool, _ = pool_of_step(setup, scenario)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch in batches:
        for length in lengths:
            writer.writerows(_rows(setup, scenario, pool, batch, length))
    return text.getvalue()


def _rows(setup: Setup, scenario: Scenario, pool: Pool | None, batch: int, length: int) -> Iterator[Row]:
    workload = replace(scenario.workload, num_queries=batch, context_length=length)
    rank = batch_of_rank(setup, request_classes(workload, scenario.mtp))
    counts: Counter[tuple[str, str, str, str]] = Counter()
    offload = offload_of(setup, scenario.offload, rank.micro, pool)
    for _, call in record_step(setup, rank.micro, rank.busy_ranks, offload=offload).calls():
        counts[(*call_key(call), _outputs(call))] += 1
    for (op, inputs, dtypes, outputs), calls in counts.items():
        yield batch, length, op, calls, inputs, dtypes, outputs


def _outputs(call: OpCall) -> str:
    return ", ".join(_shape(tensor) for tensor in call.outputs)


def _shape(tensor: Abstract) -> str:
    return "[" + ", ".join(f"{dim:.10g}" for dim in tensor.shape) + "]"
