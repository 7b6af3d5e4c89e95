"""Op shapes of a model over a grid of batch and length, as CSV: what a kernel benchmark has to run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from castoff.casting.deployment import Deployment, resolve
from castoff.casting.price import call_key
from castoff.casting.rank import batch_of_rank, record_batch
from castoff.ops.program import Abstract, OpCall
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
    deployment = resolve(model, device, scenario)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch in batches:
        for length in lengths:
            writer.writerows(_rows(deployment, batch, length))
    return text.getvalue()


def _rows(deployment: Deployment, batch: int, length: int) -> Iterator[Row]:
    scenario = deployment.scenario
    workload = replace(scenario.workload, num_queries=batch, context_length=length)
    rank = batch_of_rank(deployment.setup, request_classes(workload, scenario.mtp))
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for _, call in record_batch(deployment, rank).calls():
        counts[(*call_key(call), _outputs(call))] += 1
    for (op, inputs, dtypes, outputs), calls in counts.items():
        yield batch, length, op, calls, inputs, dtypes, outputs


def _outputs(call: OpCall) -> str:
    return ", ".join(_shape(tensor) for tensor in call.outputs)


def _shape(tensor: Abstract) -> str:
    return "[" + ", ".join(f"{dim:.10g}" for dim in tensor.shape) + "]"
