"""The folder of a run: what is in it, how it is written, and how it is read again.

    experiment.toml   the experiment as it is run; its presence makes a folder that of a run
    conditions.json   where and with what it is measured, and the sessions of the run
    points.jsonl      one point a line, in the order in which they were measured
    skipped.json      cells that cannot run here, with reasons
    summary.json, summary.csv, report.html, plots/   written by the report, from the above

A line of points.jsonl has the keys

    block         number of the repetition, from 0
    cell          factor → level
    attempt       from 1; a disturbed point is measured again
    measures      measure → number, or null where it does not apply
    samples       measure → list of raw values; absent when there are none
    tools         name → version or command; absent when there are none
    notes         what the workload keeps with the point; absent when there is nothing
    disturbed     null, or the reason why the point does not count
    started       UTC, ISO 8601
    took_s        duration of the measurement
    others_cpus, stolen_cpus, ours_cpus, kernel_cpus, softirq_cpus   see machine.Usage
    earlier_failure   why the first try of this point failed; absent when it did not

and that of a point that failed twice has `failed`, the reason, instead of what was measured: block,
cell, attempt, failed, started and earlier_failure.

A line is written whole and synced before the next point begins. A run that is killed leaves at most
one line without its end, which `Store` cuts off. One run at a time writes into a folder: the
folder itself is locked, so the lock goes with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tombolo_lab import LabError, model
from tombolo_lab.design import Cell

if TYPE_CHECKING:
    import pandas

EXPERIMENT, CONDITIONS = "experiment.toml", "conditions.json"
POINTS, SKIPPED = "points.jsonl", "skipped.json"
# How long a process that was killed a moment ago may still hold its lock.
LOCK_PATIENCE_S = 5


class StoreError(LabError):
    """A point cannot be kept. It ends the run, and is no failure of the point."""


def cell_key(cell: Cell) -> str:
    """A cell as text, the same for equal cells whatever the order of their factors."""
    return json.dumps(cell, sort_keys=True)


@dataclass(frozen=True)
class Run:
    """A run, as its folder holds it."""

    folder: Path
    experiment: model.Experiment
    conditions: dict
    points: list[dict]
    skipped: list[dict]

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Reads the folder of a run, also of one in progress. LabError when it is not one."""
        folder = Path(folder)
        if not (folder / EXPERIMENT).is_file():
            raise LabError(f"{folder}: expected the folder of a run, found no {EXPERIMENT} in it")
        points, _ = read_points(folder / POINTS)
        experiment = model.load(str(folder / EXPERIMENT))
        check_cells(folder / POINTS, points, experiment)
        return cls(
            folder,
            experiment,
            read_json(folder / CONDITIONS, dict),
            points,
            read_json(folder / SKIPPED, list),
        )

    def counted(self) -> list[dict]:
        """The points that count: those that did not fail and were not disturbed."""
        return [p for p in self.points if "failed" not in p and not p.get("disturbed")]

    def counts(self) -> dict[str, int]:
        """How many points count, were disturbed in each attempt, and failed; further how many
        attempts were disturbed, and how many cells were skipped."""
        states: dict[tuple, str] = {}
        for point in self.points:
            key = (point["block"], cell_key(point["cell"]))
            state = "failed" if "failed" in point else "points"
            states[key] = "disturbed" if point.get("disturbed") else state
        found = Counter(states.values())
        return {
            **{name: found[name] for name in ("points", "disturbed", "failed")},
            "disturbed_attempts": sum(bool(point.get("disturbed")) for point in self.points),
            "skipped_cells": len(self.skipped),
        }

    def frame(self) -> pandas.DataFrame:
        """One row for each point that counts, by block and in the order of measurement.

        Columns: `block`, the factors, the measures of the experiment. A measure that does not apply
        is NaN. Factors keep their types; there are no categorical columns.
        """
        import pandas

        experiment = self.experiment
        columns = ["block", *experiment.factors, *experiment.measures]
        rows = []
        for point in self.counted():
            measures = point["measures"]
            values = [measures.get(name) for name in experiment.measures]
            levels = [point["cell"][name] for name in experiment.factors]
            rows.append([point["block"], *levels, *values])
        frame = pandas.DataFrame(rows, columns=columns)
        for name in experiment.measures:
            frame[name] = frame[name].astype(float)
        return frame


