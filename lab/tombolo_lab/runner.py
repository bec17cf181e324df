"""Runs an experiment: blocks, set-ups, points, disturbance, stop rules, interruption, resumption.

A block is one repetition of all cells. Cells of a block that stand together and agree in all
parameters with `setup=True` share a set-up, which is opened fresh for each block. So repetitions
are independent, and points that differ in cheap parameters only share one set-up: a split-plot
order (Montgomery, "Design and Analysis of Experiments", chapter 14). Where the order is "given",
each repetition of a cell has a set-up of its own.

What happens to a point:

- A point that other work disturbed is kept and marked, and measured again in the same set-up after
  a quiet moment, up to `retries` times. What the opening of a set-up measures (`opened` of the
  workload) is written with one of its cells; when the opening was disturbed, that point is marked
  and measured again in a new set-up.
- A point that fails (an exception, a value outside its range, a time limit) is tried once more in a
  fresh set-up, then recorded as failed with the reason. A cell that failed in `GIVE_UP` blocks in a
  row is not tried again; its further points are recorded as failed.
- A point has 3 × its expected duration + 60 s, a set-up the same from its own expected duration.
  The failure says what was waited for.

Invariants: every point is on disk before the next begins. The order of a block depends on the
experiment's seed alone. So a run that was killed at any moment and resumed has the same points as
one that was not, and measures none twice except that in which it was killed. What a killed run
leaves on the machine is the affair of `tombolo_lab.sandbox`.

A run needs the main thread, for signals and time limits.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import itertools
import shutil
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tombolo_lab import LabError, harness, machine, sandbox
from tombolo_lab.cli import counted
from tombolo_lab.design import Cell
from tombolo_lab.limits import ALARM_AGAIN_S, STANDARD_LIBRARY, limited, stoppable, time_limit
from tombolo_lab.model import Experiment, workload_class
from tombolo_lab.progress import Estimate, Progress
from tombolo_lab.results import Run, Store, StoreError, cell_key
from tombolo_lab.stopping import all_narrow
from tombolo_lab.workloads import UNMEASURED, PointTimeout, Workload, checked_point

# Free space that a run must find: raw samples of a long run take tens of MB.
SPACE_BYTES = 100 << 20
# How long a run waits for a quiet machine before it begins, and before a point is repeated.
START_PATIENCE_S = 30
RETRY_PATIENCE_S = 5
# A point fails for good when the second set-up fails too.
TRIES = 2
# After so many blocks in a row in which a cell failed it is not tried again.
GIVE_UP = 3
FAILURES = "failures.log"
MOST_REASON = 2000
# So many files that differ are named when a run cannot be resumed.
MOST_NAMED = 5


def run(experiment: Experiment, folder: Path, resume: bool, out: TextIO) -> Run:
    """Measures an experiment into `folder`, or goes on with the run in it; progress goes to `out`.

    Points that failed are in the result. LabError when the run cannot begin, or when the experiment
    or the program differs from that of the run to be resumed. KeyboardInterrupt after SIGINT,
    SIGTERM or SIGHUP, when the set-up has ended and the points are kept.
    """
    with stoppable(), Store(Path(folder), experiment) as store:
        runner = Runner(experiment, store, Progress(out, experiment.name))
        try:
            runner.begin(resume)
            runner.measure()
        except KeyboardInterrupt:
            runner.interrupted()
            raise
        return store.run()


class _Failed(Exception):
    """What failed: "set-up", "point", or "end" of the set-up. The cause is the exception."""

    def __init__(self, phase: str):
        super().__init__(phase)
        self.phase = phase


class Runner:
    """One session of a run: from its beginning, or from its resumption, to its end."""

    def __init__(self, experiment: Experiment, store: Store, progress: Progress):
        self.experiment = experiment
        self.store = store
        self.progress = progress
        self.workload: Workload = workload_class(experiment.workload)()
        self.cells: list[Cell] = []
        # What is measured and what measures: programs, images, guests.
        self.files: set[Path] = set()
        # The last line of each point, by block and cell; the blocks in a row that a cell failed in.
        self.last: dict[tuple[int, str], dict] = {}
        self.failures_in_row: Counter[str] = Counter()
        self.stopped = ""
        # Why the opening of the set-up was disturbed; None also where it measures nothing.
        self.opening: str | None = None
        self.session: dict = {}
        self.earlier_s = 0.0
        self.begun = time.monotonic()

    # ---- preconditions -----------------------------------------------------------------------
    def begin(self, resume: bool) -> None:
        """Checks what a run needs and opens its folder. LabError when something is missing."""
        skipped = self.check_cells()
        self.check_space()
        found = self.conditions()
        if resume:
            self.store.resume()
            self.check_same(found)
            self.store.skipped = skipped
            self.store.write_skipped()
            for point in self.store.points:
                self.remember(point)
        else:
            self.store.create({**found, "sessions": []}, skipped)
        self.earlier_s = sum(point.get("took_s", 0) for point in self.store.points)
        self.session = {"began": found["date"], "load": found["load"], "stopped": None}
        self.store.conditions["sessions"].append(self.session)
        self.store.write_conditions()
        self.estimate = Estimate(self.workload, self.experiment, self.cells)
        for point in self.store.points:
            if "failed" not in point and point["cell"] in self.cells:
                self.estimate.add(point["cell"], point["took_s"])
        self.say_plan(resume)

    def check_cells(self) -> list[dict]:
        """Asks the workload about every cell; gives the skipped ones with their reasons."""
        skipped = []
        with harness.naming() as self.files:
            for cell in self.experiment.cells():
                try:
                    self.workload.check(self.experiment.point(cell))
                except harness.skips() as reason:
                    skipped.append({"cell": cell, "reason": str(reason)})
                else:
                    self.cells.append(cell)
        return skipped

    def check_space(self) -> None:
        free = shutil.disk_usage(self.store.folder).free
        if free < SPACE_BYTES:
            raise LabError(
                f"{self.store.folder}: expected {SPACE_BYTES >> 20} MiB of free space, "
                f"found {free >> 20}"
            )

    def conditions(self) -> dict:
        """The conditions, with what identifies experiment, program and workload."""
        try:
            tree = harness.tree()
        except LabError:
            tree = None
        try:
            program = harness.program()
        except harness.skips():
            program = None
        source = Path(inspect.getsourcefile(type(self.workload)))
        text = self.experiment.resolved()
        return {
            **machine.conditions(tree, program),
            "seed": self.experiment.seed,
            "workload_sha256": machine.file_hash(source),
            "hashes": hashes(self.files | source_files(source), tree),
            "experiment_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "experiment": text,
        }

    def check_same(self, found: dict) -> None:
        """LabError when this would not be the same experiment with the same program."""
        kept = self.store.conditions
        reasons = []
        if kept.get("experiment_sha256") != found["experiment_sha256"]:
            changes = toml_differences(kept.get("experiment", ""), found["experiment"])
            reasons.append(f"the experiment differs: {'; '.join(changes)}")
        for key, what in (("program", "program"), ("workload", "source of the workload")):
            before, now = kept.get(f"{key}_sha256"), found[f"{key}_sha256"]
            if before != now:
                named = found.get("program") if key == "program" else self.experiment.workload
                reasons.append(
                    f"the {what} ({named or 'none'}) differs: SHA-256 was {_short(before)}, "
                    f"is {_short(now)}"
                )
        # A run of an earlier lab kept none, so that what it measured cannot be told.
        before, now = kept.get("hashes"), found["hashes"]
        if before is None:
            reasons.append(
                "expected the hashes of what was measured in its conditions, found none: it was "
                "begun by a lab of before 28 Nov 2026"
            )
            before = now
        remedy = "Begin a new run" if reasons else "Put these files back, or begin a new run"
        changed = [
            f"{name} was {_short(before.get(name))}, is {_short(now.get(name))}"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if changed:
            more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
            reasons.append(
                "what is measured, or what measures, differs: expected the files that the run was "
                f"begun with, found others (SHA-256): {', '.join(changed[:MOST_NAMED])}{more}"
            )
        if kept.get("kernel") != found["kernel"]:
            reasons.append(f"the kernel differs: it was {kept.get('kernel')}, is {found['kernel']}")
            remedy = "Begin a new run"
        if reasons:
            raise LabError(
                f"{self.store.folder}: cannot be resumed: {'; '.join(reasons)}. {remedy}."
            )

    def say_plan(self, resume: bool) -> None:
        if resume:
            self.progress.note(f"goes on after {counted(len(self.last), 'point')}")
        reasons = Counter(entry["reason"] for entry in self.store.skipped)
        for reason, count in reasons.items():
            self.progress.note(f"{counted(count, 'cell')} skipped: {reason}")

    # ---- the order ---------------------------------------------------------------------------
    def plan(self) -> Iterator[tuple[int, list[Cell]]]:
        """Block and cells of one set-up after the other. Stop rules are asked between them."""
        if self.experiment.order == "given":
            for cell in list(self.cells):
                for block in itertools.count():
                    # A cell that is skipped late is in the list no more.
                    if cell not in self.cells or (block and self.is_enough(block, [cell])):
                        break
                    yield block, [cell]
            return
        for block in itertools.count():
            if block and self.is_enough(block, self.cells):
                return
            yield from ((block, group) for group in self.groups(block))

    def groups(self, block: int) -> Iterator[list[Cell]]:
        """The cells of a block that stand together and share a set-up."""
        runnable = set(map(cell_key, self.cells))
        order = [cell for cell in self.experiment.block(block) if cell_key(cell) in runnable]
        setup = self.experiment.setup_factors()
        for _, group in itertools.groupby(order, lambda cell: [cell[name] for name in setup]):
            yield list(group)

    def is_enough(self, block: int, cells: list[Cell]) -> bool:
        """Whether block `block` of these cells is not to begin; notes why in `stopped`.

        Only blocks before it count, so a resumed run decides as one that was never killed. A block
        that was begun is finished.
        """
        repeat = self.experiment.repeat
        is_late = repeat.minutes is not None and self.elapsed_s() > repeat.minutes * 60
        is_begun = any((block, cell_key(cell)) in self.last for cell in cells)
        reason = ""
        if is_late and not is_begun:
            reason = f"no repetition begins after {repeat.minutes:g} minutes"
        elif block >= repeat.times:
            if repeat.until is None:
                reason = "all repetitions were measured"
            elif self.are_narrow(cells, block, repeat.until):
                reason = f"the interval of {self.experiment.primary} is narrow enough in each cell"
            elif block >= repeat.at_most:
                reason = f"the limit of {repeat.at_most} repetitions was reached"
        self.stopped = reason or self.stopped
        return bool(reason)

    def are_narrow(self, cells: list[Cell], before: int, until: float) -> bool:
        """Whether the interval of each cell is narrow enough, by the blocks before `before`. A cell
        whose points were all disturbed has none yet; one that failed or has no such measure never
        will."""
        for cell in cells:
            values, key = self.primary_values(cell, before), cell_key(cell)
            if not values and any(
                point.get("disturbed")
                for (block, other), point in self.last.items()
                if other == key and block < before
            ):
                return False
            if not all_narrow([values], until):
                return False
        return True

    def elapsed_s(self) -> float:
        """The time of this session, and what points took in those before."""
        return self.earlier_s + time.monotonic() - self.begun

    def primary_values(self, cell: Cell, before: int) -> list[float]:
        """The values of the primary measure that count, of the blocks before `before`."""
        key = cell_key(cell)
        values = (
            point["measures"].get(self.experiment.primary)
            for (block, other), point in self.last.items()
            if other == key and block < before
            if "failed" not in point and not point["disturbed"]
        )
        return [value for value in values if value is not None]

    # ---- measuring ---------------------------------------------------------------------------
    def measure(self) -> None:
        """All points that are not there yet."""
        if self.cells:
            with sandbox.Sandbox() as self.sandbox:
                self.wait_for_quiet()
                for block, group in self.plan():
                    self.group(block, [cell for cell in group if not self.is_done(block, cell)])
        self.end(self.stopped or "every cell is skipped")
        failed = sum("failed" in point for point in self.last.values())
        disturbed = sum(bool(point.get("disturbed")) for point in self.last.values())
        self.progress.note(
            f"{len(self.last)} points, {disturbed} of them disturbed, {failed} failed: "
            f"{self.session['stopped']}"
        )

    def wait_for_quiet(self) -> None:
        limits = self.experiment.disturbed
        if limits.count:
            return
        reason = machine.wait_quiet(limits.others_cpus, limits.stolen_cpus, START_PATIENCE_S)
        if reason:
            self.progress.note(f"the machine is busy, so points may be disturbed: {reason}")

    def remember(self, point: dict) -> None:
        """Takes a line of points.jsonl into account."""
        key = cell_key(point["cell"])
        self.last[point["block"], key] = point
        self.failures_in_row[key] = self.failures_in_row[key] + 1 if "failed" in point else 0

    def is_done(self, block: int, cell: Cell) -> bool:
        point = self.last.get((block, cell_key(cell)))
        if point is None:
            return False
        retries = self.experiment.disturbed.retries
        return "failed" in point or not point["disturbed"] or point["attempt"] > retries

    def group(self, block: int, cells: list[Cell]) -> None:
        """Measures cells that share a set-up: in one, or in more when something fails."""
        cells = [cell for cell in cells if not self.is_given_up(block, cell)]
        failures: dict[str, str] = {}
        set_ups_failed = 0
        while cells:
            begun, took, count = time.monotonic(), self.estimate.measured_s, len(cells)
            try:
                self.set_up(block, cells, failures)
            except _Failed as failed:
                error = failed.__cause__
                reason = reason_of(error)
                self.log_failure(block, cells, failed.phase, error)
                if isinstance(error, harness.skips()):
                    late = cells[:] if failed.phase == "set-up" else cells[:1]
                    self.skip_late(late, str(error))
                    del cells[: len(late)]
                elif failed.phase == "set-up":
                    set_ups_failed += 1
                    self.progress.note(f"the set-up failed: {reason}")
                    if set_ups_failed == TRIES:
                        self.fail(block, cells, f"set-up: {reason}", failures)
                        cells.clear()
                elif failed.phase == "point":
                    self.failed_point(block, cells, reason, failures)
                else:
                    self.warn(f"a set-up did not end well: {reason}")
            self.clear()
            took = self.estimate.measured_s - took
            self.estimate.add_overhead(time.monotonic() - begun - took, count - len(cells))

    def set_up(self, block: int, cells: list[Cell], failures: dict[str, str]) -> None:
        """Opens a set-up and measures `cells` in it; those that are done are removed from the list.

        It ends early when a point needs another opening. _Failed says what failed; after "point"
        the cell that failed is the first one.
        """
        point = self.experiment.point(cells[0])
        limit = time_limit(self.workload.setup_seconds(point))
        self.workload.seed, self.workload.block = self.experiment.seed, block
        manager = self.workload.open(point)
        meter = machine.Meter() if self.workload.opened else contextlib.nullcontext()
        with meter, _phase("set-up"), limited(limit, "the set-up"):
            setup = manager.__enter__()
        self.opening = self.disturbance_of(meter.usage) if self.workload.opened else None
        try:
            while cells:
                with _phase("point"):
                    is_done = self.point(block, cells[0], setup, failures)
                if not is_done:
                    break
                del cells[0]
        except BaseException as error:
            # What fails at the end of a set-up after a failure is a consequence: it is logged only.
            cause = error.__cause__ if isinstance(error, _Failed) else error
            try:
                with limited(limit, "the end of the set-up"):
                    manager.__exit__(type(cause), cause, cause.__traceback__)
            except BaseException as second:
                if second is not cause:
                    self.log_failure(block, cells, "end", second)
                    self.warn(f"a set-up did not end well after a failure: {reason_of(second)}")
            raise
        with _phase("end"), limited(limit, "the end of the set-up"):
            manager.__exit__(None, None, None)

    def disturbance_of(self, usage: machine.Usage) -> str | None:
        """Why what took this usage is disturbed, or None."""
        limits = self.experiment.disturbed
        return usage.disturbance(limits.others_cpus, limits.stolen_cpus)

    def carries(self, cell: Cell) -> bool:
        """Whether the values that the opening of a set-up gave are written with this cell: the
        first one of those that share a set-up, the same in each block."""
        if self.experiment.order == "given":
            return True
        setup = self.experiment.setup_factors()
        runnable = set(map(cell_key, self.cells))
        return cell == next(
            other
            for other in self.experiment.cells()
            if cell_key(other) in runnable and all(other[name] == cell[name] for name in setup)
        )

    def point(self, block: int, cell: Cell, setup: object, failures: dict[str, str]) -> bool:
        """Measures one point until it is undisturbed or its retries are used up. False when the
        opening of its set-up was disturbed, so that it needs another one."""
        limits = self.experiment.disturbed
        last = self.last.get((block, cell_key(cell)))
        attempt = last["attempt"] + 1 if last else 1
        while True:
            record = self.attempt(block, cell, setup, attempt)
            if earlier := failures.get(cell_key(cell)):
                record["earlier_failure"] = earlier
            self.keep(record)
            if self.is_done(block, cell):
                return True
            self.progress.note(f"a point is measured again: {record['disturbed']}")
            machine.wait_quiet(limits.others_cpus, limits.stolen_cpus, RETRY_PATIENCE_S)
            if self.opening and self.carries(cell):
                return False
            attempt += 1

    def attempt(self, block: int, cell: Cell, setup: object, attempt: int) -> dict:
        """Measures once; gives the line of the point. Any exception is a failure."""
        point = self.experiment.point(cell)
        declared = type(self.workload).measures
        started = utc()
        limit = time_limit(self.workload.seconds(point))
        with machine.Meter() as meter, limited(limit, "the point"):
            returned = self.workload.measure(setup, dict(point))
        values, samples, tools = checked_point(declared, self.experiment.measures, returned)
        usage, limits = meter.usage, self.experiment.disturbed
        shares = ("others", "stolen", "ours", "kernel", "softirq")
        reason = self.disturbance_of(usage)
        notes = dict(returned.get("notes") or {})
        if self.workload.opened:
            if not self.carries(cell):
                values |= dict.fromkeys(set(self.workload.opened) & set(values))
                if self.experiment.primary in self.workload.opened:
                    notes.setdefault(UNMEASURED, "it is kept with another cell of the set-up")
            elif self.opening:
                reason = f"while the set-up was opened: {self.opening}"
        reason = reason or (str(returned["disturbed"]) if returned.get("disturbed") else None)
        if reason and limits.count:
            notes["disturbed"], reason = reason, None
        return {
            "block": block,
            "cell": cell,
            "attempt": attempt,
            "measures": values,
            **({"samples": samples} if samples else {}),
            **({"tools": tools} if tools else {}),
            **({"notes": notes} if notes else {}),
            "disturbed": reason,
            "started": started,
            "took_s": round(usage.seconds, 6),
            **{f"{name}_cpus": round(getattr(usage, f"{name}_cpus"), 4) for name in shares},
        }

    def keep(self, record: dict) -> None:
        """Writes a line of points.jsonl and shows progress."""
        self.store.append(record)
        self.remember(record)
        if "failed" not in record:
            self.estimate.add(record["cell"], record["took_s"])
        block = record["block"]
        blocks = max(block + 1, self.experiment.repeat.times)
        primary = record.get("measures", {}).get(self.experiment.primary)
        value = f"{self.experiment.primary} {primary:.6g}" if primary is not None else ""
        self.progress.point(
            block,
            len(self.last),
            blocks * len(self.cells),
            record["cell"],
            value,
            self.left_s(),
        )

    def left_s(self) -> tuple[float, float]:
        """The least and the greatest time that is left, in seconds."""
        done = Counter(key for _, key in self.last)
        return self.estimate.left_s(done, self.elapsed_s())

    # ---- failures ----------------------------------------------------------------------------
    def failed_point(
        self, block: int, cells: list[Cell], reason: str, failures: dict[str, str]
    ) -> None:
        """The first of `cells` failed: it is tried once more, or recorded and removed."""
        key = cell_key(cells[0])
        if key in failures:
            self.progress.note(f"a point failed again: {reason}")
            self.fail(block, cells[:1], reason, failures)
            del cells[0]
        else:
            self.progress.note(f"a point failed and is tried once more: {reason}")
            failures[key] = reason

    def fail(self, block: int, cells: list[Cell], reason: str, failures: dict[str, str]) -> None:
        """Records the points of `cells` as failed."""
        for cell in cells:
            last = self.last.get((block, cell_key(cell)))
            earlier = failures.get(cell_key(cell))
            self.keep(
                {
                    "block": block,
                    "cell": cell,
                    "attempt": last["attempt"] + 1 if last else 1,
                    "failed": reason,
                    **({"earlier_failure": earlier} if earlier else {}),
                    "started": utc(),
                }
            )

    def is_given_up(self, block: int, cell: Cell) -> bool:
        """Whether the cell failed too often; its point is recorded as failed then."""
        if self.failures_in_row[cell_key(cell)] < GIVE_UP:
            return False
        before = self.last[block - 1, cell_key(cell)]["failed"]
        words = f"not tried after {GIVE_UP} failures in a row: "
        self.fail(block, [cell], words + before.removeprefix(words), {})
        return True

    def skip_late(self, cells: list[Cell], reason: str) -> None:
        """A set-up or a point found out that these cells cannot run here."""
        for cell in cells:
            self.progress.note(f"a cell is skipped: {reason}")
            self.store.skipped.append({"cell": cell, "reason": reason})
            self.cells.remove(cell)
        self.store.write_skipped()

    def warn(self, text: str) -> None:
        """Says something that is kept in the conditions too."""
        self.progress.note(text)
        self.store.conditions.setdefault("warnings", []).append(text)

    def clear(self) -> None:
        """Ends what a set-up left behind, and says so."""
        with limited(ALARM_AGAIN_S, "processes that a set-up left behind"):
            left = self.sandbox.clear()
        if left:
            self.warn(f"a set-up left behind: {', '.join(left)}")

    def log_failure(self, block: int, cells: list[Cell], phase: str, error: BaseException) -> None:
        """Adds the traceback to failures.log of the folder."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        with (self.store.folder / FAILURES).open("a") as file:
            file.write(f"block {block}, {phase}, {cell_key(cells[0]) if cells else ''}\n")
            file.write("".join(lines) + "\n")

    # ---- the end -----------------------------------------------------------------------------
    def end(self, reason: str) -> None:
        """Notes in the conditions why and when this session ended, and the tools it used."""
        took = round(time.monotonic() - self.begun, 1)
        self.session.update(stopped=reason, ended=utc(), took_s=took)
        self.store.conditions["tools"].update(self.tools())
        self.store.write_conditions()

    def tools(self) -> dict[str, str]:
        """What the points say they used; several values of a name are joined."""
        found: dict[str, list[str]] = {}
        for point in self.store.points:
            for name, text in point.get("tools", {}).items():
                if text not in found.setdefault(name, []):
                    found[name].append(text)
        return {name: "; ".join(texts) for name, texts in found.items()}

    def interrupted(self) -> None:
        """After a signal: the set-up has ended, the points are kept."""
        if not self.session:
            self.progress.note("stopped before it began")
            return
        self.end("interrupted")
        self.progress.note(
            f"stopped; {len(self.last)} points are kept. Go on with: "
            f"tombolo lab run --resume {self.store.folder}"
        )


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    """An exception within the `with` becomes the cause of _Failed. LabErrors of the store pass."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise _Failed(name) from error


# ---- what is measured ----------------------------------------------------------------------------
def source_files(source: Path) -> set[Path]:
    """A workload's source and the modules of this package that it imports, directly or not; when
    it uses the test harness, tests/lib too."""
    package = Path(__file__).parent
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                first, *rest = name.split(".")
                place = package.joinpath(*rest)
                if first == package.name:
                    modules = (place.with_suffix(".py"), place / "__init__.py")
                    waiting += [module for module in modules if module.is_file()]
    if package / "harness.py" in found:
        with contextlib.suppress(LabError):
            found |= set((harness.tree() / "tests/lib").glob("*.py"))
    return found


def hashes(files: set[Path], tree: Path | None) -> dict[str, str]:
    """Name → SHA-256. What lies in the checkout is named from there."""
    found = {}
    for path in files:
        path = path.absolute()
        is_within = tree is not None and path.is_relative_to(tree)
        found[str(path.relative_to(tree) if is_within else path)] = machine.file_hash(path)
    return dict(sorted(found.items()))


# ---- words ---------------------------------------------------------------------------------------
def utc() -> str:
    """Now, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def reason_of(error: BaseException) -> str:
    """Why something failed: the error's own words, its kind, and where it was raised."""
    if isinstance(error, LabError | PointTimeout):
        return str(error)[:MOST_REASON]
    text = str(error).strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if not f.filename.startswith(STANDARD_LIBRARY)), None)
    place = f" ({Path(where.filename).name}:{where.lineno})" if where else ""
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind)[: MOST_REASON - len(place)] + place


def toml_differences(before: str, now: str) -> list[str]:
    """What differs between two TOML texts, key by key."""
    tables = [_flat(tomllib.loads(text)) for text in (before, now)]
    missing = object()
    changes = []
    for key in dict.fromkeys([*tables[0], *tables[1]]):
        old, new = (table.get(key, missing) for table in tables)
        if old is missing:
            changes.append(f"{key} is new")
        elif new is missing:
            changes.append(f"{key} is gone")
        elif old != new:
            changes.append(f"{key} was {old!r}, is {new!r}")
    return changes or ["its text"]


def _flat(table: dict, path: str = "") -> dict[str, object]:
    """Tables within tables as one, with keys such as repeat.times."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{path}{key}."))
        else:
            flat[f"{path}{key}"] = value
    return flat


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"
