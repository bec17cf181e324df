"""Effects of factors: two-level designs, analysis of variance, and checks of the residuals.

The coding is that of `tombolo_lab.design`: the first level of a factor is -1, the second +1, and
the letters A, B, C … (without I) stand for the factors in their order.

An effect q is half the change of the mean from the low to the high level, as in Jain 1991: the
model is y = q0 + qA xA + qB xB + qAB xA xB + … + e. (Box, Hunter and Hunter call twice this number
the effect.)

Points that were measured in one set-up are not independent: what differs between set-ups moves all
of them. An effect of factors that change with the set-up alone is therefore judged by the spread of
the set-ups' means, with as many degrees of freedom as set-ups allow; one that changes within
set-ups by what is left within them. This is the analysis of a split-plot design, whose main plots
are the set-ups.

Sources: R. Jain, "The Art of Computer Systems Performance Analysis", Wiley 1991, chapters 17
(2^k), 18 (2^k r), 19 (2^(k-p)) and 20 to 23 (analysis of variance); Box, Hunter and Hunter,
"Statistics for Experimenters", 2nd edition 2005, section 9.1 for split plots.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from scipy import stats

from tombolo_lab import design
from tombolo_lab.statistics import LEVEL, holm

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
    mean has name "I" and no factors. `share` is the part of the variation that it explains. `p` is
    that of the effect being 0, `holm` the same after Holm's correction over all effects on this
    measure; the mean is not among them."""

    name: str
    factors: tuple[str, ...]
    q: float
    low: float | None
    high: float | None
    share: float | None
    aliases: tuple[str, ...] = ()
    p: float | None = None
    holm: float | None = None

    @property
    def is_significant(self) -> bool:
        """Whether the corrected p value is known and below 5 %."""
        return self.holm is not None and self.holm < 1 - LEVEL


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


@dataclass(frozen=True)
class _Error:
    """What effects are judged by: a variance, and its degrees of freedom (0: unknown)."""

    variance: float
    freedom: int


def _dummies(labels: Sequence) -> numpy.ndarray:
    """A column of zeros and ones for each distinct label."""
    _, places = numpy.unique(numpy.asarray(labels), return_inverse=True)
    return numpy.eye(places.max() + 1)[places]


def _within(y: numpy.ndarray, cells: numpy.ndarray, plots: numpy.ndarray | None) -> _Error:
    """The error within set-ups: what is left of `y` after means of cells and of set-ups."""
    inside = y - cells @ ((cells.T @ y) / cells.sum(axis=0))
    rank = cells.shape[1]
    if plots is not None:
        apart = plots - cells @ ((cells.T @ plots) / cells.sum(axis=0)[:, None])
        found, _, more, _ = numpy.linalg.lstsq(apart, inside, rcond=1e-9)
        inside, rank = inside - apart @ found, rank + int(more)
    freedom = len(y) - rank
    return _Error(float(inside @ inside) / freedom if freedom > 0 else 0.0, max(freedom, 0))


def _is_constant(column: numpy.ndarray, plots: numpy.ndarray) -> bool:
    """Whether a column of a model has one value in each set-up."""
    means = (plots.T @ column) / plots.sum(axis=0)
    return bool(numpy.allclose(plots @ means, column))


def _intervals(
    y: numpy.ndarray, matrix: numpy.ndarray, cells: numpy.ndarray, plots: numpy.ndarray | None
) -> list[tuple[float, int] | None]:
    """The standard error of each coefficient of `matrix` and its degrees of freedom; None: unknown.

    Columns that are constant in each set-up have the spread of the set-ups' means, as if each were
    one value; the others have what is left within set-ups.
    """
    found: list[tuple[float, int] | None] = [None] * matrix.shape[1]

    def fill(indices: list[int], rows: numpy.ndarray, error: _Error) -> None:
        if error.freedom and indices:
            inverse = numpy.linalg.pinv(rows.T @ rows)
            for place, index in enumerate(indices):
                found[index] = (math.sqrt(error.variance * inverse[place, place]), error.freedom)

    if plots is None or plots.shape[1] == len(y):
        fill(list(range(matrix.shape[1])), matrix, _within(y, cells, None))
        return found
    whole = [i for i in range(matrix.shape[1]) if _is_constant(matrix[:, i], plots)]
    sizes = plots.sum(axis=0)
    rows = (plots.T @ matrix[:, whole]) / sizes[:, None]
    # Set-ups of one kind agree in all columns that are constant in set-ups.
    _, kinds = numpy.unique(rows.round(9), axis=0, return_inverse=True)
    fill(whole, rows, _within((plots.T @ y) / sizes, _dummies(kinds.ravel()), None))
    inside = [i for i in range(matrix.shape[1]) if i not in whole]
    # All columns, for the inverse of a design that is not balanced.
    order = inside + whole
    error = _within(y, cells, plots)
    if error.freedom:
        inverse = numpy.linalg.pinv(matrix[:, order].T @ matrix[:, order])
        for place, index in enumerate(inside):
            found[index] = (math.sqrt(error.variance * inverse[place, place]), error.freedom)
    return found