def read_json(path: Path, kind: type) -> dict | list:
    """A JSON file that holds a `kind`; LabError when it cannot be read or holds something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise LabError(f"{path}: expected a file of a run: {why}") from None
    if not isinstance(value, kind):
        raise LabError(f"{path}: expected a JSON {kind.__name__}, found {type(value).__name__}")
    return value


def read_points(path: Path) -> tuple[list[dict], int]:
    """The points of a file, and the length in bytes of its whole lines. No file: no points.

    A last line without its end is left out. LabError with its number for any other line that is no
    point.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    whole = data.rfind(b"\n") + 1
    points = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            point = json.loads(line)
            good = isinstance(point["block"], int) and isinstance(point["cell"], dict)
            good = good and isinstance(point["attempt"], int)
            if good and "failed" not in point:
                good = isinstance(point["measures"], dict)
                good = good and isinstance(point["disturbed"], str | None)
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise LabError(f"{path}:{number}: expected a point, found {line[:60]!r}")
        points.append(point)
    return points, whole


def check_cells(path: Path, points: list[dict], experiment: model.Experiment) -> None:
    """LabError with its line for a point of a cell that the experiment does not have, such as one
    of another run."""
    known = {cell_key(cell) for cell in experiment.cells()}
    for number, point in enumerate(points, 1):
        if (key := cell_key(point["cell"])) not in known:
            raise LabError(f"{path}:{number}: expected a cell of {EXPERIMENT}, found {key}")


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step: readers, and a run that is killed, see the old or the new."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Store:
    """The folder of a run that is measured now. Use it in a `with`, which holds the lock."""

    def __init__(self, folder: Path, experiment: model.Experiment):
        self.folder = folder
        self.experiment = experiment
        self.conditions: dict = {}
        self.points: list[dict] = []
        self.skipped: list[dict] = []
        self._file: int | None = None
        self._lock: int | None = None

    def __enter__(self) -> Store:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise LabError(f"{self.folder}: not a folder to write into: {error.strerror}") from None
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # What a writer that was killed did not come to rename.
                for path in self.folder.glob(".*.new"):
                    path.unlink()
                return self
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    raise LabError(f"{self.folder}: another run writes into it") from None
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for handle in (self._file, self._lock):
            if handle is not None:
                os.close(handle)
        self._file = self._lock = None

    def create(self, conditions: dict, skipped: list[dict]) -> None:
        """Begins a run. LabError when the folder holds one already."""
        if (self.folder / EXPERIMENT).exists() or (self.folder / POINTS).exists():
            raise LabError(f"{self.folder}: holds a run already")
        self.conditions, self.skipped = conditions, skipped
        try:
            self.write_conditions()
            self.write_skipped()
            # The last one: a folder without it is not that of a run.
            write_whole(self.folder / EXPERIMENT, self.experiment.resolved())
            self._open_points(0)
        except OSError as error:
            raise LabError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def resume(self) -> None:
        """Reads what is there, and cuts off a line without its end."""
        self.points, length = read_points(self.folder / POINTS)
        # The folder's own: whether ours is the same is told later.
        there = model.load(str(self.folder / EXPERIMENT))
        check_cells(self.folder / POINTS, self.points, there)
        self.conditions = read_json(self.folder / CONDITIONS, dict)
        self.skipped = read_json(self.folder / SKIPPED, list)
        try:
            self._open_points(length)
        except OSError as error:
            raise LabError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def _open_points(self, length: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self.folder / POINTS, flags, 0o644)
        os.ftruncate(self._file, length)
        os.fsync(self._file)
        _sync(self.folder)

    def append(self, point: dict) -> None:
        """Adds a point and syncs it. StoreError when the disk does not take it."""
        line = json.dumps(point, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        length = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                os.ftruncate(self._file, length)
                raise StoreError(f"{self.folder / POINTS}: no space left for a point")
            os.fdatasync(self._file)
        except OSError as error:
            raise StoreError(f"{self.folder / POINTS}: {error.strerror}") from None
        self.points.append(point)

    def write_conditions(self) -> None:
        text = json.dumps(self.conditions, indent=1, ensure_ascii=False)
        write_whole(self.folder / CONDITIONS, text + "\n")

    def write_skipped(self) -> None:
        text = json.dumps(self.skipped, indent=1, ensure_ascii=False)
        write_whole(self.folder / SKIPPED, text + "\n")

    def run(self) -> Run:
        """What the folder holds now."""
        return Run(self.folder, self.experiment, self.conditions, self.points, self.skipped)
