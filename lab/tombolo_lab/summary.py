"""The summary of a run: what summary.json and summary.csv hold, computed from its points.

summary.json is one object:

    experiment, title, primary, level      level: of all intervals, 0.95
    counts        as Run.counts()
    cells         [{cell, n, measures: {measure: FIGURES}}], in canonical order; cells without a
                  point that counts are left out
    ratios        [{factor, base, cell, measure, ratio, low, high, boot_low, boot_high, n, why}]:
                  the primary measure of a cell by that of the cell with the first level of
                  `factor`, in pairs of the same block. For factors that name alternatives,
                  not for numbers.
    effects       null, or {letters, measures: {measure: {effects: [EFFECT], error_share,
                  repetitions, why}}}, for designs of two levels
    anova         {rows: [SOURCE], why, left_out} of the primary measure; left_out: interactions
                  that cannot be told from others
    checks        [{name, p, doubtful, why}]: what the analysis assumes
    correlations  [{x, y, kind, coefficient, p, low, high, n, why}] of the pairs that the file names
    growth        [{x, y, where, exponent, low, high, factor, r2, n, why}] for curves whose plot has
                  two logarithmic axes, by each combination of the factors that it does not name
    published     [{label, source, measure, value, low, high, differs, match, ours, ratio}]
    warnings      texts

FIGURES: n, mean, median, highest (not in summary.csv), deviation, cv, low, high (Student's t of the
mean), boot_low, boot_high (bootstrap of the median), aa: {ratio, low, high} (odd repetitions by
even ones), and, where raw samples were kept, samples and percentiles: {"50": …}. Where points kept
evenly spaced ranks of more values, percentiles beyond the last but one of them are null. Where
points counted by range, ranges: [[low, high, count]], over all of them; high is null for a range
without an end. What cannot be computed is null.

summary.csv has one row for each cell and measure.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tombolo_lab import effects, statistics
from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment, Plot, workload_class
from tombolo_lab.results import Run, cell_key, write_whole
from tombolo_lab.workloads import HISTOGRAMS, MOST_VALUES, SAMPLES_OF

if TYPE_CHECKING:
    import pandas

FIGURES = ("n", "mean", "median", "deviation", "cv", "low", "high", "boot_low", "boot_high")
# More warnings about spread than this are counted and not listed.
MOST_NAMED = 5


def cell_name(cell: Cell) -> str:
    """A cell in one line."""
    return (
        ", ".join(f"{name} {level_text(level)}" for name, level in cell.items()) or "the only cell"
    )


def level_text(level: object) -> str:
    if isinstance(level, bool):
        return "yes" if level else "no"
    return f"{level:g}" if isinstance(level, float) else str(level)


def rows_of(frame: pandas.DataFrame, cell: Cell) -> pandas.DataFrame:
    """The rows of a cell, by block."""
    mask = None
    for name, level in cell.items():
        # Python takes 1, 1.0 and True for equal; a factor's levels are of one kind.
        part = frame[name] == level
        mask = part if mask is None else mask & part
    return (frame if mask is None else frame[mask]).sort_values("block", kind="stable")


def figures(
    values: list[float],
    samples: list[float],
    seed: int,
    least_kept: int | None = None,
    limits: tuple[float | None, float | None] = (None, None),
) -> dict:
    """The numbers of one measure in one cell; see FIGURES in the module's text. `least_kept`: how
    many samples the point of the fewest kept, where a point kept a part of its values only.
    `limits`: between which the measure is by its nature, and so its mean."""
    exact = statistics.interval_t(values).clipped(*limits)
    boot = statistics.interval_bootstrap(values, seed=seed)
    noise = statistics.aa_noise(values)
    found = {
        "n": len(values),
        "mean": exact.estimate,
        "median": statistics.median(values),
        "highest": max(values, default=None),
        "deviation": statistics.deviation(values),
        "cv": statistics.variation(values),
        "low": exact.low,
        "high": exact.high,
        "boot_low": boot.low,
        "boot_high": boot.high,
        "aa": {"ratio": noise.estimate, "low": noise.low, "high": noise.high},
    }
    if samples:
        parts = statistics.percentiles(samples)
        if least_kept is not None:
            # Evenly spaced ranks of a point tell nothing beyond the last but one.
            each = statistics.percentiles(range(least_kept))
            parts = {p: None if each[p] is None else value for p, value in parts.items()}
        found["samples"] = len(samples)
        found["percentiles"] = {f"{p:g}": value for p, value in parts.items()}
    return found


def pooled_samples(run: Run) -> dict[tuple[str, str], list[float]]:
    """(cell key, measure) → the raw samples of all points that count."""
    pooled: dict[tuple[str, str], list[float]] = {}
    for point in run.counted():
        for measure, values in point.get("samples", {}).items():
            pooled.setdefault((cell_key(point["cell"]), measure), []).extend(values)
    return pooled


def pooled_ranges(run: Run) -> dict[tuple[str, str], Counter[tuple[int, int | None]]]:
    """(cell key, measure) → the counts by range of all points that count; see HISTOGRAMS."""
    pooled: dict[tuple[str, str], Counter[tuple[int, int | None]]] = {}
    for point in run.counted():
        for measure, rows in (point.get("notes") or {}).get(HISTOGRAMS, {}).items():
            counts = pooled.setdefault((cell_key(point["cell"]), measure), Counter())
            for low, high, count in rows:
                counts[low, high] += count
    return pooled


def thinned_samples(run: Run) -> dict[tuple[str, str], int]:
    """(cell key, measure) → the fewest samples of a point that kept a part of its values only, as
    its notes say; runs before those notes kept `paced.MOST_VALUES` of more."""
    found: dict[tuple[str, str], int] = {}
    for point in run.counted():
        of = (point.get("notes") or {}).get(SAMPLES_OF, {})
        for measure, values in point.get("samples", {}).items():
            is_part = len(values) < of[measure] if measure in of else len(values) == MOST_VALUES
            if is_part:
                key = (cell_key(point["cell"]), measure)
                found[key] = min(found.get(key, len(values)), len(values))
    return found


def alternatives(experiment: Experiment) -> list[str]:
    """The factors whose levels are names or yes and no, so that a ratio to the first is of use."""
    return [
        name
        for name, levels in experiment.factors.items()
        if len(levels) > 1 and all(isinstance(level, str | bool) for level in levels)
    ]


def ratios(frame: pandas.DataFrame, experiment: Experiment) -> list[dict]:
    """The primary measure of each cell by that of its base, in pairs of the same block."""
    found = []
    measure = experiment.primary
    for factor in alternatives(experiment):
        base_level = experiment.factors[factor][0]
        for cell in experiment.cells():
            if cell[factor] == base_level:
                continue
            ours = rows_of(frame, cell).dropna(subset=[measure]).set_index("block")[measure]
            base = rows_of(frame, {**cell, factor: base_level})
            base = base.dropna(subset=[measure]).set_index("block")[measure]
            blocks = ours.index.intersection(base.index)
            if ours.empty or base.empty:
                continue
            exact, boot = statistics.ratio_paired(
                ours[blocks].tolist(), base[blocks].tolist(), seed=experiment.seed
            )
            found.append(
                {
                    "factor": factor,
                    "base": base_level,
                    "cell": cell,
                    "measure": measure,
                    "ratio": exact.estimate,
                    "low": exact.low,
                    "high": exact.high,
                    "boot_low": boot.low,
                    "boot_high": boot.high,
                    "n": len(blocks),
                    "why": exact.why,
                }
            )
    return found


# The column that tells which set-up a row was measured in.
SET_UP = "set-up of the point"


def with_set_ups(frame: pandas.DataFrame, experiment: Experiment) -> pandas.DataFrame:
    """The frame with a column that numbers the set-ups: cells that follow each other in a block and
    agree in the factors of the set-up share one."""
    setup, number = experiment.setup_factors(), 0
    found: dict[tuple[int, str], int] = {}
    for block in sorted(set(frame["block"])):
        before = None
        for cell in experiment.block(int(block)):
            levels = [cell[name] for name in setup]
            number += levels != before
            before = levels
            found[block, cell_key(cell)] = number
        number += 1
    names = list(experiment.factors)
    cells = zip(frame["block"], *(frame[name] for name in names), strict=True)
    keys = [(block, cell_key(dict(zip(names, levels, strict=True)))) for block, *levels in cells]
    return frame.assign(**{SET_UP: [found[key] for key in keys]})


def effects_of(frame: pandas.DataFrame, experiment: Experiment) -> dict | None:
    """The effects on every measure, for designs of two levels."""
    # A factor that a short run holds at one level has no effect, and hides none.
    factors = {name: levels for name, levels in experiment.factors.items() if len(levels) > 1}
    if not effects.is_two_level(factors) or experiment.exclude:
        return None
    measures, letters = {}, {}
    for measure in experiment.measures:
        if frame[measure].notna().sum() == 0:
            continue
        found = effects.two_level(
            frame, factors, measure, experiment.fraction, plots=SET_UP
        )
        letters = found.letters
        measures[measure] = {
            "effects": [
                {**dataclasses.asdict(effect), "significant": effect.is_significant}
                for effect in found.effects
            ],
            "error_share": found.error_share,
            "repetitions": found.repetitions,
            "why": found.why,
        }
    return {"letters": letters, "measures": measures}


def analysis(frame: pandas.DataFrame, experiment: Experiment) -> tuple[dict, list[dict]]:
    """The analysis of variance of the primary measure, and the checks of its residuals."""
    found = effects.anova(frame, experiment.factors, experiment.primary, SET_UP)
    rows = [dataclasses.asdict(row) for row in found.rows]
    samples = [
        statistics.clean(rows_of(frame, cell)[experiment.primary]) for cell in experiment.cells()
    ]
    checks = [
        effects.check_normal(found.residuals),
        effects.check_spread(samples),
        effects.check_order(found.residuals),
    ]
    return {"rows": rows, "why": found.why, "left_out": list(found.left_out)}, [
        {"name": check.name, "p": check.p, "doubtful": check.is_doubtful, "why": check.why}
        for check in checks
    ]


def correlations(frame: pandas.DataFrame, experiment: Experiment) -> list[dict]:
    """The pairs of measures that the file names, over all points, by value and by rank."""
    found = []
    for x, y in experiment.correlations:
        pairs = frame[[x, y]].dropna()
        for kind, function in (("Pearson", statistics.pearson), ("Spearman", statistics.spearman)):
            value = function(pairs[x].tolist(), pairs[y].tolist())
            found.append({"x": x, "y": y, "kind": kind, **dataclasses.asdict(value)})
    return found


def free_factors(experiment: Experiment, plot: Plot) -> list[str]:
    """The factors of several levels that a plot does not name."""
    named = {plot.x, plot.y, plot.z, plot.curves, *plot.panels}
    return [f for f, levels in experiment.factors.items() if f not in named and len(levels) > 1]


def common_levels(
    cells: Iterable[Cell], compared: Sequence[str], free: Sequence[str]
) -> tuple[list[Cell], list[Cell]]:
    """The combinations of levels of the `free` factors that cells have at every combination of the
    `compared` ones that occurs, and those that only some have."""
    groups: dict[tuple, set[tuple]] = {}
    every: dict[tuple, Cell] = {}
    for cell in cells:
        part = tuple(cell[name] for name in free)
        every.setdefault(part, {name: cell[name] for name in free})
        groups.setdefault(tuple(cell[name] for name in compared), set()).add(part)
    common = set.intersection(*groups.values()) if groups else set()
    return (
        [cell for part, cell in every.items() if part in common],
        [cell for part, cell in every.items() if part not in common],
    )


def growths(frame: pandas.DataFrame, experiment: Experiment) -> list[dict]:
    """A power law for each curve of each plot with two logarithmic axes, and for each combination
    of the factors that the plot does not name; those that lack some levels of x are left out."""
    found = []
    for plot in experiment.plots:
        if plot.kind != "curve" or plot.log != "xy":
            continue
        parts = [name for name in (plot.curves, *plot.panels) if name]
        # A level of another factor that only some sizes have would bend the fit: a fit for each.
        parts += [name for name in free_factors(experiment, plot) if name not in parts]
        named = len([name for name in (plot.curves, *plot.panels) if name])
        for levels in itertools.product(*(experiment.factors[name] for name in parts)):
            where = dict(zip(parts, levels, strict=True))
            rows = rows_of(frame, where)[[plot.x, plot.y]].dropna()
            if rows.empty:
                continue
            curve = dict(list(where.items())[:named])
            every = rows_of(frame, curve)[[plot.x, plot.y]].dropna()[plot.x]
            has, compared = set(rows[plot.x]), set(every)
            lacks = [level_text(v) for v in experiment.factors[plot.x] if v in compared - has]
            if lacks:
                why = f"left out: no value at {plot.x} {', '.join(lacks)}"
                fit = statistics.Growth(None, None, None, None, None, len(rows), why)
            else:
                x = rows[plot.x].astype(float).tolist()
                fit = statistics.growth(x, rows[plot.y].tolist())
            found.append({"x": plot.x, "y": plot.y, "where": where, **dataclasses.asdict(fit)})
    return found


def published(frame: pandas.DataFrame, experiment: Experiment) -> list[dict]:
    """Figures of others beside the mean of the cells that they are comparable with."""
    found = []
    for figure in experiment.published:
        matching = [
            cell
            for cell in experiment.cells()
            if all(cell.get(name) == level for name, level in figure.match.items())
        ]
        parts = [statistics.clean(rows_of(frame, cell)[figure.measure]) for cell in matching]
        parts = [part for part in parts if part]
        values = [value for part in parts for value in part]
        if len(parts) > 1:
            # Cells differ by their factors, so their spread is no error of a mean.
            why = f"mean of {len(parts)} cells, so no interval"
            centre = statistics.mean([statistics.mean(part) for part in parts])
            ours = statistics.Interval(centre, None, None, why=why)
        else:
            ours = statistics.interval_t(values)
        known = ours.estimate is not None and figure.value != 0
        found.append(
            {
                **dataclasses.asdict(figure),
                "ours": {
                    "mean": ours.estimate,
                    "low": ours.low,
                    "high": ours.high,
                    "n": len(values),
                    "cells": len(parts),
                    "why": ours.why,
                },
                "ratio": ours.estimate / figure.value if known else None,
            }
        )
    return found


def listed_warnings(texts: list[str], more: str) -> list[str]:
    """The first few of many warnings of one kind, and how many more there are."""
    left = len(texts) - MOST_NAMED
    return texts[:MOST_NAMED] + ([f"{left} more {more}"] if left > 0 else [])


def ended_searches(run: Run, summary: dict) -> list[str]:
    """The measures that are as high as was searched in some cells, and in how many."""
    declared = workload_class(run.experiment.workload).measures
    texts = []
    for name in run.experiment.measures:
        if not (top := declared[name].top):
            continue
        tops = [run.experiment.point(part["cell"])[top] for part in summary["cells"]]
        highest = [part["measures"][name]["highest"] for part in summary["cells"]]
        ended = sum(a is not None and a >= b for a, b in zip(highest, tops, strict=True))
        if ended:
            texts.append(
                f"{name} ended at {top} in {ended} of {len(tops)} cells: it may be higher there"
            )
    return texts


def warning_texts(run: Run, summary: dict) -> list[str]:
    """What a reader must know before he uses the numbers."""
    counts, primary = summary["counts"], summary["primary"]
    texts = []
    if counts["failed"]:
        texts.append(f"{counts['failed']} point(s) failed and are in no figure")
    if counts["disturbed"]:
        texts.append(f"{counts['disturbed']} point(s) were disturbed in each attempt: in no figure")
    if counts["skipped_cells"]:
        texts.append(f"{counts['skipped_cells']} cell(s) cannot run on this machine")
    wide = [
        f"{primary} spreads by {100 * part['measures'][primary]['cv']:.0f} % of its mean in "
        f"{cell_name(part['cell'])}"
        for part in summary["cells"]
        if (part["measures"][primary]["cv"] or 0) > statistics.CV_LIMIT
    ]
    texts += listed_warnings(wide, f"cells spread by more than {100 * statistics.CV_LIMIT:.0f} %")
    noisy = [
        f"an A/A ratio of {cell_name(part['cell'])} is away from 1: "
        f"{aa['ratio']:.2f} ({aa['low']:.2f} to {aa['high']:.2f})"
        for part in summary["cells"]
        if (aa := part["measures"][primary]["aa"])["low"] is not None
        and not aa["low"] <= 1 <= aa["high"]
    ]
    texts += listed_warnings(noisy, "A/A ratios are away from 1")
    texts += ended_searches(run, summary)
    least = min((part["measures"][primary]["n"] for part in summary["cells"]), default=0)
    # The bootstrap needs values, too.
    advice = "intervals and p values are rough"
    if least >= statistics.least_for_bootstrap():
        advice = "see the bootstrap intervals of the report"
    texts += [
        f"doubtful: {check['name']} (p = {check['p']:.2g}); {advice}"
        for check in summary["checks"]
        if check["doubtful"]
    ]
    texts += [str(text) for text in run.conditions.get("warnings", [])]
    return texts


def summarise(run: Run) -> dict:
    """The object of summary.json."""
    experiment = run.experiment
    frame = run.frame()
    pooled, thinned = pooled_samples(run), thinned_samples(run)
    ranges = pooled_ranges(run)
    declared = workload_class(experiment.workload).measures
    cells = []
    for cell in experiment.cells():
        rows = rows_of(frame, cell)
        if rows.empty:
            continue
        parts = {
            measure: figures(
                statistics.clean(rows[measure]),
                pooled.get((cell_key(cell), measure), []),
                experiment.seed,
                thinned.get((cell_key(cell), measure)),
                (declared[measure].low, declared[measure].high),
            )
            for measure in experiment.measures
        }
        for measure, numbers in parts.items():
            if counts := ranges.get((cell_key(cell), measure)):
                rising = sorted(counts.items(), key=lambda item: item[0][0])
                numbers["ranges"] = [[low, high, count] for (low, high), count in rising]
        cells.append({"cell": cell, "n": len(rows), "measures": parts})
    grouped = with_set_ups(frame, experiment)
    anova, checks = analysis(grouped, experiment)
    summary = {
        "experiment": experiment.name,
        "title": experiment.title,
        "primary": experiment.primary,
        "level": statistics.LEVEL,
        "units": {name: declared[name].unit for name in experiment.measures},
        "counts": run.counts(),
        "cells": cells,
        "ratios": ratios(frame, experiment),
        "effects": effects_of(grouped, experiment),
        "anova": anova,
        "checks": checks,
        "correlations": correlations(frame, experiment),
        "growth": growths(frame, experiment),
        "published": published(frame, experiment),
    }
    summary["warnings"] = warning_texts(run, summary)
    return summary


def csv_lines(summary: dict, factors: Iterable[str]) -> str:
    """The text of summary.csv: a row for each cell and measure; unknown numbers are empty."""
    factors = list(factors)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    marks = [f"p{p:g}" for p in statistics.PERCENTILES]
    writer.writerow([*factors, "measure", "unit", *FIGURES, *marks])
    for part in summary["cells"]:
        for measure, numbers in part["measures"].items():
            known = numbers.get("percentiles", {})
            writer.writerow(
                [
                    *(part["cell"][name] for name in factors),
                    measure,
                    summary["units"][measure],
                    *(numbers[key] for key in FIGURES),
                    *(known.get(mark[1:]) for mark in marks),
                ]
            )
    return text.getvalue()


def write(run: Run, folder: Path) -> dict:
    """Writes summary.json and summary.csv into `folder`; gives the summary."""
    summary = summarise(run)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(folder / "summary.json", text + "\n")
    write_whole(folder / "summary.csv", csv_lines(summary, run.experiment.factors))
    return summary