def two_level(
    frame: pandas.DataFrame,
    factors: dict[str, Sequence],
    measure: str,
    plan: design.Fraction | None = None,
    level: float = LEVEL,
    plots: str | None = None,
) -> Effects:
    """The effects of a full or fractional two-level design on a measure.

    `frame` has a column for each factor and the measure, one row a repetition; `plots` names a
    column with the set-up of each row, without which all rows are independent. Cells may differ in
    their numbers of repetitions; the effects are then those of least squares. Intervals come from
    the spread of the repetitions (Jain 1991, 18.5): s_q = s_e / sqrt(2^k r) for equal numbers of
    independent rows. They are None without repetitions, and for effects of the set-up when no
    set-up was repeated.
    """
    letters = design.letters(tuple(factors))
    rows = frame[[*factors, measure, *([plots] if plots else [])]].dropna()
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
    # What rounding leaves of an effect that is none; no zero has a sign.
    q = numpy.where(numpy.abs(q) < 1e-12 * numpy.abs(y).max(), 0.0, q) + 0.0
    within = rows[measure] - cells.transform("mean")
    # The pure error: what repetitions of a cell differ by. Left-out interactions are no part of it.
    error = float(numpy.sum(within.to_numpy() ** 2))
    total = float(numpy.sum((y - y.mean()) ** 2))
    errors = _intervals(
        y, matrix, _dummies(cells.ngroup()), _dummies(rows[plots]) if plots else None
    )
    effects = []
    for index, (name, aliases) in enumerate([("I", ()), *names.items()]):
        value, low, high, p = float(q[index]), None, None, None
        if errors[index] is not None:
            deviation, freedom = errors[index]
            half = float(stats.t.ppf((1 + level) / 2, freedom)) * deviation
            low, high = value - half, value + half
            p = float(value == 0)
            # Rounding alone leaves a deviation of this size.
            if deviation > 1e-12 * float(numpy.abs(y).max()):
                p = float(2 * stats.t.sf(abs(value) / deviation, freedom))
        squares = float(numpy.sum((value * matrix[:, index]) ** 2))
        effects.append(
            Effect(
                name,
                () if name == "I" else tuple(letters[letter] for letter in name),
                value,
                low,
                high,
                None if name == "I" or total == 0 else squares / total,
                aliases,
                p,
                p if name == "I" else None,
            )
        )
    tested = [effect for effect in effects[1:] if effect.p is not None]
    corrected = dict(
        zip((e.name for e in tested), holm([e.p for e in tested]), strict=True)
    )
    effects[1:] = [
        dataclasses.replace(effect, holm=corrected.get(effect.name)) for effect in effects[1:]
    ]
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
    """An analysis of variance of categorical factors and their two-factor interactions. `left_out`
    names the interactions that the design cannot tell from terms before them."""

    rows: tuple[Source, ...]
    residuals: tuple[float, ...]
    fitted: tuple[float, ...]
    why: str = ""
    left_out: tuple[str, ...] = ()


SET_UPS = "between set-ups"


