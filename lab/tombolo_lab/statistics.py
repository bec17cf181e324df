"""Statistics of repeated measurements: location, spread, intervals, ratios, correlation, growth.

Values are plain sequences of finite floats. What cannot be computed (one value has no interval) is
None in the result, with the reason in `why`; nothing here raises for too few or for equal values,
and nothing prints a warning. ValueError is raised for arguments that are wrong whatever the data,
such as a level of 2.

Sources: R. Jain, "The Art of Computer Systems Performance Analysis", Wiley 1991; NIST/SEMATECH
e-Handbook of Statistical Methods; B. Efron and R. Tibshirani, "An Introduction to the Bootstrap",
1993; S. Holm, Scandinavian Journal of Statistics 6 (1979) 65; Y. Benjamini and Y. Hochberg, Journal
of the Royal Statistical Society B 57 (1995) 289.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy
from scipy import stats

LEVEL = 0.95
# A spread above this part of the mean is reported as a warning.
CV_LIMIT = 0.1
RESAMPLES = 2000
# With fewer values on a side, two constant samples that differ are not told apart.
LEAST_CONSTANT = 3
PERCENTILES = (50.0, 90.0, 99.0, 99.9, 99.99)


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. `low` and `high` are None where `why` says why."""

    estimate: float | None
    low: float | None
    high: float | None
    level: float = LEVEL
    why: str = ""

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval, in the unit of the values."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def clipped(self, least: float | None, most: float | None) -> Interval:
        """The part of the interval between two limits, such as 0 and 1 for a share."""
        if self.low is None or self.high is None:
            return self
        low = self.low if least is None else max(self.low, least)
        high = self.high if most is None else min(self.high, most)
        return dataclasses.replace(self, low=low, high=high)

    def contains(self, value: float) -> bool:
        """Whether the interval is known and `value` lies in it."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


@dataclass(frozen=True)
class Correlation:
    """A correlation coefficient of `n` pairs, its two-sided p value and interval."""

    coefficient: float | None
    p: float | None
    low: float | None
    high: float | None
    n: int
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """A test of two samples: the p value of "both have the same location"."""

    test: str
    statistic: float | None
    p: float | None
    why: str = ""


@dataclass(frozen=True)
class Growth:
    """A power law y = factor * x^exponent that was fitted to n points; r2 is of the logarithms."""

    exponent: float | None
    low: float | None
    high: float | None
    factor: float | None
    r2: float | None
    n: int
    why: str = ""


def clean(values: Iterable[float | None]) -> list[float]:
    """The values that are there: neither None, NaN nor infinite."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def _level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, found {level}")


# ---- one sample ----------------------------------------------------------------------------------
def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None for no values. Exact for equal values."""
    return math.fsum(values) / len(values) if values else None


def median(values: Sequence[float]) -> float | None:
    """The median: the middle value, or the mean of the two middle ones; None for no values."""
    return float(numpy.median(values)) if len(values) else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample, with n - 1 in its denominator; None below two values."""
    if len(values) < 2:
        return None
    return 0.0 if min(values) == max(values) else float(numpy.std(values, ddof=1))


def variation(values: Sequence[float]) -> float | None:
    """The coefficient of variation: deviation by the mean's size; None where the mean is 0."""
    spread, centre = deviation(values), mean(values)
    return None if spread is None or not centre else spread / abs(centre)


def midmean(values: Sequence[float], axis: int | None = None) -> float | None:
    """The mean of the middle half, without a quarter of the values at each end; with `axis` of an
    array along that axis."""
    if not len(values):
        return None
    found = stats.trim_mean(values, 0.25, axis=0 if axis is None else axis)
    return float(found) if axis is None else found


def interval_t(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The interval of the mean by Student's t: mean ± t * s / sqrt(n) (Jain 1991, 13.2)."""
    _level(level)
    centre, spread = mean(values), deviation(values)
    if centre is None:
        return Interval(None, None, None, level, "no values")
    if spread is None:
        return Interval(centre, None, None, level, "one value has no interval")
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * spread / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, level)


def least_for_bootstrap(level: float = LEVEL) -> int:
    """How many values a bootstrap interval needs: resamples lie between the least and the greatest
    value, and the median does so with a chance of 1 - 2^(1-n) only. 6 for 95 %."""
    return math.ceil(1 - math.log2(1 - level))


