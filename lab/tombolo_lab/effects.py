"""Effects of factors: two-level designs, analysis of variance, and checks of the residuals.

The coding is that of `tombolo_lab.design`: the first level of a factor is -1, the second +1, and
the letters A, B, C … (without I) stand for the factors in their order.

An effect q is half the change of the mean from the low to the high level, as in Jain 1991: the
model is y = q0 + qA xA + qB xB + qAB xA xB + … + e. (Box, Hunter and Hunter call twice this number
the effect.)

Sources: R. Jain, "The Art of Computer Systems Performance Analysis", Wiley 1991, chapters 17
(2^k), 18 (2^k r), 19 (2^(k-p)) and 20 to 23 (analysis of variance); Box, Hunter and Hunter,
"Statistics for Experimenters", 2nd edition 2005.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from scipy import stats

from tombolo_lab import design
from tombolo_lab.statistics import LEVEL

if TYPE_CHECKING:
    import pandas

# Interactions of more factors than this are left to the error: they are rarely real, and a table of
# them is not read.
MOST_FACTORS = 3
# Below this p value a check of the residuals is reported as a warning.
DOUBT = 0.01


@dataclass(frozen=True)
class Effect:
    """One effect. `name` is in letters ("AB"), `factors` the factors' names in that order; the
    mean has name "I" and no factors. `share` is the part of the variation that it explains."""

    name: str
    factors: tuple[str, ...]
    q: float
    low: float | None
    high: float | None
    share: float | None
    aliases: tuple[str, ...] = ()

    @property
    def is_significant(self) -> bool:
        """Whether the interval is known and does not contain 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Effects:
    """All effects of a two-level design, the mean first and the others by descending share."""

    letters: dict[str, str]
    effects: tuple[Effect, ...]
    error_share: float | None
    repetitions: int  # the least of any cell
    residuals: tuple[float, ...]
    why: str = ""

    def of(self, name: str) -> Effect:
        """The effect of that name, such as "AB"; KeyError when there is none."""
        for effect in self.effects:
            if effect.name == name:
                return effect
        raise KeyError(name)


def is_two_level(factors: dict[str, Sequence]) -> bool:
    """Whether effects can be computed: two levels for each factor, and letters for all."""
    return 1 <= len(factors) <= len(design.LETTERS) and all(len(v) == 2 for v in factors.values())


def _coded(frame: pandas.DataFrame, factors: dict[str, Sequence]) -> dict[str, numpy.ndarray]:
    """Letter → codes -1 and +1 of each row."""
    codes = {}
    for letter, (name, levels) in zip(design.LETTERS, factors.items(), strict=False):
        codes[letter] = numpy.where(frame[name] == levels[1], 1.0, -1.0)
    return codes


def _names(letters: Sequence[str], plan: design.Fraction | None) -> dict[str, tuple[str, ...]]:
    """The effects to estimate, and the aliases of each.

    In a fraction one effect of each alias set is estimated: the one of fewest factors, the first in
    order of letters.
    """
    words = [
        "".join(word)
        for size in range(1, min(len(letters), MOST_FACTORS) + 1)
        for word in itertools.combinations(letters, size)
    ]
    found: dict[str, tuple[str, ...]] = {}
    if plan is None:
        return dict.fromkeys(words, ())
    taken: set[str] = set()
    for word in words:
        if word in taken:
            continue
        aliases = plan.aliases(word)
        taken.update(alias.letters for alias in aliases)
        if any(alias.letters == "" for alias in aliases):
            continue
        found[word] = tuple(map(str, aliases))
    return found


def two_level(
    frame: pandas.DataFrame,
    factors: dict[str, Sequence],
    measure: str,
    plan: design.Fraction | None = None,
    level: float = LEVEL,
) -> Effects:
    """The effects of a full or fractional two-level design on a measure.

    `frame` has a column for each factor and the measure, one row a repetition. Cells may differ in
    their numbers of repetitions; the effects are then those of least squares. Intervals come from
    the spread of the repetitions (Jain 1991, 18.5): s_q = s_e / sqrt(2^k r) for equal numbers, and
    are None without repetitions.
    """
    letters = design.letters(tuple(factors))
    rows = frame[[*factors, measure]].dropna()
    nothing = Effects(letters, (), None, 0, ())
    cells = rows.groupby(list(factors), observed=True)[measure]
    wanted = 2 ** len(factors) if plan is None else plan.runs
    if cells.ngroups != wanted:
        why = f"{cells.ngroups} of {wanted} cells have values"
        return Effects(letters, (), None, 0, (), why) if len(rows) else nothing
    y = rows[measure].to_numpy(float)
    codes = _coded(rows, factors)
    names = _names(tuple(letters), plan)
    columns = [numpy.ones(len(y))]
    columns += [numpy.prod([codes[letter] for letter in name], axis=0) for name in names]
    matrix = numpy.column_stack(columns)
    q, *_ = numpy.linalg.lstsq(matrix, y, rcond=None)
    # What rounding leaves of an effect that is none.
    q[numpy.abs(q) < 1e-12 * numpy.abs(y).max()] = 0
    within = rows[measure] - cells.transform("mean")
    # The pure error: what repetitions of a cell differ by. Left-out interactions are no part of it.
    freedom = len(y) - wanted
    error = float(numpy.sum(within.to_numpy() ** 2))
    total = float(numpy.sum((y - y.mean()) ** 2))
    errors: list[float | None] = [None] * len(q)
    if freedom > 0:
        inverse = numpy.linalg.inv(matrix.T @ matrix)
        wide = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(error / freedom)
        errors = [wide * math.sqrt(inverse[i, i]) for i in range(len(q))]
    effects = []
    for index, (name, aliases) in enumerate([("I", ()), *names.items()]):
        value, half = float(q[index]), errors[index]
        squares = float(numpy.sum((value * matrix[:, index]) ** 2))
        effects.append(
            Effect(
                name,
                () if name == "I" else tuple(letters[letter] for letter in name),
                value,
                None if half is None else value - half,
                None if half is None else value + half,
                None if name == "I" or total == 0 else squares / total,
                aliases,
            )
        )
    ordered = sorted(effects[1:], key=lambda effect: -(effect.share or 0))
    return Effects(
        letters,
        (effects[0], *ordered),
        error / total if total else None,
        int(cells.count().min()),
        tuple(float(v) for v in within),
    )


