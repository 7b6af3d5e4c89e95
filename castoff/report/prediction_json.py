"""A prediction as a JSON object. Its keys are a contract: scripts read them."""

from __future__ import annotations

from typing import Any

from castoff import __version__
from castoff.casting.footprint import Footprint
from castoff.casting.summary import OpSummary, kind_summaries
from castoff.report.plain import number, plain
from castoff.report.step import StepReport
from castoff.report.words import verdict

_FOOTPRINT_KEYS = (
    "device_bytes_capacity",
    "host_bytes_capacity",
    "weights_bytes",
    "kv_bytes",
    "indexer_cache_bytes",
    "pool_bytes",
    "selection_bytes",
    "staging_bytes",
    "metadata_bytes",
    "activation_bytes",
    "communication_bytes",
    "reserved_bytes",
    "free_bytes",
    "host_kv_bytes",
)


def prediction_json(report: StepReport) -> dict[str, Any]:
    """The object that `castoff cast --json` writes: seconds, bytes per device, operations."""
    prediction = report.prediction
    cast = prediction.cast
    return {
        "castoff_version": __version__,
        "model": prediction.model.name,
        "device": prediction.device.name,
        "backend": prediction.backend.name,
        "scenario": plain(prediction.scenario),
        "mode": prediction.mode,
        "micro_batches": number(cast.batch.in_flight),
        "latency_s": prediction.latency_s,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "origin": cast.origin,
        "throughput_origin": cast.throughput_origin,
        "bound": prediction.bound,
        "bound_s": plain(report.bound_s),
        "fits": prediction.fits,
        "max_batch_per_device": prediction.largest.max_batch_per_device,
        "max_context_length": prediction.largest.max_context_length,
        "stall_s": prediction.stall_s,
        "offload": plain(prediction.offload),
        "footprint": footprint_json(prediction.footprint),
        "streams": report.stream_s,
        "ops": [_op(summary) for summary in report.ops],
        "layer_kinds": plain(kind_summaries(prediction)),
        "measured": plain(report.coverage),
        "notes": list(report.notes),
        "verdict": verdict(report),
    }


def footprint_json(footprint: Footprint) -> dict[str, float]:
    """Bytes per device by what they are for."""
    return {key: number(getattr(footprint, key)) for key in _FOOTPRINT_KEYS}


def _op(summary: OpSummary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "calls": summary.calls,
        "total_s": summary.total_s,
        "mean_s": summary.mean_s,
        "bound": summary.bound,
        "origin": summary.origin,
        "extrapolated": summary.extrapolated,
        "flops": number(summary.flops),
        "bytes": number(summary.bytes),
        "terms_s": plain(summary.terms_s),
        "shapes": [{"inputs": shapes, "calls": calls} for shapes, calls in summary.shapes.items()],
        "buckets": [
            {
                "name": bucket.name,
                "flops": number(bucket.flops),
                "bytes": number(bucket.bytes),
                "seconds": bucket.seconds,
            }
            for bucket in summary.buckets.values()
        ],
    }
