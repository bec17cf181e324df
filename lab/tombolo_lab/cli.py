"""The command `tombolo lab`: lists, shows, runs, reports and compares experiments.

Results go to standard output, progress and errors to standard error. Exit codes are those of
`Exit`. A reader that closes the pipe early ends the command silently.

The libraries of statistics and plots are loaded only by what needs them, so `ls`, `show`, `copy`
and the measuring part of `run` work without them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tombolo_lab import LabError, __version__, design, harness, model
from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment, ExperimentError, parameter_text, workload_class
from tombolo_lab.tomltext import value_text

RESULTS = Path("build/lab")
WIDTH = 100
# Debian's packages of the libraries that statistics and reports load.
LIBRARIES = {
    "numpy": "python3-numpy",
    "pandas": "python3-pandas",
    "scipy": "python3-scipy",
    "statsmodels": "python3-statsmodels",
    "matplotlib": "python3-matplotlib",
    "jinja2": "python3-jinja2",
}


class Exit(enum.IntEnum):
    """Exit codes of `tombolo lab`."""

    GOOD = 0
    # A point failed, no point counts, a run could not begin or go on, or two runs could not be
    # compared.
    FAILED = 1
    # Wrong arguments, an invalid experiment file, or a folder that holds no run.
    USAGE = 2
    # SIGINT, as shells count it.
    INTERRUPTED = 130


class UsageError(LabError):
    """Arguments that do not fit together."""


class MissingLibrary(LabError):
    """A library that Debian packages is not installed for this interpreter."""


# ---- what commands show --------------------------------------------------------------------------
@dataclass(frozen=True)
class Survey:
    """The cells of an experiment, and those of them that cannot run on this machine."""

    cells: list[Cell]
    skipped: list[tuple[Cell, str]]

    def runnable(self, cells: Sequence[Cell] | None = None) -> list[Cell]:
        """Those of `cells` (by default all) that can run here."""
        skipped = {tuple(cell.items()) for cell, _ in self.skipped}
        cells = self.cells if cells is None else cells
        return [cell for cell in cells if tuple(cell.items()) not in skipped]

    def reasons(self) -> dict[str, list[Cell]]:
        """Reason → cells, in the order in which they were met."""
        found: dict[str, list[Cell]] = {}
        for cell, reason in self.skipped:
            found.setdefault(reason, []).append(cell)
        return found


def survey(experiment: Experiment) -> Survey:
    """Asks the workload of each cell whether it can run here. It measures nothing."""
    workload = workload_class(experiment.workload)()
    cells = experiment.cells()
    skipped = []
    for cell in cells:
        try:
            workload.check(experiment.point(cell))
        except harness.skips() as reason:
            skipped.append((cell, str(reason)))
    return Survey(cells, skipped)


def survey_seconds(experiment: Experiment) -> tuple[float, float]:
    """The expected time of the cells that can run here, in seconds."""
    return experiment.expected_seconds(survey(experiment).runnable())


def duration(seconds: float) -> str:
    """A duration for people: 45 s, 12 min, 2 h 10 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 1 or seconds == 0 else "1 s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def span(least_most: tuple[float, float]) -> str:
    """A range of durations, or one when both read the same."""
    least, most = map(duration, least_most)
    return least if least == most else f"{least} to {most}"


def times_text(experiment: Experiment) -> str:
    """How often each cell is measured: 10, or 10-30 where `until` decides."""
    repeat = experiment.repeat
    many = repeat.at_most not in (None, repeat.times)
    return f"{repeat.times}-{repeat.at_most}" if many else str(repeat.times)


def cell_text(cell: Cell) -> str:
    """A cell on one line: attachment=ivshmem protocol=tcp."""
    return " ".join(
        f"{name}={level if isinstance(level, str) else value_text(level)}"
        for name, level in cell.items()
    )


