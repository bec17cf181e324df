"""The plots of a report, as SVG text for the page and as SVG and PNG files.

Series differ in colour (Okabe and Ito's palette, which colour-blind readers can tell apart), marker
and line style, so that prints in grey can be read too. The same data give the same bytes: SVG files
have no dates, and their ids come from a fixed salt.

A plot with more than MOST_CURVES series is split into several figures.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tombolo_lab import statistics
from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment, Plot
from tombolo_lab.report import interactions
from tombolo_lab.report.style import (
    COLOURS,
    HATCHES,
    LINES,
    MARKERS,
    MOST_CURVES,
    MOST_LEANING,
    MOST_LEVEL,
    MOST_PANELS,
    PANEL_HEIGHT_IN,
    WIDTH_IN,
    label_of,
    logarithmic,
    panel_grid,
    range_name,
    spaced,
    where_text,
    wrapped,
)
from tombolo_lab.results import Run, cell_key
from tombolo_lab.summary import (
    common_levels,
    free_factors,
    level_text,
    pooled_ranges,
    rows_of,
    thinned_samples,
)

# Effects in one drawing.
MOST_EFFECTS = 12
# Ratios of two runs in one drawing.
MOST_RATIOS = 40
STYLE = {
    "svg.hashsalt": "tombolo-lab",
    "svg.fonttype": "path",
    # A dollar in a title or level is a dollar.
    "text.parse_math": False,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    # Nothing stands apart from the numbers of an axis: no power of ten, which would be in its label,
    # and no summand, with which no value can be read.
    "axes.formatter.limits": (-12, 12),
    "axes.formatter.useoffset": False,
}


@contextlib.contextmanager
def text_in_drawings() -> Iterator[None]:
    """Drawings within the `with` keep text as text: half as long as with the outlines of all
    letters, which look the same everywhere."""
    before = STYLE["svg.fonttype"]
    STYLE["svg.fonttype"] = "none"
    try:
        yield
    finally:
        STYLE["svg.fonttype"] = before


@dataclass(frozen=True)
class Drawn:
    """A finished plot: the stem of its files, its title, and the SVG text for the page."""

    stem: str
    title: str
    svg: str


@dataclass(frozen=True)
class Panel:
    """What one set of axes shows: the levels of the panel factors, and the curves."""

    where: Cell
    curves: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True)
class Shared:
    """The combinations of the factors that a plot does not name: those that all compared levels
    have, over which it goes, and the others, which are left out."""

    free: tuple[str, ...]
    cells: tuple[Cell, ...]
    left: tuple[Cell, ...]

    def note(self, experiment: Experiment, kind: str) -> str:
        """What a reader of the drawing must know of them; empty where all factors are named."""
        if not self.free or not (self.cells or self.left):
            return ""
        names = ", ".join(self.free)
        if not self.cells:
            return f"Nothing is drawn: no combination of {names} is at all compared levels."
        if len(self.cells) == 1:
            text = f"At {where_text(self.cells[0])} only."
        else:
            what = "Each value is the mean of the means of {} cells, so without an interval"
            if kind == "box":
                what = "Each box has the points of {} cells"
            elif kind in ("histogram", "percentiles"):
                what = "Each line has the values of {} cells together"
            text = f"{what.format(len(self.cells))}: {self.levels(experiment, self.cells)}."
        if self.left:
            left = self.levels(experiment, self.left)
            text += f" Left out, since not all compared levels have them: {left}."
        return text

    def levels(self, experiment: Experiment, cells: Sequence[Cell]) -> str:
        """Cells in words: factors whose levels all have the same others stand by themselves."""
        parts, names = [], list(cells[0])
        for name in cells[0]:
            others: dict[object, set[tuple]] = {}
            rest = [other for other in names if other != name]
            for cell in cells:
                others.setdefault(cell[name], set()).add(tuple(cell[other] for other in rest))
            if any(found != next(iter(others.values())) for found in others.values()):
                continue
            names = rest
            if len(others) == len(experiment.factors[name]):
                parts.append(f"all {len(others)} levels of {name}")
            else:
                parts.append(f"{name} {', '.join(map(level_text, others))}")
        if names:
            first = min(names, key=lambda name: len({cell[name] for cell in cells}))
            rest = [name for name in names if name != first]
            groups: dict[object, list[Cell]] = {}
            for cell in cells:
                groups.setdefault(cell[first], []).append({name: cell[name] for name in rest})
            texts = [
                f"{first} {level_text(level)} with {self.levels(experiment, group)}"
                for level, group in groups.items()
            ]
            parts.append(", or ".join(texts))
        return "; ".join(parts)


def panels_of(experiment: Experiment, plot: Plot) -> list[Panel]:
    """The panels of a plot."""
    levels = experiment.factors[plot.curves] if plot.curves else (None,)
    parts = [levels[i : i + MOST_CURVES] for i in range(0, len(levels), MOST_CURVES)]
    panels = []
    for row in itertools.product(*(experiment.factors[name] for name in plot.panels)):
        where = dict(zip(plot.panels, row, strict=True))
        for part in parts:
            curves = tuple(
                (level_text(level), {plot.curves: level}) if plot.curves else ("", {})
                for level in part
            )
            panels.append(Panel(where, curves))
    return panels


# ---- kinds ---------------------------------------------------------------------------------------
class Painter:
    """Draws the plots of one run."""

    def __init__(self, run: Run, summary: dict):
        self.run = run
        self.experiment = run.experiment
        self.summary = summary
        self.frame = run.frame()
        self.thinned = thinned_samples(run)
        self.ranges = pooled_ranges(run)
        self.samples: dict[tuple[str, str], list[float]] = {}
        for point in run.counted():
            for measure, values in point.get("samples", {}).items():
                key = (cell_key(point["cell"]), measure)
                self.samples.setdefault(key, []).extend(values)

    def values(self, where: Cell, measure: str) -> list[float]:
        return statistics.clean(rows_of(self.frame, where)[measure])

    def has_values(self, plot: Plot, panel: Panel) -> bool:
        """Whether a panel has something to show."""
        measure = plot.z or plot.y or plot.x
        if measure not in self.experiment.measures:
            return True
        return any(self.values({**panel.where, **part}, measure) for _, part in panel.curves)

    def shared(self, plot: Plot, where: Cell) -> Shared:
        """Over which cells the values of a plot's panels with these levels go."""
        measure = plot.z or plot.y or plot.x
        free = free_factors(self.experiment, plot)
        compared = [n for n in (plot.x, plot.y, plot.curves) if n in self.experiment.factors]
        cells = [
            part["cell"]
            for part in self.summary["cells"]
            if where.items() <= part["cell"].items()
            and part["measures"].get(measure, {}).get("mean") is not None
        ]
        common, left = common_levels(cells, compared, free)
        return Shared(tuple(free), tuple(common), tuple(left))

    def value(self, shared: Shared, where: Cell, measure: str) -> statistics.Interval | None:
        """The mean of the measure with its interval; of several cells the mean of their means,
        which has none: cells differ by their factors, so their spread is no error of a mean."""
        found = []
        for part in self.summary["cells"]:
            numbers, cell = part["measures"][measure], part["cell"]
            if numbers["mean"] is None or not where.items() <= cell.items():
                continue
            if {name: cell[name] for name in shared.free} in shared.cells:
                found.append(numbers)
        if len(found) == 1:
            return statistics.Interval(*(found[0][key] for key in ("mean", "low", "high")))
        if not found:
            return None
        return statistics.Interval(statistics.mean([n["mean"] for n in found]), None, None)

    def mean(self, where: Cell, measure: str) -> statistics.Interval | None:
        """As `value`, over all cells that agree with `where`."""
        return self.value(Shared((), ({},), ()), where, measure)

    def least_kept(self, where: Cell, measure: str) -> int | None:
        """The fewest samples of a point of these cells that kept a part of its values only."""
        found = [
            count
            for (key, name), count in self.thinned.items()
            if name == measure and where.items() <= json.loads(key).items()
        ]
        return min(found, default=None)

    def label(self, name: str) -> str:
        return label_of(self.experiment, self.summary["units"], name)

    @staticmethod
    def line(
        axes: Axes,
        index: int,
        name: str,
        points: Sequence[tuple[float, statistics.Interval]],
        least: float = -math.inf,
        joined: bool = True,
    ) -> None:
        """Points in the style of a number, with a line through them if they are `joined`, and their
        intervals from `least` on. A point without an interval has no whisker: one of no length
        would be taken for a certain value."""
        spread = None
        if any(p.low is not None for _, p in points):
            # Half of it is out of sight, so that no cap looks like the end of the interval.
            lows = [math.nan if p.low is None else max(p.low, least / 2) for _, p in points]
            spread = [
                [p.estimate - low for (_, p), low in zip(points, lows, strict=True)],
                [p.high - p.estimate if p.high is not None else math.nan for _, p in points],
            ]
        axes.errorbar(
            [x for x, _ in points],
            [p.estimate for _, p in points],
            yerr=spread,
            label=name,
            color=COLOURS[index],
            marker=MARKERS[index],
            linestyle=LINES[index] if joined else "none",
            markersize=4,
            linewidth=1.3,
            capsize=2,
        )

    def curve(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        levels = self.experiment.factors[plot.x]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in levels)
        shared, least = self.shared(plot, panel.where), self.least(plot)
        for index, (name, part) in enumerate(panel.curves):
            points = []
            for place, level in enumerate(levels):
                found = self.value(shared, {**panel.where, **part, plot.x: level}, plot.y)
                if found:
                    points.append((level if numeric else place, found))
            if points:
                self.line(axes, index, name, points, least)
        if not numeric:
            self.categories(axes, plot, levels)
            return
        if "x" in plot.log and min(levels) > 0:
            logarithmic(axes, "x")
            if len(levels) <= MOST_LEVEL:
                columns = axes.get_subplotspec().get_gridspec().ncols
                axes.set_xticks(*spaced(levels, columns))
                axes.minorticks_off()
        self.finish(axes, plot, plot.x, plot.y)

    def finish(self, axes: Axes, plot: Plot, x: str, y: str) -> None:
        axes.set_xlabel(self.label(x))
        axes.set_ylabel(wrapped(self.label(y), 26))
        if self.is_log(plot):
            logarithmic(axes, "y")

    def is_log(self, plot: Plot) -> bool:
        """Whether the axis of the measure is logarithmic: it is the same for all panels, and only
        where no value is zero or less."""
        return "y" in plot.log and all(value > 0 for value in self.values({}, plot.y))

    def least(self, plot: Plot) -> float:
        """Where a logarithmic axis begins at the lowest: at a third of the least value. Intervals
        that reach lower leave it there. Nowhere for other axes."""
        values = self.values({}, plot.y)
        return min(values) / 3 if values and self.is_log(plot) else -math.inf

    @staticmethod
    def ground(panels: Sequence[Axes], least: float) -> None:
        """Begins axes at zero where that is near, and logarithmic ones at `least` where intervals
        reach lower. Only when all panels are drawn: a limit that is set keeps panels that share the
        axis from growing it."""
        for axes in panels:
            low, high = axes.get_ylim()
            if axes.get_yscale() == "linear" and 0 < low < 0.6 * high:
                axes.set_ylim(bottom=0)
            elif axes.get_yscale() == "log" and low < least:
                axes.set_ylim(bottom=least)

    def bars(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        """Bars with their intervals. A logarithmic axis has no zero that a bar could begin at:
        there are marks on it."""
        levels = self.experiment.factors[plot.x]
        width = 0.8 / len(panel.curves)
        shared = self.shared(plot, panel.where)
        is_log, least = self.is_log(plot), self.least(plot)
        for index, (name, part) in enumerate(panel.curves):
            points = []
            for place, level in enumerate(levels):
                found = self.value(shared, {**panel.where, **part, plot.x: level}, plot.y)
                if found:
                    at = place + (index - (len(panel.curves) - 1) / 2) * width
                    points.append((at, found))
            if is_log and points:
                self.line(axes, index, name, points, least, joined=False)
            for number, (at, found) in enumerate([] if is_log else points):
                error = None
                if found.low is not None:
                    error = [[found.estimate - found.low], [found.high - found.estimate]]
                axes.bar(
                    at,
                    found.estimate,
                    width * 0.92,
                    yerr=error,
                    capsize=2,
                    color=COLOURS[index] if len(panel.curves) > 1 else COLOURS[1],
                    edgecolor="white",
                    hatch=HATCHES[index],
                    label=None if number else name,
                    error_kw={"ecolor": "#555555", "elinewidth": 1},
                )
        if is_log and len(panel.curves) > 1:
            for place in range(1, len(levels)):
                axes.axvline(place - 0.5, color="#DDDDDD", linewidth=0.8, zorder=0)
        self.categories(axes, plot, levels)

    def categories(self, axes: Axes, plot: Plot, levels: Sequence) -> None:
        many = len(levels) > MOST_LEVEL
        columns = axes.get_subplotspec().get_gridspec().ncols
        width = 22 if many else max(9, 84 // (len(levels) * columns))
        if len(levels) > MOST_LEANING:
            # There is no room for a second line.
            width = 40
        texts = [wrapped(level_text(level), width) for level in levels]
        # Labels that lean lie on each other where there are many, and sooner those of several lines.
        lines = max(text.count("\n") + 1 for text in texts)
        on_end = many and len(levels) * lines > MOST_LEANING
        room_pt = 72 * 0.8 * WIDTH_IN / columns / len(levels) / lines
        axes.set_xticks(
            range(len(levels)),
            texts,
            fontsize=min(STYLE["font.size"], room_pt / 1.2) if on_end else STYLE["font.size"],
            rotation=(90 if on_end else 60) if many else 0,
            ha="right" if many else "center",
            va="center" if on_end else "top",
            rotation_mode="anchor" if many else "default",
        )
        axes.grid(axis="x", visible=False)
        self.finish(axes, plot, plot.x, plot.y)

    def box(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        levels = self.experiment.factors[plot.x]
        width = 0.8 / len(panel.curves)
        shared = self.shared(plot, panel.where)
        for index, (name, part) in enumerate(panel.curves):
            for place, level in enumerate(levels):
                where = {**panel.where, **part, plot.x: level}
                values = [v for c in shared.cells for v in self.values({**where, **c}, plot.y)]
                at = place + (index - (len(panel.curves) - 1) / 2) * width
                if not values:
                    continue
                axes.boxplot(
                    [values],
                    positions=[at],
                    widths=width * 0.8,
                    manage_ticks=False,
                    medianprops={"color": COLOURS[index], "linewidth": 2},
                    flierprops={"marker": MARKERS[index], "markersize": 3},
                )
            axes.plot([], [], color=COLOURS[index], marker=MARKERS[index], label=name or None)
        self.categories(axes, plot, levels)

    def matching(self, shared: Shared, where: Cell) -> Iterator[str]:
        """The keys of the cells that agree with `where` and are among the shared ones."""
        for cell in self.experiment.cells():
            if not all(cell[name] == level for name, level in where.items()):
                continue
            if {name: cell[name] for name in shared.free} in shared.cells:
                yield cell_key(cell)

    def raw(self, shared: Shared, where: Cell, measure: str) -> list[float]:
        """All samples of the cells that agree with `where`, or their values without samples."""
        keys = self.matching(shared, where)
        found = [v for key in keys for v in self.samples.get((key, measure), [])]
        return found or [v for c in shared.cells for v in self.values({**where, **c}, measure)]

    def counted_ranges(self, axes: Axes, plot: Plot, panel: Panel) -> bool:
        """Draws a histogram of what was counted by range, as parts of all; False where nothing was.
        A range is as wide on the axis as any other."""
        shared = self.shared(plot, panel.where)
        data = []
        for name, part in panel.curves:
            counts: Counter[tuple[int, int | None]] = Counter()
            for key in self.matching(shared, {**panel.where, **part}):
                counts.update(self.ranges.get((key, plot.x), {}))
            data.append((name, counts))
        seen = sorted(low for _, counts in data for (low, _), count in counts.items() if count)
        if not seen:
            return False
        # Empty ranges between others stay, so that the axis has no gap.
        every = sorted({of for _, counts in data for of in counts}, key=lambda of: of[0])
        every = [each for each in every if seen[0] <= each[0] <= seen[-1]]
        for index, (name, counts) in enumerate(data):
            if total := counts.total():
                axes.plot(
                    range(len(every)),
                    [100 * counts[each] / total for each in every],
                    label=name,
                    color=COLOURS[index],
                    marker=MARKERS[index],
                    linestyle=LINES[index],
                    markersize=4,
                    linewidth=1.3,
                )
        axes.set_xticks(range(len(every)), [range_name(*each) for each in every])
        axes.grid(axis="x", visible=False)
        if "y" in plot.log:
            logarithmic(axes, "y")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(self.label(plot.x))
        axes.set_ylabel("part of all (%)")
        return True

    def histogram(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        if self.counted_ranges(axes, plot, panel):
            return
        shared, at = self.shared(plot, panel.where), panel.where
        data = [(name, self.raw(shared, {**at, **part}, plot.x)) for name, part in panel.curves]
        every = [value for _, values in data for value in values]
        if every and max(every) > min(every):
            low, high = min(every), max(every)
            if "x" in plot.log and low > 0:
                bins = numpy.geomspace(low, high, 31)
                logarithmic(axes, "x")
            else:
                bins = numpy.linspace(low, high, 31)
        else:
            bins = 1
        for index, (name, values) in enumerate(data):
            if values:
                axes.hist(
                    values,
                    bins=bins,
                    histtype="step",
                    color=COLOURS[index],
                    linestyle=LINES[index],
                    linewidth=1.4,
                    label=name,
                )
        if "y" in plot.log:
            logarithmic(axes, "y")
        axes.set_xlabel(self.label(plot.x))
        axes.set_ylabel("values")

    def percentiles(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        """Value by percentile, the axis stretched towards 100 %: -log10(1 - p)."""
        deepest = 1.0
        shared = self.shared(plot, panel.where)
        for index, (name, part) in enumerate(panel.curves):
            values = sorted(self.raw(shared, {**panel.where, **part}, plot.y))
            if len(values) < 2:
                continue
            ranks = (numpy.arange(len(values)) + 0.5) / len(values)
            # Thousands of points in the middle look like a few hundred.
            if len(values) > 400:
                steps = numpy.geomspace(1, len(values), 400)
                keep = sorted({len(values) - 1 - int(v) for v in steps if v <= len(values) - 1})
                keep.append(len(values) - 1)
            else:
                keep = list(range(len(values)))
            where = {**panel.where, **part}
            kept = [self.least_kept({**where, **cell}, plot.y) for cell in shared.cells]
            if least := min((count for count in kept if count), default=None):
                # Evenly spaced ranks of points tell nothing beyond the last but one.
                keep = [i for i in keep if 1 - ranks[i] >= 1 / least] or keep[:1]
            x = [-math.log10(1 - ranks[i]) for i in keep]
            deepest = max(deepest, x[-1])
            axes.plot(
                x,
                [values[i] for i in keep],
                color=COLOURS[index],
                linestyle=LINES[index],
                linewidth=1.4,
                label=name,
            )
        marks = [p for p in (50, 90, 99, 99.9, 99.99) if -math.log10(1 - p / 100) <= deepest * 1.05]
        axes.set_xticks([-math.log10(1 - p / 100) for p in marks], [f"{p:g} %" for p in marks])
        axes.set_xlim(left=0)
        axes.set_xlabel("percentile")
        axes.set_ylabel(wrapped(self.label(plot.y), 26))
        if "y" in plot.log and axes.dataLim.y0 > 0:
            logarithmic(axes, "y")

    def heat(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        xs, ys = self.experiment.factors[plot.x], self.experiment.factors[plot.y]
        grid = numpy.full((len(ys), len(xs)), numpy.nan)
        shared = self.shared(plot, panel.where)
        for (i, y), (j, x) in itertools.product(enumerate(ys), enumerate(xs)):
            found = self.value(shared, {**panel.where, plot.x: x, plot.y: y}, plot.z)
            if found:
                grid[i, j] = found.estimate
        image = axes.imshow(grid, aspect="auto", origin="lower", cmap="cividis")
        bar = axes.figure.colorbar(image, ax=axes)
        bar.set_label(self.label(plot.z))
        axes.set_xticks(range(len(xs)), [level_text(x) for x in xs], rotation=60 * (len(xs) > 8))
        axes.set_yticks(range(len(ys)), [wrapped(level_text(y), 22) for y in ys])
        axes.grid(visible=False)
        axes.set_xlabel(self.label(plot.x))
        axes.set_ylabel(self.label(plot.y))
        if grid.size > 80 or numpy.isnan(grid).all():
            return
        middle = (numpy.nanmin(grid) + numpy.nanmax(grid)) / 2
        for (i, j), value in numpy.ndenumerate(grid):
            if not math.isnan(value):
                colour = "white" if value < middle else "black"
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=7)

    def effects(self, axes: Axes, plot: Plot, panel: Panel) -> None:
        """Effects with their intervals, the largest on top; where there are none, main-effect
        means."""
        found = (self.summary["effects"] or {"measures": {}})["measures"].get(plot.y)
        every = [e for e in found["effects"] if e["name"] != "I"] if found else []
        rows = every[:MOST_EFFECTS]
        for place, effect in enumerate(reversed(rows)):
            error = None
            if effect["low"] is not None:
                error = [[effect["q"] - effect["low"]], [effect["high"] - effect["q"]]]
            good = effect["significant"]
            axes.errorbar(
                effect["q"],
                place,
                xerr=error,
                marker="o" if good else "s",
                mfc=COLOURS[1] if good else "white",
                color=COLOURS[1] if good else "#777777",
                capsize=2,
            )
        if not rows:
            why = (found or {}).get("why") or "the factors have not two levels each"
            axes.text(0.5, 0.5, f"no effects: {why}", ha="center", transform=axes.transAxes)
        names = [wrapped(" × ".join(e["factors"]), 34) for e in reversed(rows)]
        axes.set_yticks(range(len(rows)), names)
        axes.axvline(0, color="#555555", linewidth=0.8)
        # Few enough for numbers such as -0.000025.
        axes.locator_params(axis="x", nbins=5)
        text = f"effect on {self.label(plot.y)}: half the change from low to high"
        if len(every) > len(rows):
            text += f"; the {len(rows)} largest of {len(every)}"
        axes.set_xlabel(text)
        axes.grid(axis="y", visible=False)

    # ---- whole plots -----------------------------------------------------------------------------
    @staticmethod
    def stem(number: int, plot: Plot) -> str:
        """The name of a plot's files, without what tells its figures apart."""
        name = f"{number:02}-{plot.kind}-{plot.z or plot.y or plot.x}"
        return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")

    def figures(self, number: int, plot: Plot) -> Iterator[tuple[str, str, Figure]]:
        """Stem, title and figure of each figure of a plot."""
        title = plot.title or self.experiment.title
        if plot.kind == "interactions":
            yield self.stem(number, plot), title, interactions.draw(self, plot)
            return
        averaged = free_factors(self.experiment, plot)
        if averaged and plot.kind != "effects":
            title += f" (over levels of {', '.join(averaged)}: see its note)"
        every = panels_of(self.experiment, plot)
        # One without a value would show nothing but its axes.
        shown = [panel for panel in every if self.has_values(plot, panel)] or every
        groups = [shown[at : at + MOST_PANELS] for at in range(0, len(shown), MOST_PANELS)]
        for part, panels in enumerate(groups):
            columns = 1 if len(panels) == 1 or plot.kind in ("effects", "heat") else 2
            height = PANEL_HEIGHT_IN
            if plot.kind == "effects":
                height = 1.2 + 0.28 * MOST_EFFECTS
            elif plot.kind in ("bars", "box", "curve"):
                # Rotated names need room.
                height += 1.2 * (len(self.experiment.factors[plot.x]) > MOST_LEVEL)
            is_shared = plot.kind in ("curve", "bars", "box")
            figure, every_axes = panel_grid(len(panels), columns, height, sharey=is_shared)
            for axes, panel in zip(every_axes, panels, strict=True):
                getattr(self, plot.kind)(axes, plot, panel)
                if panel.where:
                    axes.set_title(wrapped(where_text(panel.where), 44), fontsize=9)
            if is_shared:
                self.ground(every_axes, self.least(plot))
            below = self.note(figure, plot, panels)
            self.legend(figure, every_axes, plot, below)
            suffix = f"-{part + 1}" if len(groups) > 1 else ""
            yield self.stem(number, plot) + suffix, title, figure

    def note(self, figure: Figure, plot: Plot, panels: Sequence[Panel]) -> float:
        """Says below the panels over which cells their values go; gives its height in inches."""
        if plot.kind == "effects":
            return 0.0
        texts: dict[str, list[str]] = {}
        for panel in panels:
            text = self.shared(plot, panel.where).note(self.experiment, plot.kind)
            names = texts.setdefault(text, [])
            if (name := where_text(panel.where)) not in names:
                names.append(name)
        named = len(texts) > 1
        lines = [
            line
            for text, names in texts.items()
            if text
            for line in textwrap.wrap(f"{'; '.join(names)}: {text}" if named else text, 100)
        ]
        return self.below(figure, lines)

    @staticmethod
    def below(figure: Figure, lines: Sequence[str]) -> float:
        """Writes lines below the panels of a figure; gives their height in inches."""
        if not lines:
            return 0.0
        inches = 0.1 + 0.14 * len(lines)
        height = figure.get_figheight() + inches
        figure.set_figheight(height)
        figure.get_layout_engine().set(rect=(0, inches / height, 1, 1 - inches / height))
        figure.text(0.01, 0.01, "\n".join(lines), fontsize=8, color="#333333", va="bottom")
        return inches

    def legend(self, figure: Figure, axes: Sequence[Axes], plot: Plot, below: float) -> None:
        """One legend above the panels, with each series once. `below`: inches of the note."""
        entries: dict[str, object] = {}
        for each in axes:
            for handle, name in zip(*each.get_legend_handles_labels(), strict=True):
                entries.setdefault(name, handle)
        entries.pop("", None)
        if not entries or plot.curves is None:
            return
        names = [wrapped(name, 28) for name in entries]
        widest = max(len(line) for name in names for line in name.split("\n"))
        columns = min(len(names), max(1, 96 // (8 + widest)))
        # Matplotlib fills columns from top to bottom; the highest column counts.
        depth = math.ceil(len(names) / columns)
        lines = [1 + name.count("\n") for name in names]
        highest = max(sum(lines[i : i + depth]) for i in range(0, len(lines), depth))
        inches = 0.3 + 0.15 * highest
        height = figure.get_figheight() + inches
        figure.set_figheight(height)
        # Room above the panels; "outside" placements came with Matplotlib 3.7 only.
        figure.get_layout_engine().set(
            rect=(0, below / height, 1, 1 - (inches + below) / height)
        )
        figure.legend(
            list(entries.values()),
            names,
            loc="upper center",
            bbox_to_anchor=(0.5, 1.0),
            borderaxespad=0.1,
            ncol=columns,
            title=self.label(plot.curves),
            fontsize=8,
            title_fontsize=8,
        )


def svg_text(figure: Figure, prefix: str) -> str:
    """A figure as an SVG element whose ids do not meet those of other figures of a page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'(xlink:href="|url\()#', rf"\1#{prefix}-", text)
    # The page sets the width; the view box keeps the shape.
    text = re.sub(r'(<svg[^>]*?) width="[^"]+"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]+"', r"\1", text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def default_plots(experiment: Experiment) -> tuple[Plot, ...]:
    """The plots of an experiment that names none: the primary measure by its first factor."""
    if experiment.plots:
        return experiment.plots
    first, *others = experiment.factors
    numeric = all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in experiment.factors[first]
    )
    kind = "curve" if numeric else "bars"
    curves = others[0] if others else None
    return (Plot(kind, x=first, y=experiment.primary, curves=curves),)


def draw(run: Run, summary: dict, folder: Path) -> list[Drawn]:
    """Draws all plots of a run; writes plots/STEM.svg and plots/STEM.png, in place of those of an
    earlier report, which may have been more."""
    drawn = []
    target = folder / "plots"
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob("[0-9][0-9]-*.svg"), *target.glob("[0-9][0-9]-*.png")):
        old.unlink()
    with matplotlib.rc_context(STYLE):
        painter = Painter(run, summary)
        for number, plot in enumerate(default_plots(run.experiment), 1):
            for stem, title, figure in painter.figures(number, plot):
                try:
                    metadata = {"Date": None, "Creator": None}
                    figure.savefig(target / f"{stem}.svg", format="svg", metadata=metadata)
                    figure.savefig(target / f"{stem}.png", format="png", metadata={"Software": ""})
                    drawn.append(Drawn(stem, title, svg_text(figure, f"p{len(drawn)}")))
                finally:
                    pyplot.close(figure)
    return drawn


def draw_ratios(rows: Sequence[dict], folder: Path, title: str) -> Drawn | None:
    """The ratios of two runs as a forest plot: rows of {name, ratio, low, high, significant}."""
    every = [row for row in rows if row["ratio"] is not None]
    if not every:
        return None
    known = every[:MOST_RATIOS]
    if len(every) > len(known):
        title += f" (the first {len(known)} of {len(every)}; the others are in the table)"
    if len(rows) > len(every):
        title += f" ({len(rows) - len(every)} without a ratio are not drawn)"
    target = folder / "plots"
    target.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            figsize=(WIDTH_IN, 1.2 + 0.3 * len(known)), constrained_layout=True
        )
        for place, row in enumerate(reversed(known)):
            error = None
            if row["low"] is not None:
                error = [[row["ratio"] - row["low"]], [row["high"] - row["ratio"]]]
            colour = COLOURS[2] if row["significant"] else "#777777"
            axes.errorbar(
                row["ratio"],
                place,
                xerr=error,
                marker="o" if row["significant"] else "s",
                mfc=colour if row["significant"] else "white",
                color=colour,
                capsize=2,
            )
        axes.axvline(1, color="#555555", linewidth=0.8)
        names = [wrapped(row["name"], 44) for row in reversed(known)]
        axes.set_yticks(range(len(known)), names, fontsize=8)
        axes.set_xlabel("B by A, with its interval; filled: significant after Holm's correction")
        axes.grid(axis="y", visible=False)
        figure.savefig(target / "ratios.svg", format="svg", metadata={"Date": None})
        figure.savefig(target / "ratios.png", format="png", metadata={"Software": ""})
        text = svg_text(figure, "r")
        pyplot.close(figure)
    return Drawn("ratios", title, text)
