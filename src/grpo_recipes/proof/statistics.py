"""Prediction intervals for one more run, given a few. Pure functions of floats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

# Quantile 0.995 of Student's t for 1 … 30 degrees of freedom (two-sided 99 %).
# NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.2.
T_995 = (
    63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169,
    3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845,
    2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750,
)  # fmt: skip
Z_995 = 2.576  # the limit of many degrees of freedom


def t_995(degrees: int) -> float:
    """Above 30 degrees the value for 30, which is a little too wide."""
    return T_995[min(degrees, len(T_995)) - 1]


def prediction_half_width(values: Sequence[float]) -> float:
    """Half of the 99 % prediction interval around the mean: t(0.995, n-1) · s · sqrt(1 + 1/n).

    One more draw from the same normal distribution lies inside with probability 0.99 (Hahn and Meeker, Statistical
    Intervals, section 4.7). Needs two values or more.
    """
    n = len(values)
    return t_995(n - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / n)


def binomial_variance(rate: float, trials: int) -> float:
    """Of a success rate. The rate is first drawn towards 1/2 by two successes and two failures (Agresti and Coull,
    1998), so that a rate of 0 or 1 does not claim to be exact."""
    centre = (rate * trials + 2) / (trials + 4)
    return centre * (1 - centre) / trials


def area_weights(steps: Sequence[int]) -> list[float]:
    """What each point weighs in the mean height of a curve by the trapezoid rule; they sum to 1."""
    span = steps[-1] - steps[0]
    gaps = [0, *(b - a for a, b in pairwise(steps)), 0]
    return [(left + right) / 2 / span for left, right in pairwise(gaps)]


def time_to(level: float, steps: Sequence[int], values: Sequence[float]) -> float:
    """Step at which the curve first reaches the level, between points by a straight line; inf if it never does."""
    if values[0] >= level:
        return float(steps[0])
    for (x0, y0), (x1, y1) in pairwise(zip(steps, values, strict=True)):
        if y1 >= level:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return math.inf
