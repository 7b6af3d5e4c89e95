"""How good a fit is: rows of sites that it left out, fold by fold; and the fit as a backend file holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from castoff.accuracy.fit import Model, fit, predict
from castoff.accuracy.recipe import Recipe, Robustness, Samples
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.spec.device import Device
from castoff.spec.fits import Fit

MOST_FOLDS = 5
# Beyond this a fit says no more than an assumption.
MOST_ERROR = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Errors of rows whose sites were left out of the fit that predicts them. predicted_s: per group."""

    predicted_s: Sequence[Array]
    median_abs_error: float
    p90_abs_error: float


def validate(groups: Sequence[Samples], recipes: Mapping[str, Recipe], device: Device, how: Robustness) -> Validated:
    """Leave out the sites of each fold in turn. Raises CastoffError for rows of one site alone."""
    sites = np.unique(np.concatenate([group.sites for group in groups]))
    folds = min(MOST_FOLDS, len(sites))
    if folds < 2:
        raise CastoffError(
            f"{', '.join(recipes)}: all {sum(map(len, groups))} rows are of one site, and a fit needs others to be "
            "checked on; give a table with more sizes"
        )
    order = np.random.default_rng(0).permutation(len(sites))
    fold_of_site = dict(zip(sites[order].tolist(), (np.arange(len(sites)) % folds).tolist(), strict=True))
    fold_N = [np.array([fold_of_site[site] for site in group.sites.tolist()]) for group in groups]
    predicted = [np.full(len(group), np.nan) for group in groups]
    for fold in range(folds):
        kept = [group.where(own != fold) for group, own in zip(groups, fold_N, strict=True)]
        model = fit([group for group in kept if len(group)], recipes, device, how)
        for group, own, out in zip(groups, fold_N, predicted, strict=True):
            left = own == fold
            if left.any():
                (out[left],) = predict([group.where(left)], model, recipes, device)
    measured = np.concatenate([group.measured_s for group in groups])
    error = abs(np.concatenate(predicted) / measured - 1)
    return Validated(
        predicted_s=predicted,
        median_abs_error=float(np.median(error)),
        p90_abs_error=float(np.quantile(error, 0.9)),
    )


def as_fit(curve: str, groups: Sequence[Samples], model: Model, recipe: Recipe, checked: Validated, source: str) -> Fit:
    """One curve as a backend file holds it; errors are of whole rows, which other curves may be part of."""
    slots = [slot for group in groups for slot in group.slots if slot.curve == curve]
    ranges = {
        name: (
            float(min(np.min(slot.sizes[name]) for slot in slots)),
            float(max(np.max(slot.sizes[name]) for slot in slots)),
        )
        for name in recipe.formula.sizes
    }
    return Fit(
        form=recipe.form,
        coefficients=model[curve].coefficients,
        features=model[curve].features,
        correction=model[curve].correction,
        ranges=ranges,
        rows=sum(len(group) for group in groups if any(slot.curve == curve for slot in group.slots)),
        median_abs_error=checked.median_abs_error,
        p90_abs_error=checked.p90_abs_error,
        origin="assumed" if recipe.is_held or checked.median_abs_error > MOST_ERROR else "calibrated",
        source=source,
    )
