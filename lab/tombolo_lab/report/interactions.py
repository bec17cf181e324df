"""The plot of interactions: the means of a measure at the levels of two factors of a two-level
design, a panel for each of the strongest pairs.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tombolo_lab.model import Plot
from tombolo_lab.report.style import MOST_PANELS, PANEL_HEIGHT_IN, panel_grid, where_text, wrapped
from tombolo_lab.summary import level_text

if TYPE_CHECKING:
    from tombolo_lab.report.plots import Painter


def pair(painter: Painter, axes: Axes, plot: Plot, effect: dict) -> None:
    """The interaction of two factors: the means of the measure at their levels."""
    first, second = effect["factors"]
    for index, level in enumerate(painter.experiment.factors[second]):
        points = [
            (place, painter.mean({first: other, second: level}, plot.y))
            for place, other in enumerate(painter.experiment.factors[first])
        ]
        painter.line(axes, index, where_text({second: level}), points)
    levels = painter.experiment.factors[first]
    axes.set_xticks(range(len(levels)), [wrapped(level_text(level), 22) for level in levels])
    axes.set_xlim(-0.3, len(levels) - 0.7)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(painter.label(first))
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel(wrapped(painter.label(plot.y), 26))
    share, p = effect["share"], effect["holm"]
    text = f"{wrapped(f'{first} × {second}', 40)}\n"
    text += "no variation" if share is None else f"{100 * share:.1f} % of the variation"
    if p is not None:
        good = "" if effect["significant"] else "not "
        text += f", {'p < 0.001' if p < 0.001 else f'p = {p:.3f}'}: {good}significant"
    # The title is the legend's, so that the two are never on each other.
    legend = axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncol=2,
        title=text,
        fontsize=8,
        title_fontsize=8,
        columnspacing=1.2,
    )
    legend.get_title().set(
        multialignment="center", fontweight="bold" if effect["significant"] else "normal"
    )


def draw(painter: Painter, plot: Plot) -> Figure:
    """The strongest interactions of two factors, a panel for each."""
    found = (painter.summary["effects"] or {"measures": {}})["measures"].get(plot.y)
    every = [e for e in found["effects"] if len(e["factors"]) == 2] if found else []
    pairs = every[:MOST_PANELS]
    columns = 2 if len(pairs) > 1 else 1
    figure, every_axes = panel_grid(len(pairs), columns, PANEL_HEIGHT_IN, sharey=True)
    for axes, effect in zip(every_axes, pairs, strict=True):
        pair(painter, axes, plot, effect)
    if not pairs:
        why = "the plan cannot tell them from single factors"
        if not found or not found["effects"]:
            why = (found or {}).get("why") or "the factors have not two levels each"
        figure.text(0.5, 0.5, f"no interactions: {why}", ha="center")
        return figure
    painter.ground(every_axes, painter.least(plot))
    notes = [
        "Lines that are not parallel are an interaction.",
        "Bold: significant after Holm's correction over all effects on the measure.",
    ]
    if len(every) > len(pairs):
        notes.insert(0, f"The {len(pairs)} largest of {len(every)} interactions of two.")
    # Each level of a pair has a half of the cells.
    if (cells := len(painter.summary["cells"]) // 4) > 1:
        notes.append(f"Each value is the mean of the means of {cells} cells: no interval.")
    if painter.experiment.fraction:
        notes.append("An interaction cannot be told from its aliases, which the table has.")
    painter.below(figure, textwrap.wrap(" ".join(notes), 100))
    return figure
