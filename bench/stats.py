"""What interleaved slices show: a ratio, its confidence interval, and the noise of the measurement for two equal things.

The values of a cell are ratios, one per round. Their middle is the *midmean* of the logarithms: the mean of what is left when
the lowest and the highest quarter are dropped. It tolerates disturbed slices as a median does, and does not jump if slices
fall into two groups. The interval is the bootstrap's: 95 % of the midmeans of resampled rounds. A ratio of equals, measured
in the same rounds, has its own interval: that is the noise.
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
