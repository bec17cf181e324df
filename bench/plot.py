"""Plots of the benches' results as SVG, by gnuplot."""

import subprocess

from common import BenchError


def svg(path, title, xlabel, ylabel, curves, logscale="", extra=()):
    """Writes a plot. `curves` are (name, style, rows): rows of (x, y) or (x, y, low, high), which are drawn with error bars; a style is how gnuplot
    draws the curve (`lines`, `dots`, `filledcurves` for rows of (x, low, high)), or None for points joined by lines. A curve without a name is not in the
    legend. `logscale` names the axes that are logarithmic."""
    blocks, plots = [], []
    for number, (name, style, rows) in enumerate(curves):
        blocks += [f"$d{number} << end", *(" ".join(f"{value:.9g}" for value in row) for row in rows), "end"]
        drawn = style or ("yerrorlines" if len(rows[0]) == 4 else "linespoints")
        plots.append(f"$d{number} with {drawn} " + (f"title '{name}'" if name else "notitle"))
    script = [
        "set encoding utf8",
        "set terminal svg size 900,540 dynamic background rgb 'white' font 'sans-serif,13'",
        f"set output '{path}'",
        f"set title '{title}'",
        f"set xlabel '{xlabel}'",
        f"set ylabel '{ylabel}'",
        "set key left top",
        "set grid",
        *([f"set logscale {logscale}"] if logscale else []),
        *extra,
        *blocks,
        "plot " + ", ".join(plots),
    ]
    try:
        done = subprocess.run(["gnuplot"], input="\n".join(script) + "\n", capture_output=True, text=True)
    except FileNotFoundError as error:
        raise BenchError("no gnuplot: ./x setup plot installs it") from error
    if done.returncode or done.stderr.strip():
        raise BenchError(f"gnuplot: {done.stderr.strip()}")