def _terms(plain: pandas.DataFrame, count: int) -> tuple[list[str], list[str]]:
    """The terms of a model of `count` factors f0, f1 …: main effects and pairs, each only if it
    adds as many independent columns as it has; and the pairs, or factors, that do not."""
    import patsy

    taken, left = numpy.ones((len(plain), 1)), []
    terms = []
    singles = [f"C(f{i})" for i in range(count)]
    pairs = []
    for i, j in itertools.combinations(range(count), 2):
        whole = plain.groupby([f"f{i}", f"f{j}"], observed=True).ngroups
        if whole == plain[f"f{i}"].nunique() * plain[f"f{j}"].nunique():
            pairs.append(f"C(f{i}):C(f{j})")
    sums = {single: single.replace(")", ", Sum)") for single in singles}
    for term in singles + pairs:
        names = [sums[name] for name in term.split(":")]
        built = patsy.dmatrix("*".join(names), plain)
        part = built.design_info.slice(":".join(names))
        wider = numpy.column_stack([taken, numpy.asarray(built)[:, part]])
        if numpy.linalg.matrix_rank(wider) == wider.shape[1]:
            taken = wider
            terms.append(term)
        else:
            left.append(term)
    return terms, left


def anova(
    frame: pandas.DataFrame, factors: dict[str, Sequence], measure: str, plots: str | None = None
) -> Anova:
    """The analysis of variance of a measure: main effects and, where all combinations have values,
    interactions of two factors. Sums of squares of type II, from statsmodels.

    `plots` names a column with the set-up of each row: terms that are constant in each set-up are
    then judged by what is left between set-ups, and the others by what is left within them. Of
    terms that the design cannot tell apart, as in a fraction, the first is kept. Blocks are not a
    factor: their order is checked with the residuals.
    """
    rows = frame[[*factors, measure, *([plots] if plots else [])]].dropna()
    # A measure may apply to one level only: what is left need not vary.
    varying = [name for name in factors if rows[name].nunique() > 1]
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
    terms, left = _terms(plain, len(varying))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ols("y ~ " + " + ".join(terms), data=plain).fit()
        if model.df_resid < 1:
            alone = [term for term in terms if ":" not in term]
            model = ols("y ~ " + " + ".join(alone), data=plain).fit()
        if model.df_resid < 1:
            return Anova((), (), (), "no repetitions, so no error to compare with")
        table = sm.stats.anova_lm(model, typ=2)
    total = float(numpy.sum((y - y.mean()) ** 2))

    def named(label: str) -> str:
        for i in reversed(range(len(varying))):
            label = label.replace(f"C(f{i})", varying[i])
        return label.replace(":", " × ")

    groups = _dummies(rows[plots]) if plots else None
    between, inside = _errors(model, groups)
    found = []
    for label, row in table.iterrows():
        squares, freedom, f, p = float(row["sum_sq"]), float(row["df"]), None, None
        if label == "Residual":
            if between is not None:
                spread = between.variance * between.freedom
                found.append(Source(SET_UPS, spread, between.freedom, None, None, spread / total))
            squares, freedom = inside.variance * inside.freedom, float(inside.freedom)
        else:
            columns = model.model.exog[:, model.model.data.design_info.slice(label)]
            of_set_ups = between is not None and all(
                _is_constant(column, groups) for column in columns.T
            )
            error = between if of_set_ups else inside
            if error.freedom and error.variance > 0:
                f = squares / freedom / error.variance
                p = float(stats.f.sf(f, freedom, error.freedom))
        found.append(Source(named(str(label)), squares, freedom, f, p, squares / total))
    return Anova(
        tuple(found),
        tuple(float(v) for v in model.resid),
        tuple(float(v) for v in model.fittedvalues),
        left_out=tuple(map(named, left)),
    )


def _errors(model: object, plots: numpy.ndarray | None) -> tuple[_Error | None, _Error]:
    """The errors of a fitted model between set-ups and within them; between is None where each row
    has a set-up of its own."""
    left, freedom = numpy.asarray(model.resid), int(model.df_resid)
    squares = float(left @ left)
    if plots is None or plots.shape[1] == len(left):
        return None, _Error(squares / freedom, freedom)
    exog = model.model.exog
    apart = plots - exog @ numpy.linalg.lstsq(exog, plots, rcond=1e-9)[0]
    found, _, rank, _ = numpy.linalg.lstsq(apart, left, rcond=1e-9)
    inside = left - apart @ found
    rest = float(inside @ inside)
    within = freedom - int(rank)
    return (
        _Error((squares - rest) / rank if rank else 0.0, int(rank)),
        _Error(rest / within if within else 0.0, within),
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
    name = "cells spread alike (Levene, by medians)"
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
