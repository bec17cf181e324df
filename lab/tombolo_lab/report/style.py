"""What the drawings of a report share: colours, markers, sizes, and the texts of labels."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib import pyplot, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment, workload_class
from tombolo_lab.summary import level_text

# Okabe and Ito 2008, "Color universal design"; black first, and grey in place of yellow, which is
# too light for lines on white.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8A8A8A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2, 1, 2)))
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MOST_CURVES = len(COLOURS)
# Panels of one figure; more make another figure.
MOST_PANELS = 6
# More names than this under an axis are rotated.
MOST_LEVEL = 8
# And more than this stand on end; a name of two lines counts twice.
MOST_LEANING = 20
WIDTH_IN, PANEL_HEIGHT_IN = 7.0, 2.9


def wrapped(text: str, width: int = 18) -> str:
    """A label in lines of at most `width` characters, at most three of them. Words of up to 26
    characters, such as names of kernel settings, are not broken."""
    width = max(width, min(26, max(map(len, text.split()), default=0)))
    lines = textwrap.wrap(text, width, max_lines=3, placeholder="…") or [""]
    return "\n".join(lines)


def label_of(experiment: Experiment, units: dict[str, str], name: str) -> str:
    """An axis label: the name with its unit."""
    workload = workload_class(experiment.workload)
    unit = units.get(name)
    if unit is None and name in workload.parameters:
        unit = workload.parameters[name].unit
    return f"{name.replace('_', ' ')} ({unit})" if unit else name.replace("_", " ")


def range_name(low: int, high: int | None) -> str:
    """A range of whole numbers in words; `high` is None for one without an end."""
    if high is None:
        return f"{low} or more"
    return str(low) if low == high else f"{low}–{high}"


def panel_grid(
    count: int, columns: int, height_in: float, *, sharey: bool
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels in rows of `columns`, each of that height in inches; what is
    left of the last row is empty."""
    rows = max(1, math.ceil(count / columns))
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(WIDTH_IN, height_in * rows),
        squeeze=False,
        constrained_layout=True,
        sharey=sharey,
    )
    flat = list(grid.flat)
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def where_text(cell: Cell) -> str:
    return ", ".join(f"{name} {level_text(level)}" for name, level in cell.items())


def logarithmic(axes: Axes, which: str) -> None:
    """Makes an axis logarithmic, with plain numbers: the usual ones are written for a parser of
    formulas, which is off, since a dollar in a name is a dollar."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}scale": "log"})
    axis.set_major_formatter(ticker.LogFormatter())
    axis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1, 0.4)))


def brief(level: float) -> str:
    """A number of a few characters: 100k and 1.07G."""
    level = float(f"{level:.3g}") if abs(level) >= 1e5 else level
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(level) >= size:
            return f"{level / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{level:g}"


def spaced(levels: Sequence[float], columns: int) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis and their texts, without texts that would touch in a panel that
    is one of `columns` beside each other."""
    span = math.log(max(levels) / min(levels)) or 1
    ticks, texts, last = sorted(levels), [], -math.inf
    for level in ticks:
        place = math.log(level / ticks[0]) / span
        shown = place - last > 0.02 + 0.06 * columns
        texts.append(brief(level) if shown else "")
        last = place if shown else last
    return ticks, texts