def common_text(cells: list[Cell], among: list[Cell]) -> str:
    """The factors whose levels tell `cells` from `among`, such as "attachment=tap,user"."""
    parts = []
    for name in cells[0]:
        levels = list(dict.fromkeys(cell[name] for cell in cells))
        if len(levels) < len({cell[name] for cell in among}):
            texts = [cell_text({name: level}).partition("=")[2] for level in levels]
            parts.append(f"{name}={','.join(texts)}")
    return " ".join(parts)


def counted(number: int, noun: str) -> str:
    """1 point, 2 points."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def repeat_sentence(experiment: Experiment) -> str:
    """The repetitions and stop rules in words."""
    repeat = experiment.repeat
    text = counted(repeat.times, "repetition")
    if repeat.until is not None:
        text += (
            f", up to {repeat.at_most} until the 95 % interval of {experiment.primary} is within "
            f"±{100 * repeat.until:g} % of the mean in each cell"
        )
    if repeat.minutes is not None:
        text += f"; no new one begins after {repeat.minutes:g} min"
    return text


def skip_lines(found: Survey) -> list[str]:
    """What would be skipped, a line for each reason."""
    if not found.skipped:
        return ["Nothing is skipped here."]
    lines = [f"Skipped here: {len(found.skipped)} of {counted(len(found.cells), 'cell')}."]
    for reason, cells in found.reasons().items():
        where = common_text(cells, found.cells)
        lines.append(
            f"  {counted(len(cells), 'cell')}: {reason}" + (f" ({where})" if where else "")
        )
    return lines


def cells_sentence(experiment: Experiment, count: int) -> str:
    """The number of cells, and what a fraction or exclusions left of all combinations."""
    total = design.combinations(experiment.factors)
    if plan := experiment.fraction:
        named = ", ".join(f"{k} {v}" for k, v in design.letters(plan.factors).items())
        text = f"{counted(count, 'cell')} of {total} combinations: {plan}; "
        return text + f"{plan.relation} with {named}."
    if count != total:
        return f"{counted(count, 'cell')}; {total} combinations, {total - count} excluded."
    return f"{counted(count, 'cell')}."


def rounded(seconds: tuple[float, float]) -> list[float]:
    """Least and greatest seconds, for JSON."""
    return [round(each, 1) for each in seconds]


# Control characters but tab and newline, and those that turn the direction of a text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text in which nothing steers a terminal: such characters are shown as \\x1b or \\u202e."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(text: str = "") -> None:
    print(printable(text))


def note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def say_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False))


# ---- ls, show, copy ------------------------------------------------------------------------------
def ls(args: argparse.Namespace) -> Exit:
    """Built-in experiments; an invalid one is reported and the others are still listed."""
    rows, listed, code = [], [], Exit.GOOD
    for name in model.names():
        try:
            full, quick = model.load(name), model.load(name, quick=True)
        except ExperimentError as error:
            note(f"tombolo lab: {error}")
            code = Exit.USAGE
            continue
        count = len(full.cells())
        listed.append(
            {
                "name": name,
                "title": full.title,
                "workload": full.workload,
                "cells": count,
                "repetitions": full.repeat.times,
                "repetitions_at_most": full.repeat.at_most or full.repeat.times,
                "expected_s": rounded(full.expected_seconds()),
                "quick_expected_s": rounded(quick.expected_seconds()),
            }
        )
        times = [span(each.expected_seconds()) for each in (full, quick)]
        rows.append([name, str(count), times_text(full), *times, full.title])
    if args.json:
        say_json(listed)
    else:
        for line in columns([["NAME", "CELLS", "REPEATS", "TIME", "QUICK", "TITLE"], *rows]):
            say(line)
    return code


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as aligned text, two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def chosen(args: argparse.Namespace) -> Experiment:
    """The experiment that NAME, --set, --quick and --seed ask for."""
    experiment = model.load(args.name, args.set, args.quick)
    return experiment if args.seed is None else dataclasses.replace(experiment, seed=args.seed)


def show(args: argparse.Namespace) -> Exit:
    """The resolved file behind comments that say what it would do here."""
    experiment = chosen(args)
    quick = model.load(args.name, args.set, quick=True)
    found = survey(experiment)
    if args.json:
        say_json(shown(experiment, quick, found))
        return Exit.GOOD
    workload = workload_class(experiment.workload)
    lines = [
        f"{experiment.name}: {experiment.title}",
        cells_sentence(experiment, len(found.cells)),
        f"{repeat_sentence(experiment)}; {experiment.order} order, seed {experiment.seed}.",
        time_sentence(experiment, quick, found),
        f"Workload {experiment.workload}: {first_sentence(workload.doc)}",
        f"Needs: {', '.join(needs(workload)) or 'nothing beyond this program'}.",
        *skip_lines(found),
        "",
        "Parameters, for factors, fixed conditions and --set:",
        *parameter_lines(experiment),
        "Measures:",
        *measure_lines(experiment),
    ]
    for line in lines:
        indent = "  " if line.startswith("  ") else ""
        wrapped = textwrap.wrap(
            line.strip(),
            WIDTH - 2,
            initial_indent=indent,
            subsequent_indent=indent + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for part in wrapped or [""]:
            say(f"# {part}".rstrip())
    say()
    say(experiment.resolved().rstrip("\n"))
    return Exit.GOOD


def time_sentence(experiment: Experiment, quick: Experiment, found: Survey) -> str:
    """How long the experiment takes here, or elsewhere when no cell can run here."""
    if runnable := found.runnable():
        here = span(experiment.expected_seconds(runnable))
        return f"Expected time here: {here} (quick: {span(survey_seconds(quick))})."
    times = span(experiment.expected_seconds()), span(quick.expected_seconds())
    return "No cell can run here. Expected time elsewhere: {} (quick: {}).".format(*times)


def first_sentence(doc: str) -> str:
    text = " ".join(doc.split())
    return text.partition(". ")[0].rstrip(".") + "."


def needs(workload: type) -> tuple[str, ...]:
    """What a workload says that it needs; the attribute is optional."""
    return tuple(getattr(workload, "needs", ()))


def parameter_lines(experiment: Experiment) -> list[str]:
    lines = []
    for name, parameter in workload_class(experiment.workload).parameters.items():
        text = f"  {name}: {parameter.doc.rstrip('.')}; {parameter_text(parameter)}"
        if parameter.default not in (None, "") and name not in experiment.factors:
            text += f"; default {cell_text({name: parameter.default}).partition('=')[2]}"
        lines.append(text + ("; a change needs a new set-up" if parameter.setup else ""))
    return lines


def measure_lines(experiment: Experiment) -> list[str]:
    declared = workload_class(experiment.workload).measures
    lines = []
    for name in experiment.measures:
        measure = declared[name]
        unit = f" ({measure.unit})" if measure.unit else ""
        better = f"; {measure.better} is better" if measure.better else ""
        lines.append(f"  {name}{unit}: {measure.doc.rstrip('.')}{better}")
    return lines


def shown(experiment: Experiment, quick: Experiment, found: Survey) -> dict:
    """The JSON object of `show`."""
    plan = experiment.fraction
    return {
        "name": experiment.name,
        "title": experiment.title,
        "about": experiment.about,
        "workload": experiment.workload,
        "seed": experiment.seed,
        "factors": experiment.factors,
        "fixed": experiment.fixed,
        "measures": experiment.measures,
        "primary": experiment.primary,
        "order": experiment.order,
        "design": {
            **dataclasses.asdict(experiment.design),
            **({"resolution": plan.resolution, "relation": plan.relation} if plan else {}),
        },
        "repeat": dataclasses.asdict(experiment.repeat),
        "cells": len(found.cells),
        "combinations": design.combinations(experiment.factors),
        "expected_s": rounded(experiment.expected_seconds(found.runnable())),
        "quick_expected_s": rounded(survey_seconds(quick)),
        "needs": needs(workload_class(experiment.workload)),
        "skipped": [
            {"reason": reason, "cells": cells} for reason, cells in found.reasons().items()
        ],
        "resolved": experiment.resolved(),
    }


def copy(args: argparse.Namespace) -> Exit:
    """Copies the file of an experiment, comments and all; it does not replace a file."""
    model.load(args.name)
    source, target = model.find(args.name), Path(args.file)
    if target.is_dir():
        target /= source.name
    if target.suffix != ".toml":
        raise UsageError(f"{target}: expected a file name that ends in .toml")
    text, is_ours = source.read_bytes(), False
    try:
        with target.open("xb") as file:
            is_ours = True
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target}: exists already; choose another name") from None
    except OSError as error:
        if is_ours:
            target.unlink(missing_ok=True)
        raise UsageError(f"{target}: {error.strerror}") from None
    path = str(target) if "/" in str(target) else f"./{target}"
    say(f"{path}: change it, then `tombolo lab run {path}`")
    return Exit.GOOD


# ---- run, report, compare ------------------------------------------------------------------------
def new_folder(name: str) -> Path:
    """A folder for results that does not exist yet, under RESULTS of the current folder."""
    base = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    folder, count = base, 1
    while folder.exists():
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
    return folder


def made_folder(name: str) -> Path:
    """As `new_folder`, and makes it, so that a command in the same second takes another one."""
    while True:
        folder = new_folder(name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{folder}: not a folder to write into: {error.strerror}") from None
        return folder


def asked_for(args: argparse.Namespace) -> tuple[Experiment, Path]:
    """The experiment of `run` and its folder; UsageError when arguments do not fit together."""
    if args.resume is None:
        if args.name is None:
            raise UsageError("run: name an experiment, or a folder with --resume")
        experiment = chosen(args)
        made = new_folder if args.dry_run else made_folder
        folder = Path(args.into) if args.into else made(experiment.name)
        if (folder / "points.jsonl").exists() or (folder / "experiment.toml").exists():
            raise UsageError(f"{folder}: holds a run already; go on with --resume {folder}")
        return experiment, folder
    for option in ("set", "quick", "into", "seed", "dry_run"):
        value = getattr(args, option)
        # A seed of 0 is given, although it equals False.
        if not (value is None or value is False or value == []):
            raise UsageError(
                f"--resume: not together with --{option.replace('_', '-')}: "
                "the folder says what is run"
            )
    folder = Path(args.resume)
    if not (folder / "experiment.toml").is_file():
        raise UsageError(f"{folder}: not the folder of a run: it has no experiment.toml")
    experiment = model.load(str(folder / "experiment.toml"))
    if args.name not in (None, experiment.name):
        raise UsageError(f"{folder}: expected a run of {args.name}, found one of {experiment.name}")
    return experiment, folder


def run(args: argparse.Namespace) -> Exit:
    """Measures, then writes the report."""
    experiment, folder = asked_for(args)
    if args.dry_run:
        return plan(experiment, folder, args.json)
    from tombolo_lab import runner

    try:
        result = runner.run(experiment, folder, args.resume is not None, sys.stderr)
    except LabError as error:
        note(f"tombolo lab: {error}")
        with contextlib.suppress(OSError):
            # Ours, when nothing was measured.
            folder.rmdir()
        return Exit.FAILED
    counts = {"folder": str(folder), **result.counts()}
    is_reported = True
    if counts["points"] == 0:
        note(f"tombolo lab: {folder}: no point counts, so there is no report")
    else:
        try:
            counts["report"] = str(written(result, folder))
        except MissingLibrary as error:
            note(f"tombolo lab: {error}; then: tombolo lab report {folder}")
        except ModuleNotFoundError:
            raise
        except Exception as error:
            no_report(folder, error)
            is_reported = False
    if args.json:
        say_json(counts)
    else:
        say(
            f"{counted(counts['points'], 'point')}, {counts['disturbed']} disturbed, "
            f"{counts['failed']} failed, {counted(counts['skipped_cells'], 'cell')} skipped: "
            f"{counts.get('report', folder)}"
        )
    is_good = counts["points"] and not counts["failed"] and is_reported
    return Exit.GOOD if is_good else Exit.FAILED


def no_report(folder: Path, error: Exception) -> None:
    """Says why a report could not be written, and that nothing measured is lost."""
    note(f"tombolo lab: {failure_text(error)}")
    note(f"the points are kept in {folder}; make the report again: tombolo lab report {folder}")


def failure_text(error: Exception) -> str:
    """An error in one line: the file and the reason, or for one of ours where it happened."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}"
    if isinstance(error, LabError):
        return str(error)
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"the report failed: {type(error).__name__}: {error}{where}"


