"""Stop rules: when an experiment has enough repetitions.

This is the little statistics that the runner needs; it works without SciPy. Everything that is
reported comes from `tombolo_lab.statistics`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

LEVEL = 0.95


def t_within(t: float, freedom: int) -> float:
    """P(-t < T < t) of Student's t with `freedom` degrees of freedom.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4; exact sums for
    whole degrees of freedom.
    """
    theta = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(theta)
    if freedom % 2:
        term = cosine
        terms = []
        for k in range(1, freedom - 1, 2):
            terms.append(term)
            term *= cosine * cosine * (k + 1) / (k + 2)
        return 2 / math.pi * (theta + math.sin(theta) * math.fsum(terms))
    term = 1.0
    terms = []
    for k in range(1, freedom, 2):
        terms.append(term)
        term *= cosine * cosine * k / (k + 1)
    return math.sin(theta) * math.fsum(terms)


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t for which a share `level` of the distribution lies between -t and t.

    `freedom` from 1, `level` between 0 and 1. By bisection, to about 12 digits.
    """
    if freedom < 1 or not 0 < level < 1:
        raise ValueError(f"no t quantile for {freedom} degrees of freedom and level {level}")
    low, high = 0.0, 1.0
    while t_within(high, freedom) < level:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_within(middle, freedom) < level:
            low = middle
        else:
            high = middle
    return high


def relative_half_width(values: Sequence[float], level: float = LEVEL) -> float:
    """Half the width of the t interval of the mean, as a part of the mean's size.

    Infinite for fewer than two values, and for a mean of zero unless all values are equal.
    """
    if len(values) < 2:
        return math.inf
    deviation = statistics.stdev(values)
    if deviation == 0:
        return 0.0
    half = t_quantile(len(values) - 1, level) * deviation / math.sqrt(len(values))
    mean = abs(statistics.fmean(values))
    return half / mean if mean else math.inf


def all_narrow(cells: Iterable[Sequence[float]], until: float) -> bool:
    """Whether the interval of every cell is at most `until` of its mean on each side.

    Cells without any value do not count: their measure does not apply, or they failed.
    """
    return all(relative_half_width(values) <= until for values in cells if values)
