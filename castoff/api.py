"""The Python API: `cast` one scenario, `sweep` many."""

from __future__ import annotations

from castoff.casting import prediction
from castoff.casting.price import Measured
from castoff.casting.prediction import Prediction
from castoff.spec.device import Device, load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.scenario import Scenario


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
