"""Puts runs into the documentation: a page with their figures, and the files that it shows.

    python3 -m tombolo_lab.publish docs/results/lab RUN…

For each run the page has its command, conditions and counts, the primary measure of each cell with
its interval, figures of others, and the plots. `summary.csv` of each run is copied; raw points are
not. Sections of other experiments that the page has already stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tombolo_lab import LabError, report, summary
from tombolo_lab.report import plots
from tombolo_lab.results import Run

# More cells than this are in the CSV only.
MOST_ROWS = 40


def warnings(found: dict) -> list[str]:
    """What a reader must know before the figures, as the report has it."""
    if not found["warnings"]:
        return []
    # No warning begins another block or table of the page.
    texts = [" ".join(text.split()).replace("|", "\\|") for text in found["warnings"]]
    return ["Read this first:", "", *[f"- {text}" for text in texts], ""]


def cells_table(found: dict) -> list[str]:
    """The primary measure of each cell as a Markdown table."""
    primary = found["primary"]
    unit = found["units"][primary]
    lines = [f"| cell | {primary}{f' ({unit})' if unit else ''} | 95 % interval | n | A/A |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for part in found["cells"][:MOST_ROWS]:
        numbers = part["measures"][primary]
        lines.append(
            f"| {summary.cell_name(part['cell'])} | {report.number(numbers['mean'])} | "
            f"{report.between(numbers['low'], numbers['high'])} | {numbers['n']} | "
            f"{report.number(numbers['aa']['ratio'], 3)} |"
        )
    left = len(found["cells"]) - MOST_ROWS
    return [*lines, "", f"{left} more cells are in the CSV."] if left > 0 else lines


def effects_table(found: dict) -> list[str]:
    """The effects on the primary measure, those that are significant after Holm's correction."""
    part = (found["effects"] or {"measures": {}})["measures"].get(found["primary"])
    if not part or not part["effects"]:
        return []
    lines = ["", "| effect | q | 95 % interval | p (Holm) | share |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for effect in part["effects"]:
        if effect["name"] == "I" or effect["significant"]:
            name = " × ".join(effect["factors"]) or "mean"
            lines.append(
                f"| {name} | {report.number(effect['q'])} | "
                f"{report.between(effect['low'], effect['high'])} | "
                f"{report.p_value(effect['holm'])} | {report.percent(effect['share'])} |"
            )
    return lines


def published_table(found: dict) -> list[str]:
    """Figures of others beside ours."""
    if not found["published"]:
        return []
    lines = ["", "| figure of others | theirs | ours | what differs |", "| --- | --- | --- | --- |"]
    for item in found["published"]:
        ours = item["ours"]
        interval = report.between(ours["low"], ours["high"])
        interval = ours["why"] if ours["low"] is None and ours["why"] else interval
        lines.append(
            f"| {item['label']}, {item['measure']} | {report.number(item['value'])} | "
            f"{report.number(ours['mean'])} ({interval}) | {item['differs']} |"
        )
    return lines


def others(found: dict) -> list[str]:
    """Correlations and growth, one line each."""
    lines = []
    for item in found["correlations"]:
        if item["coefficient"] is not None:
            lines.append(
                f"- {item['kind']}'s correlation of {item['x']} and {item['y']}: "
                f"{item['coefficient']:.4f} ({report.between(item['low'], item['high'])})"
            )
    for item in found["growth"]:
        if item["exponent"] is not None:
            where = f", {summary.cell_name(item['where'])}" if item["where"] else ""
            lines.append(
                f"- {item['y']} grows with {item['x']}{where} by the power "
                f"{item['exponent']:.3f} ({report.between(item['low'], item['high'])})"
            )
    return ["", *lines] if lines else []


# Columns of summary.csv that follow from others or from the raw points.
_LEFT_OUT = ("deviation", "cv", "boot_low", "boot_high")
# Of no use to readers, or said more briefly: metadata, names to which nothing refers, decimals
# beyond a hundredth of a point, styles that are equal in all of a group.
_SCOUR = (
    "--enable-comment-stripping",
    "--enable-id-stripping",
    "--shorten-ids",
    "--remove-metadata",
    "--strip-xml-prolog",
    # A font is no attribute.
    "--disable-style-to-xml",
    "--create-groups",
    "--set-precision=5",
    "--indent=none",
    "--no-line-breaks",
    "--quiet",
)


def compact(svg: str) -> str:
    """A drawing that looks the same and is about half as large."""
    try:
        from scour import scour
    except ImportError as error:
        raise LabError("publishing needs scour: apt-get install python3-scour") from error
    # Of one width with the font by which the places of texts were computed.
    svg = re.sub(r"'DejaVu Sans'(?!,)", "'DejaVu Sans', Verdana, sans-serif", svg)
    options = scour.parse_args([*_SCOUR])
    # A pass shortens what the one before has made equal, together by a tenth.
    shorter = str(scour.scourString(svg, options))
    while len(shorter) < len(svg):
        svg, shorter = shorter, str(scour.scourString(shorter, options))
    svg = re.sub(r' ([xy])="(-?\d+\.\d{3,})"', lambda m: f' {m[1]}="{float(m[2]):.2f}"', svg)
    return re.sub(r"^<!DOCTYPE[^>]*>\s*", "", svg)


def figures(text: str) -> str:
    """A summary.csv with a row for each cell: its factors, and of each measure the mean, named by
    the measure and its unit, and the other figures. Five digits, without figures that follow from
    others, and without columns that are empty. One column `n` where all measures of a cell have as
    many values."""

    def short(word: str) -> str:
        if re.fullmatch(r"-?\d+\.\d{3,}(e[-+]\d+)?", word):
            return f"{float(word):.5g}"
        return word.removesuffix(".0")

    rows = csv.DictReader(io.StringIO(text))
    names = list(rows.fieldnames or ())
    factors = names[: names.index("measure")]
    kinds = [name for name in names[names.index("unit") + 1 :] if name not in _LEFT_OUT]
    kinds.sort(key=lambda kind: kind != "mean")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    columns = dict.fromkeys(factors)
    for row in rows:
        cell = cells.setdefault(
            tuple(row[name] for name in factors), {name: row[name] for name in factors}
        )
        measure = f"{row['measure']} ({row['unit']})" if row["unit"] else row["measure"]
        for kind in kinds if row["mean"] else ():
            if row[kind]:
                column = measure if kind == "mean" else f"{row['measure']} {kind}"
                cell[column] = short(row[kind])
                columns[column] = None
    counts = [column for column in columns if column.endswith(" n")]
    if all(len({cell[n] for n in counts if n in cell}) <= 1 for cell in cells.values()):
        for cell in cells.values():
            cell["n"] = next((cell[n] for n in counts if n in cell), "")
        rest = [column for column in columns if column not in (*factors, *counts)]
        columns = dict.fromkeys([*factors, "n", *rest])
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(cells.values())
    return out.getvalue()


def is_flat(run: Run, path: Path) -> bool:
    """Whether a drawing of an experiment's plots has nothing to show: its measure is the same, such
    as no loss, in all points."""
    if not (number := re.match(r"(\d+)-", path.name)):
        return False
    plot = plots.default_plots(run.experiment)[int(number[1]) - 1]
    measure = plot.z or plot.y
    values = [point["measures"].get(measure) for point in run.counted()]
    return measure in run.experiment.measures and len(set(values)) == 1


def command_of(run: Run) -> str:
    """What repeats a run: its command without the folders that it named."""
    words = iter(shlex.split(run.conditions.get("command", "")))
    kept = []
    for word in words:
        if word in ("--into", "--resume"):
            next(words, None)
        elif not word.startswith(("--into=", "--resume=")):
            kept.append(word)
    if kept[:3] == ["tombolo", "lab", "run"] and run.experiment.name in kept:
        return shlex.join(kept)
    return f"tombolo lab run {run.experiment.name}"


def section(run: Run, folder: Path, flames: bool = True) -> str:
    """The part of the page for one run; copies its CSV and plots, and with `flames` its flame
    graphs."""
    experiment = run.experiment
    found = summary.write(run, run.folder)
    with plots.text_in_drawings():
        report.write(run, run.folder)
    name = experiment.name
    (folder / f"{name}.csv").write_text(figures((run.folder / "summary.csv").read_text()))
    images = []
    patterns = ("[0-9]*.svg", "*.flame.svg") if flames else ("[0-9]*.svg",)
    for path in [p for pattern in patterns for p in sorted((run.folder / "plots").glob(pattern))]:
        if is_flat(run, path):
            continue
        target = f"{name}-{path.stem}.svg"
        (folder / target).write_text(compact(path.read_text()))
        images.append(f"![{experiment.title}]({target})")
    counts = found["counts"]
    # The last attempt at a point is not measured again, disturbed or not.
    again = counts["disturbed_attempts"] - counts["disturbed"]
    conditions = run.conditions
    where = ", ".join(
        str(conditions[key])
        for key in ("cpu", "cpu_model", "kernel", "virtualisation")
        if conditions.get(key)
    )
    began = (conditions.get("sessions") or [{}])[0].get("began", "")
    lines = [
        f"## {name}: {experiment.title}",
        "",
        experiment.about,
        "",
        f"`{command_of(run)}`, {began[:10]}, commit {str(conditions.get('commit'))[:12]}; "
        f"{where}. {counts['points']} points count, {again} attempts were disturbed and measured "
        f"again, {counts['disturbed']} points were disturbed in the last attempt, too, and do not "
        f"count, {counts['failed']} failed, {counts['skipped_cells']} cells were skipped. "
        f"[All figures]({name}.csv).",
        "",
        *warnings(found),
        *cells_table(found),
        *effects_table(found),
        *published_table(found),
        *others(found),
        "",
        *[line for image in images for line in (image, "")],
    ]
    return "\n".join(lines)


HEAD = """\
# {title}

Made by `{command}`. [The lab](../{up}lab.md) says how it is measured. Intervals are of 95 %;
A/A is a cell compared with itself, the noise of the machine.
"""


def sections(text: str) -> dict[str, str]:
    """The sections of a page by the name of their experiment."""
    parts = re.split(r"^(?=## )", text, flags=re.M)[1:]
    return {part[3:].partition(":")[0]: part for part in parts}


def page(
    folder: Path,
    file: str,
    runs: Sequence[Run],
    command: str = "",
    title: str = "",
    keeps: bool = False,
    flames: bool = True,
) -> Path:
    """Writes a page of runs and the files that it shows into a folder of the docs.

    With `keeps` the sections of other experiments stay that the page has already, and all are in
    the order of their names; files of a section that is replaced go.
    """
    if not folder.is_dir():
        raise LabError(f"{folder}: expected a folder of the docs, such as docs/results")
    found: dict[str, str] = {}
    if keeps and (folder / file).is_file():
        found = sections((folder / file).read_text())
    for run in runs:
        if run.counted():
            name = run.experiment.name
            for shown in re.findall(r"\]\(([\w.-]+\.svg)\)", found.get(name, "")):
                (folder / shown).unlink(missing_ok=True)
            found[name] = section(run, folder, flames) + "\n"
    parts = [found[name].rstrip("\n") + "\n" for name in (sorted(found) if keeps else found)]
    # docs/lab.md, from docs/results or from a folder in it.
    up = "" if folder.name == "results" else "../"
    head = HEAD.format(
        title=title or "Results of the lab",
        command=command or "python3 -m tombolo_lab.publish",
        up=up,
    )
    path = folder / file
    path.write_text(head + "\n" + "\n".join(parts).rstrip("\n") + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Writes FOLDER/README.md and its files."""
    parser = argparse.ArgumentParser(prog="tombolo_lab.publish", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    parser.add_argument(
        "--no-flames",
        action="store_true",
        help="leave out flame graphs, of which an experiment with many cells has megabytes",
    )
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        runs = [Run.load(path) for path in options.runs]
        page(options.folder, "README.md", runs, keeps=True, flames=not options.no_flames)
    except LabError as error:
        print(f"tombolo_lab.publish: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