def plan(experiment: Experiment, folder: Path, as_json: bool) -> Exit:
    """What `run` would do: the cells of the first block in order, without skipped ones."""
    found = survey(experiment)
    first = found.runnable(experiment.block(0))
    expected = experiment.expected_seconds(first)
    value = {
        "folder": str(folder),
        "name": experiment.name,
        "cells": len(first),
        "skipped_cells": len(found.skipped),
        "set_ups_per_block": len(experiment.set_ups(first)),
        "repetitions": experiment.repeat.times,
        "points": len(first) * experiment.repeat.times,
        "expected_s": rounded(expected),
        "first_block": first,
    }
    if as_json:
        say_json(value)
        return Exit.GOOD
    say(f"{experiment.name}: {experiment.title}")
    say(f"results go to {folder}")
    say(f"{repeat_sentence(experiment)}; {experiment.order} order, seed {experiment.seed}")
    say(
        f"at least {counted(value['points'], 'point')}: {counted(len(first), 'cell')}, "
        f"{counted(value['set_ups_per_block'], 'set-up')} in each repetition; "
        f"{span(expected)}"
    )
    for line in skip_lines(found):
        say(line)
    say("first repetition:")
    for cell in first:
        say(f"  {cell_text(cell)}")
    return Exit.GOOD


