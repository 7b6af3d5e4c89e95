"""The structure in which models run here: the backend `castoff`, and the formats that a checkpoint is stored in."""

from __future__ import annotations

from castoff.model.setup import Setup, resolve_setup
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import ModelSpec
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Scenario

# The structure is checked against a device that multiplies in every format that runs; no figure of it is used.
_CHECKED_AGAINST = "h200_sxm"


def run_setup(spec: ModelSpec, scenario: Scenario) -> Setup:
    """The structure of a run. Raises CastoffError where it cannot be."""
    return resolve_setup(spec, load_device(_CHECKED_AGAINST), load_backend("castoff"), scenario, "decode")


def default_action(spec: ModelSpec) -> LinearAction:
    """The format in which a checkpoint's linear layers run: the one in which they are stored."""
    return spec.checkpoint_quant.action if spec.checkpoint_quant is not None else "DISABLED"
