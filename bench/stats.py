"""What interleaved slices say: a ratio, how sure it is, and what the measuring itself would give for two things that are the same.

A cell's values are ratios, one of each round. Their middle is the *midmean* of the logarithms: the mean of the half that is left when the lowest and the
highest quarter are put aside. It bears disturbed slices as a median does, and does not jump where slices fall into two groups. The interval is the
bootstrap's: 95 % of the midmeans of resampled rounds. A ratio of equals, measured in the same rounds, has an interval of its own: that is the noise.
"""

import math
import random

RESAMPLES = 1000
INSIDE = 0.95
# The same data give the same interval.
SEED = 20261122


def midmean(values):
    """The mean of the middle half."""
    values = sorted(values)
    # A quarter of each end, in parts of a value where it does not come out even.
    aside = len(values) / 4
    whole, part = int(aside), aside - int(aside)
    middle = values[whole:len(values) - whole]
    if len(middle) < 2:
        return sum(values) / len(values)
    weight = len(middle) - 2 * part
    return (sum(middle) - part * (middle[0] + middle[-1])) / weight


def spread(ratios):
    """The middle of some ratios, and its interval."""
    logs = [math.log(value) for value in ratios]
    source = random.Random(SEED)
    means = sorted(midmean(source.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    aside = int(RESAMPLES * (1 - INSIDE) / 2)
    return {"ratio": round(math.exp(midmean(logs)), 3), "low": round(math.exp(means[aside]), 3), "high": round(math.exp(means[-1 - aside]), 3)}


def verdict(ours, equals):
    """Of a ratio's interval and that of equals: `faster` or `slower` where they lie apart from each other and ours from 1, else `equal`."""
    if ours["low"] > max(1, equals["high"]):
        return "faster"
    if ours["high"] < min(1, equals["low"]):
        return "slower"
    return "equal"