# ---- analysis of variance ------------------------------------------------------------------------
@dataclass(frozen=True)
class Source:
    """A row of an analysis of variance. `f` and `p` are None for the residual."""

    name: str
    squares: float
    freedom: float
    f: float | None
    p: float | None
    share: float | None


@dataclass(frozen=True)
class Anova:
    """An analysis of variance of categorical factors and their two-factor interactions."""

    rows: tuple[Source, ...]
    residuals: tuple[float, ...]
    fitted: tuple[float, ...]
    why: str = ""


def anova(frame: pandas.DataFrame, factors: dict[str, Sequence], measure: str) -> Anova:
    """The analysis of variance of a measure: main effects and, where all combinations have values,
    interactions of two factors. Sums of squares of type II, from statsmodels.

    Blocks are not a factor: their order is checked with the residuals.
    """
    varying = [name for name in factors if frame[name].nunique() > 1]
    rows = frame[[*varying, measure]].dropna()
    if not varying or len(rows) < 3:
        return Anova((), (), (), "needs a factor with two levels and three values")
    y = rows[measure].to_numpy(float)
    if y.min() == y.max():
        return Anova((), (), (), "all values are equal")
    import statsmodels.api as sm
    from statsmodels.formula.api import ols

    # Names of factors are no Python names, so they are numbered.
    plain = rows.rename(columns={name: f"f{i}" for i, name in enumerate(varying)})
    plain = plain.rename(columns={measure: "y"})
    terms = [f"C(f{i})" for i in range(len(varying))]
    pairs = []
    for i, j in itertools.combinations(range(len(varying)), 2):
        whole = plain.groupby([f"f{i}", f"f{j}"], observed=True).ngroups
        if whole == plain[f"f{i}"].nunique() * plain[f"f{j}"].nunique():
            pairs.append(f"C(f{i}):C(f{j})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ols("y ~ " + " + ".join(terms + pairs), data=plain).fit()
        if model.df_resid < 1:
            model = ols("y ~ " + " + ".join(terms), data=plain).fit()
        if model.df_resid < 1:
            return Anova((), (), (), "no repetitions, so no error to compare with")
        table = sm.stats.anova_lm(model, typ=2)
    total = float(numpy.sum((y - y.mean()) ** 2))
    found = []
    for label, row in table.iterrows():
        name = str(label)
        for i in reversed(range(len(varying))):
            name = name.replace(f"C(f{i})", varying[i])
        f, p = (None if math.isnan(row[key]) else float(row[key]) for key in ("F", "PR(>F)"))
        squares = float(row["sum_sq"])
        found.append(
            Source(name.replace(":", " × "), squares, float(row["df"]), f, p, squares / total)
        )
    return Anova(
        tuple(found),
        tuple(float(v) for v in model.resid),
        tuple(float(v) for v in model.fittedvalues),
    )


# ---- residuals -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """A check of what an analysis assumes; `p` below DOUBT speaks against it."""

    name: str
    p: float | None
    why: str = ""

    @property
    def is_doubtful(self) -> bool:
        return self.p is not None and self.p < DOUBT


def check_normal(residuals: Sequence[float]) -> Check:
    """Whether residuals are normal: Shapiro and Wilk 1965. At most 5,000 of them are used."""
    name = "residuals are normal (Shapiro-Wilk)"
    if len(residuals) < 3:
        return Check(name, None, "needs three residuals")
    if max(residuals) - min(residuals) <= 1e-12 * (max(map(abs, residuals)) or 1):
        return Check(name, None, "all residuals are equal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Check(name, float(stats.shapiro(residuals[:5000]).pvalue))


def check_spread(samples: Sequence[Sequence[float]]) -> Check:
    """Whether all cells spread alike: Levene's test with medians (Brown and Forsythe 1974)."""
    name = "cells spread alike (Levene)"
    usable = [sample for sample in samples if len(sample) >= 2]
    if len(usable) < 2:
        return Check(name, None, "needs two cells with two values")
    if all(min(sample) == max(sample) for sample in usable):
        return Check(name, None, "no cell varies")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = float(stats.levene(*usable, center="median").pvalue)
    return Check(name, p) if math.isfinite(p) else Check(name, None, "no cell varies")


def check_order(residuals: Sequence[float]) -> Check:
    """Whether residuals in the order of measurement are random: the runs test of Wald and
    Wolfowitz about the median (NIST e-Handbook, 1.3.5.13), with a normal approximation."""
    name = "no drift in time (runs test)"
    middle = float(numpy.median(residuals)) if len(residuals) else 0.0
    signs = [value > middle for value in residuals if value != middle]
    above, below = sum(signs), len(signs) - sum(signs)
    if above < 5 or below < 5:
        return Check(name, None, "needs five residuals on each side of the median")
    runs = 1 + sum(a != b for a, b in itertools.pairwise(signs))
    both = above + below
    expected = 2 * above * below / both + 1
    variance = (expected - 1) * (expected - 2) / (both - 1)
    z = (runs - expected) / math.sqrt(variance)
    return Check(name, float(2 * stats.norm.sf(abs(z))))