def with_libraries(action: Callable[[], object]) -> object:
    """What `action` gives; MissingLibrary when it imports one that is not installed."""
    try:
        return action()
    except ModuleNotFoundError as error:
        package = LIBRARIES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingLibrary(
            f"reports need {error.name} for {sys.executable}: apt-get install {package}"
        ) from None


def written(result: object, folder: Path) -> Path:
    """Writes summary and report of a run; gives the report's path."""

    def action() -> Path:
        from tombolo_lab import report

        return report.write(result, folder)

    return with_libraries(action)


def report(args: argparse.Namespace) -> Exit:
    """Writes summary and report of an earlier run again."""
    from tombolo_lab.results import Run

    folder = Path(args.folder)
    result = Run.load(folder)
    try:
        page = written(result, folder)
    except MissingLibrary as error:
        note(f"tombolo lab: {error}")
        return Exit.FAILED
    except (LabError, ModuleNotFoundError):
        raise
    except Exception as error:
        no_report(folder, error)
        return Exit.FAILED
    say(str(page))
    return Exit.GOOD


def compare(args: argparse.Namespace) -> Exit:
    """Two runs side by side."""
    from tombolo_lab.results import Run

    runs = [Run.load(Path(folder)) for folder in (args.a, args.b)]
    folder = Path(args.into) if args.into else made_folder("compare")

    def action() -> tuple[dict, Path]:
        from tombolo_lab import report as reports

        return reports.compare(*runs, folder)

    try:
        value, page = with_libraries(action)
    except LabError as error:
        note(f"tombolo lab: {error}")
        with contextlib.suppress(OSError):
            folder.rmdir()
        return Exit.FAILED
    if args.json:
        say_json(value)
    else:
        say(str(page))
    return Exit.GOOD


