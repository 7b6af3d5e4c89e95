"""The Python API: `cast` one scenario, `sweep` many, `serve` requests with an instance."""

from __future__ import annotations

from castoff.casting import prediction
from castoff.casting import sweep as sweeping
from castoff.casting.prediction import Prediction
from castoff.casting.price import Measured
from castoff.casting.sweep import SweepResult
from castoff.serving import serve as serving
from castoff.serving.result import ServeResult
from castoff.serving.workload import Load
from castoff.spec.device import Device, load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.scenario import Parallel, Scenario


def cast(
    model: str | ModelSpec, device: str | Device, scenario: Scenario | None = None, *, measured: Measured | None = None
) -> Prediction:
    """Predict one step of a model on a device.

    model: a known model id, a directory or config.json, or a ModelSpec. device: a known device, a TOML file, or a
    Device. measured: op times that replace the backend's curves where op name and input shapes match.
    Raises CastoffError where the scenario cannot run at all; one that only does not fit has `fits` False.
    """
    model = load_model(model) if isinstance(model, str) else model
    device = load_device(device) if isinstance(device, str) else device
    return prediction.cast(model, device, scenario or Scenario(), measured=measured)


def sweep(
    model: str | ModelSpec, device: str | Device, scenario: Scenario | None = None, **axes: object
) -> SweepResult:
    """Predict many steps at once: numpy arrays on the continuous axes, lists on the structural ones.

        sweep("zai-org/GLM-5.2", "h200_sxm", tp_size=[1, 8], ep_size=[1, 8], num_devices=8,
              num_queries=np.arange(1, 129)[:, None], context_length=np.array([4096, 65536]))

    axes: any field of `Workload`, `Parallel`, `Quant`, `Mtp`, `Compilation`, `Offload` or `Hits`, and those of
    `Scenario` itself; what is not named comes from `scenario`. Lists are crossed; arrays (num_queries, query_length,
    context_length, pool_tokens, hit_rate) broadcast.
    Returns one row per structure, with the reason where it is invalid.
    Raises CastoffError for an unknown axis, a bad length, or an array on a structural axis.
    """
    model = load_model(model) if isinstance(model, str) else model
    device = load_device(device) if isinstance(device, str) else device
    return sweeping.sweep(model, device, scenario or Scenario(), axes)


def serve(
    model: str | ModelSpec, device: str | Device, scenario: Scenario | None = None, *, workload: Load
) -> ServeResult:
    """Predict time to first token and time per output token of one instance under load.

        serve("zai-org/GLM-5-FP8", "h200_sxm", Scenario(parallel=Parallel(num_devices=8, tp_size=8), backend="sglang"),
              workload=ClosedLoop(concurrency=32, prompt_tokens=1024, output_tokens=1024))

    scenario: the deployment; its own `workload` does not count. None: one device with the formats that `sglang` takes
    by default. workload: a `ClosedLoop`, or `Arrivals` at given times.
    Raises CastoffError for a backend without [serving], a deployment that cannot run, and where weights leave no room
    for caches or a request is longer than all of it.
    """
    model = load_model(model) if isinstance(model, str) else model
    device = load_device(device) if isinstance(device, str) else device
    scenario = scenario or serving.as_served(serving.DEFAULT_BACKEND, device, model, Parallel())
    return serving.serve(model, device, scenario, workload)
