"""The report of a run and the comparison of two: pages that open offline, and files of plots.

`write` makes summary.json, summary.csv, plots/*.svg, plots/*.png and report.html in a folder.
`compare` makes compare.json, plots and compare.html. Both pages hold everything within themselves:
styles, drawings, no scripts, nothing from a network. Texts of experiments and runs are escaped, and
the pages' policy lets a browser load and run nothing.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import jinja2

from tombolo_lab import LabError, __version__, statistics, summary
from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment
from tombolo_lab.report import flamegraphs, plots
from tombolo_lab.results import Run, cell_key, write_whole
from tombolo_lab.tomltext import value_text

# Rows of a table beyond this number are in summary.csv only.
MOST_ROWS = 200
# Conditions that a page shows, in this order, where a run has them.
MOST_TEXT = 400


# ---- texts ---------------------------------------------------------------------------------------
def number(value: float | None, digits: int = 4) -> str:
    """A number for readers: four digits, thousands apart, a dash for what is not known."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    size = math.floor(math.log10(abs(value)))
    if size >= 7 or size < -4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}·10^{int(exponent)}"
    text = f"{value:,.{max(0, digits - 1 - size)}f}".replace(",", " ")
    return text.rstrip("0").rstrip(".") if "." in text else text


def between(low: float | None, high: float | None) -> str:
    """An interval for readers, or a dash."""
    return "–" if low is None or high is None else f"{number(low)} to {number(high)}"