# ---- arguments -----------------------------------------------------------------------------------
EPILOG = """\
examples:
  tombolo lab ls                                   what there is, and how long it takes
  tombolo lab run capacity --quick                 a short run, to see that it works
  tombolo lab run capacity --set protocol=tcp --set seconds=1
  tombolo lab copy capacity mine.toml              an experiment of your own
  tombolo lab compare build/lab/A build/lab/B      two runs side by side

exit codes: 0 good, 1 a failed point or comparison, 2 wrong arguments or an invalid file,
130 interrupted
"""


def whole_number(text: str) -> int:
    """A seed; argparse reports what is wrong."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise ValueError
    return value


whole_number.__name__ = "whole number"


def json_option(added: argparse.ArgumentParser) -> None:
    added.add_argument("--json", action="store_true", help="one JSON value on standard output")


def choosing(added: argparse.ArgumentParser, optional: bool) -> None:
    """NAME and the options that change an experiment."""
    added.add_argument(
        "name",
        metavar="NAME",
        nargs="?" if optional else None,
        help="experiment (see ls), or the path of an experiment file",
    )
    added.add_argument(
        "--set",
        metavar="NAME=VALUE[,VALUE…]",
        action="append",
        default=[],
        help="replace the levels of a factor, or a fixed condition; several times for several",
    )
    added.add_argument("--quick", action="store_true", help="the short version: see [quick]")
    added.add_argument(
        "--seed", metavar="N", type=whole_number, help="seed of orders and bootstrap"
    )


def parser() -> argparse.ArgumentParser:
    """All commands and options of `tombolo lab`."""
    top = argparse.ArgumentParser(
        prog="tombolo lab",
        allow_abbrev=False,
        epilog=EPILOG,
        description="Experiments that anyone can repeat: measures on this machine, "
        "and reports with intervals.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(action: Callable, help_text: str, more: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            action.__name__,
            help=help_text,
            description=f"{help_text}. {more}".rstrip(),
            allow_abbrev=False,
        )
        added.set_defaults(action=action)
        return added

    json_option(command(ls, "List the built-in experiments"))
    text = (
        "The output is a valid experiment file; comments say what it needs, what would be skipped "
        "on this machine and why, and how long it takes."
    )
    added = command(show, "Show an experiment as it would be run", text)
    choosing(added, False)
    json_option(added)
    text = "Ctrl-C ends the run cleanly; --resume goes on with it."
    added = command(run, "Run an experiment and write its report", text)
    choosing(added, True)
    added.add_argument("--into", metavar="DIR", help=f"folder of results ({RESULTS}/DATE-NAME)")
    added.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    added.add_argument("--dry-run", action="store_true", help="print the plan, measure nothing")
    json_option(added)
    added = command(report, "Write the report of a run again")
    added.add_argument("folder", metavar="DIR", help="folder of a run")
    added = command(compare, "Compare two runs of the same experiment")
    added.add_argument("a", metavar="A", help="folder of the one run")
    added.add_argument("b", metavar="B", help="folder of the other run")
    added.add_argument("--into", metavar="DIR", help=f"folder of the page ({RESULTS}/DATE-compare)")
    json_option(added)
    added = command(copy, "Copy an experiment into a file of your own, to change it")
    added.add_argument("name", metavar="NAME", help="experiment, or a path of an experiment file")
    added.add_argument("file", metavar="FILE", help="new file that ends in .toml, or a folder")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; gives its exit code. Wrong arguments leave through SystemExit(2)."""
    args = parser().parse_args(argv)
    code: int | None = None
    try:
        code = args.action(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this Python reports it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.GOOD if code is None else code
    except LabError as error:
        note(f"tombolo lab: {error}")
        return Exit.USAGE
    except OSError as error:
        note(f"tombolo lab: {failure_text(error)}")
        return Exit.FAILED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return code
