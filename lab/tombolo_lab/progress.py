"""Progress of a run on standard error, and the time that is left.

On a terminal one line is replaced by the next; elsewhere there is a line every `LINE_EVERY_S`
seconds. Notes (a disturbed or failed point, a set-up that is opened
again) have lines of their own.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from tombolo_lab.cli import cell_text, printable, span
from tombolo_lab.design import Cell
from tombolo_lab.model import Experiment
from tombolo_lab.results import cell_key
from tombolo_lab.workloads import Workload

LINE_EVERY_S = 30.0


class Estimate:
    """Expected durations, from what was measured; from the workload's own words before that."""

    def __init__(self, workload: Workload, experiment: Experiment, cells: Sequence[Cell]):
        self._repeat = experiment.repeat
        self._cells = {cell_key(cell): cell for cell in cells}
        points = {key: experiment.point(cell) for key, cell in self._cells.items()}
        self._expected = {key: float(workload.seconds(point)) for key, point in points.items()}
        set_ups = [workload.setup_seconds(point) for point in points.values()]
        setup = experiment.setup_factors()
        groups = len({tuple(cell[name] for name in setup) for cell in cells})
        # The share of a point in what set-ups take.
        self._overhead = sum(set_ups) / len(set_ups) * groups / len(cells) if cells else 0.0
        self._took: dict[str, list[float]] = {}
        self._overheads = [0.0, 0]
        self.measured_s = 0.0

    def add(self, cell: Cell, took_s: float) -> None:
        """A point took so long; one that was measured again counts as often."""
        self._took.setdefault(cell_key(cell), []).append(took_s)
        self.measured_s += took_s

    def add_overhead(self, seconds: float, points: int) -> None:
        """A set-up cost so much beyond its points: opening, ending, waiting."""
        self._overheads[0] += seconds
        self._overheads[1] += points

    def cell_s(self, key: str) -> float:
        """The expected duration of one point of this cell, with its share of the set-up."""
        seconds, points = self._overheads
        overhead = seconds / points if points else self._overhead
        if key in self._took:
            return sum(self._took[key]) / len(self._took[key]) + overhead
        measured = [(t, self._expected[k]) for k, took in self._took.items() for t in took]
        expected = sum(each for _, each in measured)
        # How much slower than its own words the workload has been so far.
        ratio = sum(took for took, _ in measured) / expected if expected else 1.0
        return self._expected[key] * ratio + overhead

    def left_s(self, done: Counter[str], elapsed_s: float) -> tuple[float, float]:
        """The least and the greatest time left when `done` points of each cell are done."""
        repeat = self._repeat
        block = sum(map(self.cell_s, self._cells))
        most_blocks = repeat.at_most if repeat.until is not None else repeat.times
        begun = max(done.values(), default=0)
        least_blocks = min(max(repeat.times, begun), most_blocks)
        least, most = (
            sum(max(blocks - done[key], 0) * self.cell_s(key) for key in self._cells)
            for blocks in (least_blocks, most_blocks)
        )
        if repeat.minutes is not None:
            limit = max(repeat.minutes * 60 - elapsed_s, 0) + block
            least, most = min(least, limit), min(most, limit)
        return least, most


class Progress:
    """Lines about a run. `out` is a text stream, such as standard error."""

    def __init__(self, out: TextIO, name: str):
        self._out = out
        self._name = name
        self._is_terminal = out.isatty()
        self._shown_at = float("-inf")
        self._is_open = False  # whether the terminal's line has no end yet

    def note(self, text: str) -> None:
        """A line of its own."""
        self._end_line()
        print(printable(f"{self._name}: {text}"), file=self._out, flush=True)

    def point(
        self, block: int, number: int, of: int, cell: Cell, value: str, left: tuple[float, float]
    ) -> None:
        """A point was measured, `number` of `of`, both from 1; `block` counts from 0."""
        now = time.monotonic()
        if not self._is_terminal and now - self._shown_at < LINE_EVERY_S:
            return
        self._shown_at = now
        parts = [
            f"{self._name}: repetition {block + 1}, point {number} of {of}",
            f"{span(left)} left" if left[1] > 0 else "done",
            value,
            cell_text(cell),
        ]
        text = printable(" · ".join(part for part in parts if part).replace("\n", " "))
        if not self._is_terminal:
            print(text, file=self._out, flush=True)
            return
        width = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{text[: width - 1]}", end="", file=self._out, flush=True)
        self._is_open = True

    def _end_line(self) -> None:
        if self._is_open:
            print("\r\x1b[K", end="", file=self._out)
            self._is_open = False
