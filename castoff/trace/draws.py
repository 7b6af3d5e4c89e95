"""Random numbers that are the same on every machine, with every numpy.

Bits come from PCG64, whose stream numpy promises to keep, and become numbers by operations that IEEE 754 rounds alike
everywhere. numpy's own distributions may change, and the logarithms of two libraries differ in the last bit.

Axes: X numbers.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Of the sum of four numbers below 2^16, each as likely as the others.
SUM_MEAN = 4 * (2**16 - 1) / 2
SUM_DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)
LOG_2 = 0.6931471805599453
# Of a series in steps of 1/9 at least, as many as a double can tell from fewer.
LOG_TERMS = 17


def bits_of(*numbers: int) -> np.random.PCG64:
    """A stream of its own for every tuple of numbers of one length, none negative."""
    return np.random.PCG64(np.random.SeedSequence(numbers))


def uniform(bits: np.random.PCG64, count: int) -> Doubles:
    """Numbers (X) above 0 and below 1, each as likely as the others."""
    # Two to the 52: with half a step more, none is rounded to 1.
    steps_X = (bits.random_raw(count) >> np.uint64(12)).astype(np.float64)
    found_X: Doubles = (steps_X + 0.5) * 2.0**-52
    return found_X


def exponential(bits: np.random.PCG64, count: int) -> Doubles:
    """Numbers (X) that are exponentially distributed, with mean 1."""
    return -_log(uniform(bits, count))


def normal(bits: np.random.PCG64, count: int) -> Floats:
    """Numbers (X) of mean 0 and deviation 1, nearly normal: sums of four, none beyond 3.5."""
    words_X4 = bits.random_raw(count).view(np.uint16)
    sum_X = words_X4[0::4].astype(np.float32)
    for word in range(1, 4):
        sum_X += words_X4[word::4]
    sum_X -= np.float32(SUM_MEAN)
    sum_X *= np.float32(1 / SUM_DEVIATION)
    return sum_X


def _log(values_X: Doubles) -> Doubles:
    """Natural logarithms, by log m = 2 artanh((m − 1) / (m + 1)) of the mantissa m, from 0.5 on and below 1."""
    mantissa_X, exponent_X = np.frexp(values_X)
    argument_X = (mantissa_X - 1) / (mantissa_X + 1)
    square_X = argument_X * argument_X
    series_X = np.zeros_like(values_X)
    for term in reversed(range(LOG_TERMS)):
        series_X = series_X * square_X + 1 / (2 * term + 1)
    found_X: Doubles = exponent_X * LOG_2 + 2 * argument_X * series_X
    return found_X
