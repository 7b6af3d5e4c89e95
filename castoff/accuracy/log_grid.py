"""Grids of log-factors: what a form leaves, by robust ridge regression on the points that rows lie between.

Axes: N rows, C points of the grid that a row lies between, F features, B grid points and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from castoff.accuracy.recipe import Recipe, Robustness, Slot
from castoff.casting.forms.form import corner_weights
from castoff.dims import Array
from castoff.spec.device import Device

TAIL_WIDTH = 0.06
# Of neighbouring knots, in log units: knots on both sides of a step are close, and the step may be steep.
LEAST_DISTANCE = 0.3
LEAST_SPREAD = 0.03


@dataclass(frozen=True, slots=True)
class Design:
    """What multiplies the log-factors of each row: weights of the grid's points that it lies between, and features.

    size: of the grid.
    """

    size: int
    points_NC: Array
    weights_NC: Array
    features_NF: Array

    def where(self, chosen: Array) -> Design:
        return Design(self.size, self.points_NC[chosen], self.weights_NC[chosen], self.features_NF[chosen])

    def logarithm(self, factors_B: Array) -> Array:
        grid_N = (self.weights_NC * factors_B[self.points_NC]).sum(axis=1)
        logarithm_N: Array = grid_N + self.features_NF @ factors_B[self.size :]
        return logarithm_N

    def normal(self, weight_N: Array) -> Array:
        """Sums over rows of weighted products of what multiplies any two factors: (B, B)."""
        size, features = self.size, self.features_NF.shape[1]
        normal_BB = np.zeros((size + features, size + features))
        pairs = self.points_NC[:, :, None] * size + self.points_NC[:, None, :]
        products = self.weights_NC[:, :, None] * self.weights_NC[:, None, :] * weight_N[:, None, None]
        normal_BB[:size, :size] = np.bincount(pairs.ravel(), products.ravel(), minlength=size**2).reshape(size, size)
        crossed = [self._on_grid(weight_N * column) for column in self.features_NF.T]
        for place, column in enumerate(crossed, start=size):
            normal_BB[:size, place] = normal_BB[place, :size] = column
        normal_BB[size:, size:] = self.features_NF.T @ (self.features_NF * weight_N[:, None])
        return normal_BB

    def against(self, values_N: Array) -> Array:
        """Sums over rows of values times what multiplies each factor: (B,)."""
        return np.concatenate([self._on_grid(values_N), self.features_NF.T @ values_N])

    def _on_grid(self, values_N: Array) -> Array:
        return np.bincount(
            self.points_NC.ravel(), (self.weights_NC * values_N[:, None]).ravel(), minlength=self.size
        ).astype(np.float64)


def design_of(slot: Slot, recipe: Recipe, device: Device) -> Design:
    form = recipe.formula
    rows = len(next(iter(slot.sizes.values())))
    points, weights, size = [], [], 0
    if recipe.knots:
        axes = form.axes(slot.sizes)
        places = [corner_weights(np.log(knots), axes[name]) for name, knots in recipe.knots.items()]
        shape = tuple(len(knots) for knots in recipe.knots.values())
        size = int(np.prod(shape))
        for corners in product((0, 1), repeat=len(places)):
            weight_N = np.ones(rows)
            at: list[Array] = []
            for (low, share), corner in zip(places, corners, strict=True):
                weight_N = weight_N * (share if corner else 1 - share)
                at.append(np.broadcast_to(low + corner, rows))
            points.append(np.ravel_multi_index(at, shape))
            weights.append(weight_N)
    features = form.features(slot.sizes, device).values() if recipe.features else ()
    return Design(
        size,
        np.stack(points, axis=1) if points else np.zeros((rows, 0), dtype=np.int64),
        np.stack(weights, axis=1) if weights else np.zeros((rows, 0)),
        np.stack([np.broadcast_to(values, rows) for values in features], axis=1) if features else np.zeros((rows, 0)),
    )


def mixed(designs: Sequence[Design], shares: Sequence[Array]) -> Design:
    """The design of rows that have a curve more than once, by each one's share of their time."""
    weighted = [(design, share_N[:, None]) for design, share_N in zip(designs, shares, strict=True)]
    return Design(
        designs[0].size,
        np.concatenate([design.points_NC for design in designs], axis=1),
        np.concatenate([design.weights_NC * share_N1 for design, share_N1 in weighted], axis=1),
        sum((design.features_NF * share_N1 for design, share_N1 in weighted), np.zeros_like(designs[0].features_NF)),
    )


def stacked(designs: Sequence[Design]) -> Design:
    """Rows of several groups; those of groups with fewer points are filled up with points that count nothing."""
    most = max(design.points_NC.shape[1] for design in designs)

    def filled(values_NC: Array) -> Array:
        return np.pad(values_NC, ((0, 0), (0, most - values_NC.shape[1])))

    return Design(
        designs[0].size,
        np.concatenate([filled(design.points_NC) for design in designs]),
        np.concatenate([filled(design.weights_NC) for design in designs]),
        np.concatenate([design.features_NF for design in designs]),
    )


def ridge(design: Design, target_N: Array, weight_N: Array, recipe: Recipe, how: Robustness) -> Array:
    mean_B = design.against(np.ones(len(target_N))) / len(target_N)
    variance_B = np.diag(design.normal(np.ones(len(target_N)))) / len(target_N) - mean_B**2
    # A point of the grid that hardly any row is near learns little.
    penalty_BB = how.ridge * np.diag(np.maximum(variance_B, LEAST_SPREAD**2))
    if how.smooth:
        penalty_BB[: design.size, : design.size] += how.smooth * _roughness(recipe)
    robust_N = weight_N
    factors_B: Array = np.zeros(len(penalty_BB))
    for _ in range(8):
        normal_BB = design.normal(robust_N) + penalty_BB * robust_N.sum()
        factors_B = np.linalg.solve(normal_BB, design.against(robust_N * target_N))
        error_N = abs(target_N - design.logarithm(factors_B))
        robust_N = how.correction_huber / np.maximum(error_N, how.correction_huber)
        if how.tail:
            robust_N = robust_N + how.tail * np.exp(-0.5 * ((error_N - how.tail_edge) / TAIL_WIDTH) ** 2)
        robust_N = weight_N * robust_N
    return factors_B


def _roughness(recipe: Recipe) -> Array:
    """A quadratic form of a grid: squares of the differences of neighbours over their distances, which count as at
    least `LEAST_DISTANCE`."""
    shape = tuple(len(knots) for knots in recipe.knots.values())
    points = np.arange(np.prod(shape)).reshape(shape)
    rough_BB = np.zeros((points.size, points.size))
    for axis, knots in enumerate(recipe.knots.values()):
        rows = np.moveaxis(points, axis, 0)
        for low, distance in enumerate(np.maximum(np.diff(np.log(knots)), LEAST_DISTANCE)):
            a, b = rows[low].ravel(), rows[low + 1].ravel()
            rough_BB[a, a] += 1 / distance
            rough_BB[b, b] += 1 / distance
            rough_BB[a, b] -= 1 / distance
            rough_BB[b, a] -= 1 / distance
    return rough_BB