def interval_bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = numpy.median,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of any statistic by bootstrap with the percentile method (Efron and Tibshirani
    1993, chapter 13). The same seed gives the same interval. Unknown for fewer values than
    `least_for_bootstrap`, unless all are equal.

    `statistic` may take an axis argument, as NumPy's functions do, which makes it fast.
    """
    _level(level)
    if not len(values):
        return Interval(None, None, None, level, "no values")
    data = numpy.asarray(values, dtype=float)
    estimate = float(statistic(data))
    if len(data) < 2:
        return Interval(estimate, None, None, level, "one value has no interval")
    if len(data) < (least := least_for_bootstrap(level)) and data.min() < data.max():
        return Interval(estimate, None, None, level, f"fewer than {least} values")
    draws = data[numpy.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))]
    try:
        found = statistic(draws, axis=1)
    except TypeError:
        found = numpy.array([statistic(draw) for draw in draws])
    low, high = numpy.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    # Resamples of few distinct values can leave the estimate outside by rounding only.
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate), level)


def percentiles(
    values: Sequence[float], wanted: Sequence[float] = PERCENTILES
) -> dict[float, float | None]:
    """Percentile → value, by linear interpolation (the default of R and NumPy, type 7).

    A percentile needs a sample beyond it: p99.99 is None below 10,000 values.
    """
    found: dict[float, float | None] = {}
    data = numpy.sort(numpy.asarray(values, dtype=float))
    for p in wanted:
        if not 0 < p < 100:
            raise ValueError(f"percentile: expected a number between 0 and 100, found {p}")
        # Rounded, since 100 - 99.9 is a little more than 0.1.
        beyond = round(len(data) * (100 - p) / 100, 6)
        found[p] = float(numpy.percentile(data, p)) if beyond >= 1 else None
    return found


# ---- two samples ---------------------------------------------------------------------------------
def ratio_paired(
    ours: Sequence[float], base: Sequence[float], level: float = LEVEL, seed: int = 0
) -> tuple[Interval, Interval]:
    """The ratio ours/base of pairs, such as of the same block.

    The first interval is that of the geometric mean: Student's t of the logarithms of the ratios.
    The second is that of the median ratio by bootstrap.
    ValueError when the samples differ in length. Pairs with a value that is not positive have no
    logarithm, so then both are unknown.
    """
    if len(ours) != len(base):
        raise ValueError(f"pairs: expected as many values, found {len(ours)} and {len(base)}")
    if not len(ours):
        nothing = Interval(None, None, None, level, "no pairs")
        return nothing, nothing
    if min(*ours, *base) <= 0:
        nothing = Interval(None, None, None, level, "a value is not positive, so has no ratio")
        return nothing, nothing
    ratios = [a / b for a, b in zip(ours, base, strict=True)]
    logs = interval_t([math.log(ratio) for ratio in ratios], level)
    parts = [None if v is None else math.exp(v) for v in (logs.estimate, logs.low, logs.high)]
    return Interval(*parts, level, logs.why), interval_bootstrap(ratios, level=level, seed=seed)


def aa_noise(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The A/A column: one cell compared with itself, its odd repetitions by its even ones.

    Its interval shows what ratios this machine gives where nothing differs. `values` are in the
    order of the repetitions; a last one without a partner is left out.
    """
    return ratio_paired(values[1::2], values[: len(values) // 2 * 2 : 2], level)[0]


def _two(a: Sequence[float], b: Sequence[float]) -> str:
    if len(a) < 2 or len(b) < 2:
        return "needs two values on each side"
    return ""


def welch(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Welch's t test: unequal variances, two-sided. Of two constant samples that differ, p is 0
    when each has LEAST_CONSTANT values, and unknown below that."""
    name = "Welch"
    if why := _two(a, b):
        return Comparison(name, None, None, why)
    if min(a) == max(a) and min(b) == max(b):
        if a[0] == b[0]:
            return Comparison(name, 0.0, 1.0)
        if min(len(a), len(b)) < LEAST_CONSTANT:
            return Comparison(name, None, None, "both samples are constant")
        # The limit of the test for a vanishing spread.
        return Comparison(name, None, 0.0, "both samples are constant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.ttest_ind(a, b, equal_var=False)
    return Comparison(name, float(found.statistic), float(found.pvalue))


def difference(a: Sequence[float], b: Sequence[float], level: float = LEVEL) -> Interval:
    """The difference of the means of two independent samples, b - a, with Welch's interval: the
    degrees of freedom are those of Welch and Satterthwaite (NIST e-Handbook, 1.3.5.3)."""
    _level(level)
    if not a or not b:
        return Interval(None, None, None, level, "one side has no values")
    centre = mean(b) - mean(a)
    if why := _two(a, b):
        return Interval(centre, None, None, level, why)
    parts = [deviation(values) ** 2 / len(values) for values in (a, b)]
    total = sum(parts)
    if total == 0:
        return Interval(centre, centre, centre, level)
    freedom = total**2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (a, b), strict=True))
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(total)
    return Interval(centre, centre - half, centre + half, level)


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """The Mann-Whitney U test, two-sided; exact for small samples without ties."""
    name = "Mann-Whitney"
    if why := _two(a, b):
        return Comparison(name, None, None, why)
    if min(*a, *b) == max(*a, *b):
        return Comparison(name, len(a) * len(b) / 2, 1.0)
    found = stats.mannwhitneyu(a, b, alternative="two-sided")
    return Comparison(name, float(found.statistic), float(found.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for multiple comparisons by Holm 1979: they bound the chance of one false
    finding among all. In the order given."""
    count, corrected, largest = len(p_values), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """p values corrected by Benjamini and Hochberg 1995: they bound the share of false findings.
    In the order given."""
    count, corrected, least = len(p_values), [0.0] * len(p_values), 1.0
    order = sorted(range(count), key=lambda i: p_values[i], reverse=True)
    for place, index in enumerate(order):
        least = min(least, p_values[index] * count / (count - place))
        corrected[index] = least
    return corrected


# ---- relations -----------------------------------------------------------------------------------
def _relation(x: Sequence[float], y: Sequence[float]) -> str:
    if len(x) != len(y):
        raise ValueError(f"pairs: expected as many values, found {len(x)} and {len(y)}")
    if len(x) < 3:
        return "needs three pairs"
    if min(x) == max(x) or min(y) == max(y):
        return "one of the two does not vary"
    return ""


def _fisher(r: float, n: int, level: float, spread: float) -> tuple[float | None, float | None]:
    """The interval of a correlation by Fisher's z transform; `spread` is the variance of z times
    n - 3."""
    if n < 4:
        return None, None
    if abs(r) >= 1:
        return r, r
    half = float(stats.norm.ppf((1 + level) / 2)) * math.sqrt(spread / (n - 3))
    return math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def pearson(x: Sequence[float], y: Sequence[float], level: float = LEVEL) -> Correlation:
    """The linear correlation of pairs; interval by Fisher's z."""
    _level(level)
    if why := _relation(x, y):
        return Correlation(None, None, None, None, len(x), why)
    r, p = (float(v) for v in stats.pearsonr(x, y))
    r = max(-1.0, min(1.0, r))
    return Correlation(r, p, *_fisher(r, len(x), level, 1.0), len(x))


def spearman(x: Sequence[float], y: Sequence[float], level: float = LEVEL) -> Correlation:
    """The rank correlation of pairs; interval by Fisher's z with the variance (1 + r²/2)/(n - 3) of
    Bonett and Wright, Psychometrika 65 (2000) 23."""
    _level(level)
    if why := _relation(x, y):
        return Correlation(None, None, None, None, len(x), why)
    found = stats.spearmanr(x, y)
    r, p = max(-1.0, min(1.0, float(found.correlation))), float(found.pvalue)
    return Correlation(r, p, *_fisher(r, len(x), level, 1 + r * r / 2), len(x))


def growth(x: Sequence[float], y: Sequence[float], level: float = LEVEL) -> Growth:
    """How y grows with x: the exponent of a power law, by least squares on logarithms.

    An exponent of 1 is linear growth. Pairs that are not positive have no logarithm.
    """
    _level(level)
    if len(x) != len(y):
        raise ValueError(f"pairs: expected as many values, found {len(x)} and {len(y)}")
    n = len(x)
    if n and (min(x) <= 0 or min(y) <= 0):
        return Growth(None, None, None, None, None, n, "a value is not positive")
    if n < 3 or len(set(x)) < 2:
        return Growth(None, None, None, None, None, n, "needs three points and two sizes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = stats.linregress(numpy.log(x), numpy.log(y))
    half = float(stats.t.ppf((1 + level) / 2, n - 2)) * float(fit.stderr)
    slope, r2 = float(fit.slope), float(fit.rvalue) ** 2
    factor = math.exp(float(fit.intercept))
    r2 = r2 if math.isfinite(r2) else 1.0
    return Growth(slope, slope - half, slope + half, factor, r2, n)