def p_value(value: float | None) -> str:
    """A p value for readers."""
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def readable(value: object) -> str:
    """A value of conditions.json as one line."""
    if isinstance(value, dict):
        text = ", ".join(f"{key}: {readable(item)}" for key, item in value.items())
    elif isinstance(value, list):
        text = ", ".join(map(readable, value))
    else:
        text = "–" if value is None else str(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def environment() -> jinja2.Environment:
    """Jinja with escaping, and the functions above as filters."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        number=number, p=p_value, percent=percent, readable=readable, cell=summary.cell_name
    )
    found.globals.update(between=between, version=__version__)
    return found


# ---- the report of a run -------------------------------------------------------------------------
def flames(folder: Path) -> list[dict]:
    """Flame graphs that are in plots/*.flame.svg, as what `harmless` leaves of them."""
    found = []
    for path in sorted((folder / "plots").glob("*.flame.svg")):
        text = harmless(path.read_text(errors="replace"))
        if text:
            found.append({"name": path.name.removesuffix(".flame.svg"), "svg": text})
    return found


# What a drawing of others may consist of. Links keep their content only.
_ELEMENTS = ("svg", "g", "title", "rect", "text")
_ATTRIBUTES = (
    "x", "y", "width", "height", "rx", "ry", "fill", "viewBox", "font-size", "font-family",
    "font-weight", "text-anchor",
)  # fmt: skip
_VALUE = re.compile(r"[\w\s.,%#+'-]*|rgba?\([\d\s.,%]*\)")


def harmless(text: str) -> str:
    """An SVG drawing rebuilt of a few elements and attributes, which load and run nothing; "" where
    the text is none."""
    if "<!ENTITY" in text:
        return ""
    try:
        root = ElementTree.fromstring(text[max(text.find("<svg"), 0) :])
    except ElementTree.ParseError:
        return ""
    return _rebuilt(root) if _name(root) == "svg" else ""


def _name(element: ElementTree.Element) -> str:
    """The name of an SVG element; "" for comments and elements of other kinds."""
    if not isinstance(element.tag, str):
        return ""
    space, _, name = element.tag.rpartition("}")
    return name if space in ("", "{http://www.w3.org/2000/svg") else ""


def _rebuilt(element: ElementTree.Element) -> str:
    name = _name(element)
    if name not in (*_ELEMENTS, "a"):
        return ""
    inner = html.escape(element.text or "")
    for child in element:
        inner += _rebuilt(child) + html.escape(child.tail or "")
    if name == "a":
        return inner
    attributes = "".join(
        f' {key}="{html.escape(value)}"'
        for key, value in element.attrib.items()
        if key in _ATTRIBUTES and _VALUE.fullmatch(value)
    )
    return f"<{name}{attributes}>{inner}</{name}>"


def reasons(items: Iterable[tuple[str, Cell]]) -> list[dict]:
    """Reasons with the number of cells or points, and the first of them."""
    found: dict[str, list[Cell]] = {}
    for reason, cell in items:
        found.setdefault(reason, []).append(cell)
    return [
        {"reason": reason, "count": len(cells), "first": cells[0]}
        for reason, cells in found.items()
    ]


def tables(run: Run, found: dict) -> list[dict]:
    """A table for each measure: rows of cells with their figures."""
    declared = found["units"]
    result = []
    for measure in run.experiment.measures:
        rows = [
            {"cell": part["cell"], **part["measures"][measure]}
            for part in found["cells"]
            if part["measures"][measure]["n"]
        ]
        if rows:
            marks = sorted({p for row in rows for p in row.get("percentiles", {})}, key=float)
            result.append(
                {
                    "measure": measure,
                    "unit": declared[measure],
                    "rows": rows[:MOST_ROWS],
                    "left": max(0, len(rows) - MOST_ROWS),
                    "percentiles": marks,
                }
            )
    return result


def write(run: Run, folder: Path) -> Path:
    """Writes the report of a run into `folder`; gives the path of the page.

    LabError when no point counts. Libraries that are missing raise ModuleNotFoundError on import of
    this module.
    """
    if not run.counted():
        raise LabError(f"{run.folder}: no point counts, so there is no report")
    folder = Path(folder)
    found = summary.write(run, folder)
    drawn = plots.draw(run, found, folder)
    flamegraphs.draw(run, folder)
    experiment = run.experiment
    page = (
        environment()
        .get_template("report.html.j2")
        .render(
            run=run,
            experiment=experiment,
            summary=found,
            drawn=drawn,
            flames=flames(folder),
            tables=tables(run, found),
            most_rows=MOST_ROWS,
            factors=[
                (name, ", ".join(map(value_text, levels)))
                for name, levels in experiment.factors.items()
            ],
            fixed=[(name, value_text(value)) for name, value in experiment.fixed.items()],
            skipped=reasons((item["reason"], item["cell"]) for item in run.skipped),
            failed=reasons((p["failed"], p["cell"]) for p in run.points if "failed" in p),
            disturbed=reasons(
                (p["disturbed"], p["cell"]) for p in run.points if p.get("disturbed")
            ),
            conditions=[
                (name.replace("_", " "), value)
                for name, value in run.conditions.items()
                if name not in ("experiment", "warnings", "sessions", "hashes")
            ],
            sessions=run.conditions.get("sessions", []),
        )
    )
    path = folder / "report.html"
    write_whole(path, page)
    return path


# ---- two runs side by side -----------------------------------------------------------------------
def shared(a: Run, b: Run) -> tuple[list[Cell], list[str]]:
    """The cells and measures that both runs have; LabError when there are none."""
    if a.experiment.workload != b.experiment.workload:
        raise LabError(
            f"expected two runs of one workload, found {a.experiment.workload} ({a.folder}) and "
            f"{b.experiment.workload} ({b.folder})"
        )
    if set(a.experiment.factors) != set(b.experiment.factors):
        raise LabError(
            f"expected the same factors, found {', '.join(a.experiment.factors)} ({a.folder}) and "
            f"{', '.join(b.experiment.factors)} ({b.folder})"
        )
    known = {cell_key(cell) for cell in b.experiment.cells()}
    cells = [cell for cell in a.experiment.cells() if cell_key(cell) in known]
    measures = [name for name in a.experiment.measures if name in b.experiment.measures]
    if not cells or not measures:
        raise LabError(f"{a.folder} and {b.folder} have no cell and measure in common")
    return cells, measures


def unshared(a: Run, b: Run) -> list[dict]:
    """The cells and measures that one run has and the other has not: {run, cell, measure}, of which
    one of cell and measure is null. They are compared with nothing."""
    rows = []
    for name, run, other in (("A", a, b), ("B", b, a)):
        known = {cell_key(cell) for cell in other.experiment.cells()}
        for cell in run.experiment.cells():
            if cell_key(cell) not in known:
                rows.append({"run": name, "cell": cell, "measure": None})
        for measure in run.experiment.measures:
            if measure not in other.experiment.measures:
                rows.append({"run": name, "cell": None, "measure": measure})
    return rows


def differences(a: Run, b: Run) -> list[dict]:
    """What differs in the conditions of two runs."""
    rows = []
    left, right = a.conditions, b.conditions
    for name in [*left, *(key for key in right if key not in left)]:
        if name in ("sessions", "warnings", "experiment"):
            continue
        one, other = readable(left.get(name)), readable(right.get(name))
        if one != other:
            rows.append({"name": name.replace("_", " "), "a": one, "b": other})
    for name in sorted({*a.experiment.fixed, *b.experiment.fixed}):
        one, other = (str(r.experiment.fixed.get(name, "default")) for r in (a, b))
        if one != other:
            rows.append({"name": name, "a": one, "b": other})
    methods = method(a.experiment), method(b.experiment)
    rows += [
        {"name": name, "a": readable(one), "b": readable(methods[1][name])}
        for name, one in methods[0].items()
        if one != methods[1][name]
    ]
    return rows


def method(experiment: Experiment) -> dict[str, object]:
    """How an experiment measures, beyond its factors and fixed conditions: name → value."""
    return {
        "seed": experiment.seed,
        "order": experiment.order,
        "order together": list(experiment.together),
        "design": " ".join([experiment.design.kind, *experiment.design.generators]),
        **{f"repeat {k}": v for k, v in dataclasses.asdict(experiment.repeat).items()},
        **{f"disturbed {k}": v for k, v in dataclasses.asdict(experiment.disturbed).items()},
    }


def mean_ratio(a: list[float], b: list[float]) -> statistics.Interval:
    """The ratio of the means of two independent samples, B by A, with its interval.

    Welch's interval of the difference of logarithms: log values are nearer to normal, and the
    blocks of two runs are no pairs.
    """
    if not a or not b:
        return statistics.Interval(None, None, None, why="one run has no values")
    if min(*a, *b) <= 0:
        return statistics.Interval(None, None, None, why="a value is not positive")
    logs = [[math.log(value) for value in values] for values in (a, b)]
    found = statistics.difference(*logs)
    parts = [None if v is None else math.exp(v) for v in (found.estimate, found.low, found.high)]
    return statistics.Interval(*parts, why=found.why)


def comparison_rows(a: Run, b: Run) -> list[dict]:
    """One row for each cell and measure: both means, the ratio, and the corrected p value."""
    from tombolo_lab.model import workload_class

    cells, measures = shared(a, b)
    declared = workload_class(a.experiment.workload).measures
    frames = (a.frame(), b.frame())
    rows = []
    for cell in cells:
        for measure in measures:
            one, other = (
                statistics.clean(summary.rows_of(frame, cell)[measure]) for frame in frames
            )
            if not one and not other:
                continue
            found = mean_ratio(one, other)
            apart = statistics.difference(one, other)
            test = statistics.welch(one, other)
            noise = [statistics.aa_noise(values) for values in (one, other)]
            rows.append(
                {
                    "name": f"{measure}: {summary.cell_name(cell)}",
                    "cell": cell,
                    "measure": measure,
                    "unit": declared[measure].unit,
                    "better": declared[measure].better,
                    "a": {"n": len(one), "mean": statistics.mean(one)},
                    "b": {"n": len(other), "mean": statistics.mean(other)},
                    "ratio": found.estimate,
                    "low": found.low,
                    "high": found.high,
                    "difference": {
                        "mean": apart.estimate,
                        "low": apart.low,
                        "high": apart.high,
                    },
                    "why": found.why or test.why,
                    "p": test.p,
                    "aa": [{"ratio": n.estimate, "low": n.low, "high": n.high} for n in noise],
                }
            )
    known = [row for row in rows if row["p"] is not None]
    for row, corrected in zip(known, statistics.holm([r["p"] for r in known]), strict=True):
        row["holm"] = corrected
    for row in rows:
        row.setdefault("holm", None)
        row["significant"] = row["holm"] is not None and row["holm"] < 1 - statistics.LEVEL
        row["verdict"] = verdict(row)
    return rows


def verdict(row: dict) -> str:
    """What B is beside A: better, worse, different, not distinguishable (which is not to say that
    they are the same) or unknown. The direction is that of the means, which also a measure with
    zeros has."""
    if not row["significant"]:
        return "not distinguishable" if row["holm"] is not None else "unknown"
    if not row["better"]:
        return "different"
    grown = row["difference"]["mean"] > 0
    return "better" if grown == (row["better"] == "higher") else "worse"


def compare(a: Run, b: Run, folder: Path) -> tuple[dict, Path]:
    """Compares two runs of one workload; gives the object of compare.json and the page's path.

    Significance is Welch's test of each cell and measure at 5 %, corrected by Holm over all of
    them. LabError when the runs have nothing in common, or no point of one counts.
    """
    for run in (a, b):
        if not run.counted():
            raise LabError(f"{run.folder}: no point counts, so there is nothing to compare")
    rows = comparison_rows(a, b)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    primary = a.experiment.primary
    shown = [row for row in rows if row["measure"] == primary]
    drawn = plots.draw_ratios(
        [{**row, "name": summary.cell_name(row["cell"])} for row in shown],
        folder,
        f"{primary.replace('_', ' ')}, B by A",
    )
    value = {
        "a": str(a.folder),
        "b": str(b.folder),
        "level": statistics.LEVEL,
        "counts": {"a": a.counts(), "b": b.counts()},
        "differences": differences(a, b),
        "unshared": unshared(a, b),
        "rows": rows,
        "verdicts": {
            name: sum(row["verdict"] == name for row in rows)
            for name in ("better", "worse", "different", "not distinguishable", "unknown")
        },
    }
    write_whole(folder / "compare.json", json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    page = (
        environment()
        .get_template("compare.html.j2")
        .render(
            a=a,
            b=b,
            value=value,
            rows=rows[:MOST_ROWS],
            left=max(0, len(rows) - MOST_ROWS),
            drawn=drawn,
            most_rows=MOST_ROWS,
        )
    )
    path = folder / "compare.html"
    write_whole(path, page)
    return value, path
