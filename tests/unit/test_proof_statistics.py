import math
import random
import statistics

import pytest

from grpo_recipes.proof.statistics import (
    T_995,
    area_weights,
    binomial_variance,
    prediction_half_width,
    t_995,
    time_to,
)


def t_tail(t: float, degrees: int) -> float:
    """P(T > t), by integrating the density over x = sqrt(v) tan(angle) with Simpson's rule."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high, n = math.atan(t / math.sqrt(degrees)), math.pi / 2, 2000
    h = (high - low) / n
    ordinates = [math.cos(low + i * h) ** (degrees - 1) for i in range(n + 1)]
    return scale * h / 3 * (ordinates[0] + ordinates[-1] + 4 * sum(ordinates[1:-1:2]) + 2 * sum(ordinates[2:-1:2]))


@pytest.mark.parametrize("degrees", range(1, 31))
def test_table_holds_the_quantile(degrees):
    assert t_tail(T_995[degrees - 1], degrees) == pytest.approx(0.005, rel=3e-3)  # the table has three decimals


def test_many_degrees_are_not_narrower_than_the_normal_limit():
    assert t_995(4) == 4.604
    assert t_995(1000) == 2.750


def test_prediction_interval_of_five_values_by_hand():
    # s = sqrt(10 / 4) = 1.5811, sqrt(1 + 1/5) = 1.09545
    assert prediction_half_width([1, 2, 3, 4, 5]) == pytest.approx(4.604 * 1.5811388 * 1.0954451)


def test_prediction_interval_covers_99_of_100_normal_draws():
    rng = random.Random(0)
    trials, missed = 8000, 0
    for _ in range(trials):
        seen = [rng.gauss(5, 2) for _ in range(5)]
        missed += abs(rng.gauss(5, 2) - statistics.fmean(seen)) > prediction_half_width(seen)
    assert missed / trials == pytest.approx(0.01, abs=0.004)  # 3.6 standard errors


def test_a_perfect_score_is_not_exact():
    assert binomial_variance(1.0, 96) == pytest.approx(0.98 * 0.02 / 96)
    assert binomial_variance(0.5, 100) == pytest.approx(0.0025)


def test_area_weights_are_the_trapezoid_rule_on_uneven_steps():
    steps, values = [0, 10, 40], [0.0, 1.0, 1.0]
    weights = area_weights(steps)
    assert sum(weights) == pytest.approx(1)
    assert sum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx((5 + 30) / 40)


def test_time_to_a_level():
    assert time_to(0.75, [0, 10, 20], [0.25, 0.5, 1.0]) == 15
    assert time_to(0.5, [0, 10, 20], [0.25, 0.5, 1.0]) == 10
    assert time_to(0.2, [5, 10], [0.25, 0.5]) == 5
    assert time_to(0.9, [0, 10], [0.25, 0.5]) == math.inf
    assert time_to(0.9, [0, 10], [0.25, math.nan]) == math.inf
