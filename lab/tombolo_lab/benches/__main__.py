"""Runs a bench: its experiments, a table of medians, and one line of JSON.

    python3 -m tombolo_lab.benches NAME [--only EXPERIMENT] [--repeats N] [--set KEY=VALUES]
                                   [--quick] [--into DIR | --resume DIR | --from DIR]
                                   [--publish FOLDER]

The exit code is 1 when a point failed or a bench could not run, 2 for wrong arguments, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tombolo_lab import LabError, benches, cli, harness, model, publish, report, runner, summary
from tombolo_lab.model import Experiment, Repeat
from tombolo_lab.results import Run

# A page of the docs shows how far repeats differ.
PUBLISHED_REPEATS = 7
# Conditions of the first run that the last line has; those of busyness are of all runs.
CONDITIONS = ("date", "commit", "kernel", "cpu", "cpus", "load")
BUSY = ("others_cpus", "stolen_cpus")
SHORTEST_S = 0.1


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./x bench", description=__doc__.split("\n")[0])
    parser.add_argument("name", metavar="NAME", choices=benches.NAMES)
    parser.add_argument("--only", metavar="EXPERIMENT", help="one of the bench's experiments")
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions of each cell")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUES",
        help="levels of a factor, or a fixed condition, of each experiment that knows it",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the short forms")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--into", type=Path, metavar="DIR", help="folder of the results")
    where.add_argument("--resume", type=Path, metavar="DIR", help="go on with an earlier run")
    where.add_argument("--from", dest="earlier", type=Path, metavar="DIR",
                       help="measure nothing: the line of an earlier run")  # fmt: skip
    parser.add_argument(
        "--publish", type=Path, metavar="FOLDER", help="write NAME.md and its files, as of the docs"
    )
    options = parser.parse_args(argv)
    parts = [part.experiment for part in benches.load(options.name).PARTS]
    if options.only is not None and options.only not in parts:
        parser.error(f"--only: expected {' or '.join(parts)}, found {options.only}")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, found {options.repeats}")
    return options


def experiment_of(part: benches.Part, options: argparse.Namespace) -> Experiment:
    """A bench's experiment as it is to be run."""
    known = model.workload_class(model.load(part.experiment).workload).parameters
    own = [text for text in options.set if text.partition("=")[0] in known]
    named = {text.partition("=")[0] for text in own}
    kept = [text for text in part.settings if text.partition("=")[0] not in named]
    experiment = model.load(part.experiment, [*kept, *own], options.quick)
    if options.repeats is None:
        return experiment
    return dataclasses.replace(experiment, repeat=Repeat(options.repeats))


def check_settings(bench: ModuleType, options: argparse.Namespace) -> None:
    """LabError for a setting that no experiment of the bench knows."""
    known: dict[str, None] = {}
    for part in bench.PARTS:
        workload = model.workload_class(model.load(part.experiment).workload)
        known.update(dict.fromkeys(workload.parameters))
    for text in options.set:
        name = text.partition("=")[0]
        if name not in known:
            raise LabError(f"--set {text}: expected one of {', '.join(known)}, found {name}")


def measured(bench: ModuleType, options: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Runs the experiments, or reads what an earlier run left."""
    runs = {}
    for part in bench.PARTS:
        if options.only not in (None, part.experiment):
            continue
        own = folder / part.experiment
        if options.earlier:
            if (own / "experiment.toml").is_file():
                runs[part.experiment] = Run.load(own)
            continue
        is_begun = options.resume is not None and (own / "experiment.toml").is_file()
        # What was begun goes on as it was begun.
        experiment = (
            model.load(str(own / "experiment.toml")) if is_begun else experiment_of(part, options)
        )
        run = runner.run(experiment, own, is_begun, sys.stderr)
        if run.counted():
            report.write(run, own)
        runs[part.experiment] = run
    if not runs:
        raise LabError(f"{folder}: expected runs of {', '.join(p.experiment for p in bench.PARTS)}")
    return runs


def conditions(runs: dict[str, Run]) -> dict:
    """Where and when the runs were made, and how busy the machine was with other work."""
    first = next(iter(runs.values()))
    found = {"command": shlex.join(["./x", "bench", *sys.argv[1:]])}
    found |= {key: first.conditions.get(key) for key in CONDITIONS}
    found |= {"load_after": list(os.getloadavg()), "tsc_khz": harness.tsc_khz()}
    points = [p for run in runs.values() for p in run.points if "took_s" in p]
    # CPU times are counted in ticks, of which a shorter point has too few.
    points = [point for point in points if point["took_s"] >= SHORTEST_S]
    took = sum(point["took_s"] for point in points)
    found["took_s"] = round(took, 1)
    for key in BUSY:
        spent = sum(point[key] * point["took_s"] for point in points)
        found[key] = round(spent / took, 3) if took else None
    return found


def medians(run: Run) -> list[str]:
    """The medians of each cell as aligned text."""
    experiment, figures = run.experiment, benches.Figures(run)
    rows = [["", *experiment.measures]]
    for cell in experiment.cells():
        values = [figures.median(measure, **cell) for measure in experiment.measures]
        if any(value is not None for value in values):
            rows.append([summary.cell_name(cell), *(report.number(value) for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = f"{experiment.name}: {experiment.title} (medians of {experiment.repeat.times})"
    return [
        head,
        *(
            "  ".join(
                [row[0].ljust(widths[0])]
                + [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ),
    ]


def failures(runs: dict[str, Run]) -> list[str]:
    """What could not be measured, with the reasons."""
    found = []
    for name, run in runs.items():
        for point in run.points:
            if "failed" in point:
                found.append(f"{name}, {summary.cell_name(point['cell'])}: {point['failed']}")
        if not run.counted():
            reason = run.skipped[0]["reason"] if run.skipped else "no point counts"
            found.append(f"{name}: nothing was measured: {reason}")
    return list(dict.fromkeys(found))


def last_line(name: str, runs: dict[str, Run], notes: dict, folder: Path) -> dict:
    """The object of the last line."""
    try:
        raw = os.path.relpath(folder, harness.tree())
    except LabError:
        raw = str(folder)
    own = benches.load(name).line(runs)
    for key, value in notes.items():
        own[key] = {**own.get(key, {}), **value}
    return {"bench": name, **own, "raw": raw, "conditions": conditions(runs)}


def bench(options: argparse.Namespace) -> int:
    """Runs a bench; gives the exit code."""
    module = benches.load(options.name)
    check_settings(module, options)
    repeats = options.repeats
    if options.publish and repeats is not None and repeats < PUBLISHED_REPEATS:
        raise LabError(
            f"--publish with {repeats} repeats; expected at least {PUBLISHED_REPEATS}, so that "
            "the figures have a spread"
        )
    notes = {}
    if not options.earlier and hasattr(module, "prepare"):
        notes = module.prepare(options)
    folder = options.earlier or options.resume or options.into or cli.new_folder(options.name)
    runs = measured(module, options, folder)
    for run in runs.values():
        if run.counted():
            print("\n".join(medians(run)), end="\n\n")
    failed = failures(runs)
    for text in failed:
        print(f"not measured: {text}")
    if options.publish:
        command = f"./x bench {options.name}"
        title = f"The bench {options.name}"
        publish.page(options.publish, f"{options.name}.md", list(runs.values()), command, title)
    line = last_line(options.name, runs, notes, folder)
    (folder / "line.json").write_text(json.dumps(line, indent=1) + "\n")
    print(json.dumps(line), flush=True)
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        return bench(options)
    except LabError as error:
        print(f"bench {options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"bench {options.name}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
