"""The runner: order and set-ups, disturbance, failures, stop rules, interruption, resumption."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(LAB)]
import small_workload
from small_workload import events, hooks, value_of

from tombolo_lab import LabError, harness, limits, machine, model, runner, sandbox
from tombolo_lab.machine import Usage
from tombolo_lab.results import Run, cell_key
from tombolo_lab.workloads import REGISTRY, PointTimeout, Skip

CELLS = 6
BLOCKS = 4
# What identifies the machine takes a second and is tested in test_machine.
CONDITIONS = {
    "date": "2026-11-25T10:00:00Z",
    "load": [0.0, 0.0, 0.0],
    "kernel": "6.1",
    "program": "/usr/bin/tombolo",
    "program_sha256": "12" * 32,
    "tools": {},
}
PATIENCE_S = 30


def usage(others=0.0, stolen=0.0):
    names = ("ours", "kernel", "irq", "softirq")
    more = {f"{name}_cpus": 0.0 for name in names}
    return Usage(seconds=0.01, others_cpus=others, stolen_cpus=stolen, interrupts_s=0.0,
                 context_switches_s=0.0, **more)  # fmt: skip


class FakeMeter:
    """A meter that finds what the test's list says, then quiet."""

    usages: list = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.usage = self.usages.pop(0) if self.usages else usage()


class RunnerTest(unittest.TestCase):
    def setUp(self):
        small_workload.reset()
        FakeMeter.usages = []
        self.enterContext(mock.patch.dict(REGISTRY, {"small": small_workload.TARGET}))
        self.conditions = {**CONDITIONS}
        self.enterContext(
            mock.patch.object(machine, "conditions", lambda *_: {**self.conditions, "tools": {}})
        )
        self.enterContext(mock.patch.object(sandbox, "ENDING_S", 0.2))
        # In memory where that is possible: each point is synced.
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.base = Path(self.enterContext(tempfile.TemporaryDirectory(dir=memory)))
        self.folder = self.base / "run"
        self.out = io.StringIO()

    def experiment(self, *changes, settings=()):
        """The small experiment with texts replaced: pairs of before and after."""
        text = small_workload.EXPERIMENT
        for before, after in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        path = self.base / "small.toml"
        path.write_text(text)
        return model.load(str(path), settings)

    def run_it(self, experiment=None, resume=False):
        experiment = experiment or self.experiment()
        return runner.run(experiment, self.folder, resume, self.out)

    def called(self, moment):
        return [event[1:] for event in events if event[0] == moment]


def final_points(points):
    """What is compared: the points that are not marked for another attempt, without times."""
    return sorted(
        (point["block"], cell_key(point["cell"]), json.dumps(point.get("measures")))
        for point in points
    )


class Points(RunnerTest):
    def test_every_cell_is_measured_in_every_block(self):
        run = self.run_it()
        self.assertEqual(len(run.points), CELLS * BLOCKS)
        counts = Counter((point["block"], cell_key(point["cell"])) for point in run.points)
        self.assertEqual(set(counts.values()), {1})
        for point in run.points:
            self.assertEqual(point["measures"], {"value": value_of(point["cell"]), "share": 0.5})
            self.assertIsNone(point["disturbed"])
            self.assertGreater(point["took_s"], 0)
            self.assertLess(point["took_s"], 60)
        self.assertEqual(Run.load(self.folder).points, run.points)

    def test_the_order_is_that_of_the_experiment(self):
        experiment = self.experiment()
        run = self.run_it(experiment)
        for block in range(BLOCKS):
            cells = [point["cell"] for point in run.points if point["block"] == block]
            self.assertEqual(cells, experiment.block(block))

    def test_cells_that_agree_in_set_up_parameters_share_one(self):
        self.run_it()
        self.assertEqual(len(self.called("open")), 2 * BLOCKS)
        self.assertEqual(len(self.called("close")), 2 * BLOCKS)
        depth = kind = None
        for moment, colour, _ in events:
            if moment == "open":
                self.assertIsNone(depth)
                depth, kind = 1, colour
            elif moment == "measure":
                self.assertEqual(colour, kind)
            elif moment == "close":
                depth = None

    def test_the_given_order_has_all_repetitions_of_a_cell_in_a_row(self):
        experiment = self.experiment("[repeat]", '[order]\nkind = "given"\n[repeat]')
        run = self.run_it(experiment)
        expected = [(cell, block) for cell in experiment.cells() for block in range(BLOCKS)]
        self.assertEqual([(p["cell"], p["block"]) for p in run.points], expected)
        self.assertEqual(len(self.called("open")), CELLS * BLOCKS)

    def test_the_interleaved_order_is_the_same_in_each_block(self):
        experiment = self.experiment("[repeat]", '[order]\nkind = "interleaved"\n[repeat]')
        run = self.run_it(experiment)
        self.assertEqual([p["cell"] for p in run.points], experiment.cells() * BLOCKS)

    def test_without_set_up_factors_a_block_has_one_set_up(self):
        self.run_it(self.experiment('kind = ["red", "green"]\n', "",
                                    "[repeat]", '[fixed]\nkind = "red"\n[repeat]'))  # fmt: skip
        self.assertEqual(len(self.called("open")), BLOCKS)

    def test_samples_and_tools_are_kept(self):
        hooks["measure"] = lambda cell: {
            "value": 1, "share": None, "samples": {"value": [1, 2]}, "tools": {"ping": "v1"},
        }  # fmt: skip
        run = self.run_it()
        self.assertEqual(run.points[0]["samples"], {"value": [1.0, 2.0]})
        self.assertEqual(run.points[0]["tools"], {"ping": "v1"})
        self.assertEqual(Run.load(self.folder).conditions["tools"], {"ping": "v1"})

    def test_conditions_and_session_are_kept(self):
        run = self.run_it()
        self.assertEqual(run.conditions["kernel"], "6.1")
        self.assertEqual(len(run.conditions["sessions"]), 1)
        self.assertEqual(run.conditions["sessions"][0]["stopped"], "all repetitions were measured")
        self.assertNotIn("warnings", run.conditions)

    def test_a_busy_machine_is_said(self):
        with mock.patch.object(machine, "wait_quiet", return_value="other processes took 2 CPUs"):
            self.run_it()
        self.assertIn("the machine is busy, so points may be disturbed: other", self.out.getvalue())

    def test_no_space_is_an_error_before_anything_runs(self):
        with (
            mock.patch.object(runner, "SPACE_BYTES", 1 << 60),
            self.assertRaisesRegex(LabError, "MiB of free space, found"),
        ):
            self.run_it()
        self.assertEqual(self.called("open"), [])

    def test_a_full_disk_ends_the_run_and_its_set_up(self):
        real = os.write

        def write(handle, data):
            if data.startswith(b'{"block": 1'):
                return real(handle, data[:10])
            return real(handle, data)

        with (
            mock.patch("tombolo_lab.results.os.write", write),
            self.assertRaisesRegex(LabError, "no space left"),
        ):
            self.run_it()
        self.assertEqual(len(Run.load(self.folder).points), CELLS)
        self.assertEqual(len(self.called("open")), len(self.called("close")))


class Skipping(RunnerTest):
    def test_cells_that_cannot_run_are_skipped_with_the_reason(self):
        def check(cell):
            if cell["size"] == 3:
                raise Skip("no threes here")

        hooks["check"] = check
        run = self.run_it()
        self.assertEqual(len(run.points), 4 * BLOCKS)
        self.assertEqual({entry["cell"]["size"] for entry in run.skipped}, {3})
        self.assertEqual(json.loads((self.folder / "skipped.json").read_text()), run.skipped)
        self.assertIn("2 cells skipped: no threes here", self.out.getvalue())

    def test_a_run_in_which_all_is_skipped_measures_nothing(self):
        def check(cell):
            raise Skip("needs the moon")

        hooks["check"] = check
        run = self.run_it()
        self.assertEqual((run.points, len(run.skipped)), ([], CELLS))
        self.assertEqual(run.conditions["sessions"][0]["stopped"], "every cell is skipped")

    def test_a_set_up_that_cannot_be_opened_skips_its_cells(self):
        def opened(cell):
            if cell["kind"] == "green":
                raise Skip("no green")

        hooks["open"] = opened
        for order in ("randomised", "given"):
            with self.subTest(order=order):
                self.folder = self.base / order
                run = self.run_it(
                    self.experiment("[repeat]", f'[order]\nkind = "{order}"\n[repeat]')
                )
                self.assertEqual({point["cell"]["kind"] for point in run.points}, {"red"})
                self.assertEqual(len(run.points), 3 * BLOCKS)
                self.assertEqual(len(run.skipped), 3)
                self.assertEqual(run.skipped[0]["reason"], "no green")

    def test_a_point_that_finds_out_late_skips_its_cell_only(self):
        def measure(cell):
            if (cell["kind"], cell["size"]) == ("red", 2):
                raise Skip("no red twos")

        hooks["measure"] = measure
        run = self.run_it()
        self.assertEqual(len(run.points), 5 * BLOCKS)
        self.assertEqual(
            run.skipped, [{"cell": {"kind": "red", "size": 2}, "reason": "no red twos"}]
        )


class Disturbed(RunnerTest):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(machine, "Meter", FakeMeter))
        self.enterContext(mock.patch.object(machine, "wait_quiet", lambda *_: None))
        self.limited = ("others_cpus = 1000\nstolen_cpus = 1000", "others_cpus = 2.5")

    def test_a_disturbed_point_is_kept_and_measured_again_in_the_same_set_up(self):
        FakeMeter.usages = [usage(), usage(others=9.0), usage()]
        run = self.run_it(self.experiment(*self.limited))
        self.assertEqual(len(run.points), CELLS * BLOCKS + 1)
        first, again = run.points[1:3]
        self.assertEqual((first["attempt"], again["attempt"]), (1, 2))
        self.assertEqual(first["cell"], again["cell"])
        self.assertIn("other processes took 9.00 CPUs, more than 2.5", first["disturbed"])
        self.assertIsNone(again["disturbed"])
        self.assertEqual(len(self.called("open")), 2 * BLOCKS)
        self.assertEqual(run.counts()["points"], CELLS * BLOCKS)
        self.assertEqual(run.counts()["disturbed"], 0)

    def test_a_workload_can_say_itself_that_a_point_was_disturbed(self):
        told = []

        def measure(cell):
            told.append(cell)
            found = {"value": small_workload.value_of(cell), "share": 0.5}
            return found | ({"disturbed": "it was late"} if len(told) == 2 else {})

        hooks["measure"] = measure
        FakeMeter.usages = [usage()] * 3
        run = self.run_it(self.experiment(*self.limited))
        self.assertEqual([p["disturbed"] for p in run.points[:3]], [None, "it was late", None])
        self.assertEqual(run.points[1]["cell"], run.points[2]["cell"])
        self.assertEqual((run.points[2]["attempt"], told[1]), (2, told[2]))

    def test_disturbed_points_count_where_the_experiment_says_so(self):
        hooks["measure"] = lambda cell: {
            "value": small_workload.value_of(cell), "share": 0.5, "disturbed": "it was late"
        }  # fmt: skip
        FakeMeter.usages = [usage(), usage(others=9.0)]
        run = self.run_it(self.experiment(self.limited[0], self.limited[1] + "\ncount = true"))
        self.assertEqual(len(run.points), CELLS * BLOCKS)
        self.assertEqual({p["disturbed"] for p in run.points}, {None})
        self.assertEqual(run.points[0]["notes"], {"disturbed": "it was late"})
        self.assertIn("9.00 CPUs", run.points[1]["notes"]["disturbed"])
        self.assertEqual(run.counts()["points"], CELLS * BLOCKS)

    def test_notes_of_a_workload_are_kept_with_the_point(self):
        hooks["measure"] = lambda cell: {
            "value": small_workload.value_of(cell), "share": 0.5, "notes": {"stacks": {"a;b": 3}}
        }  # fmt: skip
        run = self.run_it(self.experiment(*self.limited))
        self.assertEqual(run.points[0]["notes"], {"stacks": {"a;b": 3}})

    def test_what_the_opening_measures_is_watched_and_written_once(self):
        """A disturbed opening marks the point that carries its value, and is done again."""
        self.enterContext(mock.patch.object(small_workload.Small, "opened", ("share",)))
        # The first set-up, its opening disturbed until the carrier is measured, then all is quiet.
        experiment = self.experiment(*self.limited)
        order = experiment.block(0)[:3]
        before = order.index({"kind": order[0]["kind"], "size": 1})
        FakeMeter.usages = [usage(others=9.0), *[usage()] * (before + 1)]
        run = self.run_it(experiment)
        marked = [point for point in run.points if point["disturbed"]]
        self.assertEqual(len(marked), 1)
        self.assertEqual(marked[0]["cell"], order[before])
        self.assertIn("while the set-up was opened: other processes took 9.00 CPUs",
                      marked[0]["disturbed"])  # fmt: skip
        again = run.points[before + 1]
        self.assertEqual((again["cell"], again["attempt"]), (order[before], 2))
        self.assertEqual(len(self.called("open")), 2 * BLOCKS + 1)
        self.assertEqual(len(run.points), CELLS * BLOCKS + 1)
        carried = [p["cell"] for p in run.counted() if p["measures"]["share"] is not None]
        self.assertEqual(len(carried), 2 * BLOCKS)
        self.assertEqual({cell["size"] for cell in carried}, {1})

    def test_an_opening_that_stays_disturbed_leaves_its_point_marked(self):
        self.enterContext(mock.patch.object(small_workload.Small, "opened", ("share",)))
        experiment = self.experiment(*self.limited, "size = [1, 2, 3]", "size = [1]",
                                     "times = 4", "times = 1")  # fmt: skip
        FakeMeter.usages = [usage(others=9.0), usage()] * 3
        run = self.run_it(experiment)
        self.assertEqual([p["attempt"] for p in run.points], [1, 2, 3, 1])
        self.assertEqual([bool(p["disturbed"]) for p in run.points], [True, True, True, False])
        self.assertEqual(len(self.called("open")), 4)
        self.assertEqual(len(self.called("close")), 4)

    def test_after_its_retries_it_stays_and_does_not_count(self):
        FakeMeter.usages = [usage(stolen=5.0)] * 3
        run = self.run_it(self.experiment(*self.limited))
        self.assertEqual(len(run.points), CELLS * BLOCKS + 2)
        self.assertEqual([p["attempt"] for p in run.points[:4]], [1, 2, 3, 1])
        self.assertEqual(run.counts()["disturbed"], 1)
        self.assertEqual(run.counts()["points"], CELLS * BLOCKS - 1)
        self.assertEqual(len(run.counted()), CELLS * BLOCKS - 1)

    def test_resuming_counts_the_attempts_that_were_made(self):
        experiment = self.experiment(*self.limited)
        FakeMeter.usages = [usage(), usage(others=9.0), usage(others=9.0), usage(others=9.0)]
        run = self.run_it(experiment)
        for kept in range(1, 5):
            with self.subTest(kept=kept):
                lines = (self.base / "run" / "points.jsonl").read_text().splitlines()[:kept]
                self.folder = self.base / f"resumed-{kept}"
                self.folder.mkdir()
                for name in ("experiment.toml", "conditions.json", "skipped.json"):
                    text = (self.base / "run" / name).read_text()
                    (self.folder / name).write_text(text)
                (self.folder / "points.jsonl").write_text("\n".join(lines) + "\n")
                FakeMeter.usages = [usage(others=9.0)] * (4 - kept)
                again = self.run_it(experiment, resume=True)
                self.assertEqual(len(again.points), len(run.points))
                self.assertEqual([p["attempt"] for p in again.points[:5]], [1, 1, 2, 3, 1])


class Failures(RunnerTest):
    def fails(self, times, kind=ValueError, text="broken"):
        """A hook that fails so many times for the cell red 2, then works."""
        left = [times]

        def hook(cell):
            if (cell["kind"], cell["size"]) == ("red", 2) and left[0]:
                left[0] -= 1
                raise kind(text)

        return hook

    def test_a_point_that_fails_once_is_measured_in_a_fresh_set_up(self):
        hooks["measure"] = self.fails(1)
        run = self.run_it()
        self.assertEqual(run.counts()["failed"], 0)
        self.assertEqual(len(run.points), CELLS * BLOCKS)
        self.assertEqual(len(self.called("open")), 2 * BLOCKS + 1)
        self.assertEqual(len(self.called("close")), 2 * BLOCKS + 1)
        told = [point for point in run.points if "earlier_failure" in point]
        self.assertEqual([point["cell"] for point in told], [{"kind": "red", "size": 2}])
        self.assertRegex(told[0]["earlier_failure"], r"^ValueError: broken \(test_runner.py:\d+\)$")
        self.assertEqual(told[0]["measures"]["value"], 20.0)

    def test_a_point_that_fails_twice_is_recorded_and_the_others_are_measured(self):
        hooks["measure"] = self.fails(2)
        run = self.run_it()
        failed = [point for point in run.points if "failed" in point]
        self.assertEqual(len(failed), 1)
        self.assertIn("ValueError: broken", failed[0]["failed"])
        self.assertNotIn("measures", failed[0])
        self.assertEqual(run.counts(), {
            "points": CELLS * BLOCKS - 1, "disturbed": 0, "failed": 1, "disturbed_attempts": 0,
            "skipped_cells": 0,
        })  # fmt: skip
        log = (self.folder / "failures.log").read_text()
        self.assertEqual(log.count("ValueError: broken"), 2)
        self.assertIn("Traceback", log)

    def test_values_out_of_range_and_missing_ones_are_failures_with_the_reason(self):
        for returned, words in (
            ({"value": 1001, "share": 0}, "value: expected at most 1000, found 1001 things"),
            ({"value": float("nan"), "share": 0}, "value: expected a finite number, found nan"),
            ({"value": 1}, "no value for share"),
            (None, "expected a dict, found NoneType"),
        ):
            with self.subTest(words=words):
                self.folder = self.base / words[:12].replace(" ", "-") / words[-3:]
                bad = [returned] * 2
                with mock.patch.object(
                    small_workload.Small, "measure",
                    lambda *_, bad=bad: bad.pop() if bad else {"value": 1, "share": 0},
                ):  # fmt: skip
                    run = self.run_it()
                self.assertEqual(run.counts()["failed"], 1)
                self.assertIn(words, next(p["failed"] for p in run.points if "failed" in p))

    def test_a_set_up_that_fails_once_is_opened_again(self):
        left = [1]

        def opened(cell):
            if left[0]:
                left[0] -= 1
                raise OSError("no room")

        hooks["open"] = opened
        run = self.run_it()
        self.assertEqual(len(run.points), CELLS * BLOCKS)
        self.assertEqual(run.counts()["failed"], 0)
        self.assertIn("the set-up failed: OSError: no room", self.out.getvalue())

    def test_a_set_up_that_fails_twice_fails_its_cells_and_no_others(self):
        def opened(cell):
            if cell["kind"] == "green":
                raise OSError("no room")

        hooks["open"] = opened
        run = self.run_it()
        failed = [point for point in run.points if "failed" in point]
        self.assertEqual({point["cell"]["kind"] for point in failed}, {"green"})
        self.assertEqual(run.counts()["failed"], 3 * BLOCKS)
        self.assertEqual(run.counts()["points"], 3 * BLOCKS)
        self.assertTrue(failed[0]["failed"].startswith("set-up: OSError: no room"))
        # After GIVE_UP blocks it is not opened any more.
        self.assertEqual(sum(e[0] == "open" and e[1] == "green" for e in events),
                         runner.TRIES * runner.GIVE_UP)  # fmt: skip
        self.assertTrue(failed[-1]["failed"].startswith("not tried after 3 failures in a row: set"))

    def test_a_cell_that_recovers_is_not_given_up(self):
        hooks["measure"] = self.fails(2 * (runner.GIVE_UP - 1))
        run = self.run_it()
        self.assertEqual(run.counts()["failed"], runner.GIVE_UP - 1)

    def test_an_end_that_fails_is_a_warning_and_the_points_stay(self):
        hooks["close"] = lambda cell: 1 / 0
        run = self.run_it()
        self.assertEqual(run.counts()["points"], CELLS * BLOCKS)
        self.assertEqual(len(run.conditions["warnings"]), 2 * BLOCKS)
        self.assertIn("ZeroDivisionError", run.conditions["warnings"][0])

    def test_an_end_that_fails_after_a_failure_does_not_hide_it(self):
        hooks["measure"] = self.fails(2)
        hooks["close"] = self.fails(1, OSError, "stuck")
        # Red 2 comes first, so that the set-up is its own.
        run = self.run_it(self.experiment("size = [1, 2, 3]", "size = [2]"))
        failed = [point["failed"] for point in run.points if "failed" in point]
        self.assertEqual(len(failed), 1)
        self.assertIn("ValueError: broken", failed[0])
        self.assertEqual(len(run.conditions["warnings"]), 1)
        self.assertIn("OSError: stuck", run.conditions["warnings"][0])

    def test_what_a_set_up_leaves_running_is_ended_and_said(self):
        def opened(cell):
            if not opened.pid:
                opened.process = subprocess.Popen(["sleep", "1000"])
                opened.pid = opened.process.pid

        opened.pid = 0
        hooks["open"] = opened
        run = self.run_it()
        self.assertEqual(run.conditions["warnings"], ["a set-up left behind: process sleep"])
        self.assertFalse(Path(f"/proc/{opened.pid}").exists())
        opened.process.wait()


class Limits(RunnerTest):
    def test_a_point_that_takes_too_long_fails_and_says_what_it_waits_for(self):
        def measure(cell):
            if (cell["kind"], cell["size"]) == ("red", 2):
                time.sleep(60)

        hooks["measure"] = measure
        experiment = self.experiment("times = 4", "times = 1")
        begun = time.monotonic()
        with mock.patch.object(runner, "time_limit", lambda expected: 0.2):
            run = self.run_it(experiment)
        self.assertLess(time.monotonic() - begun, 20)
        self.assertEqual(run.counts()["failed"], 1)
        self.assertRegex(
            next(point["failed"] for point in run.points if "failed" in point),
            r"^the point took more than 0 s, waiting for test_runner.py:\d+ \(measure\)$",
        )
        self.assertEqual(len(self.called("open")), len(self.called("close")))

    def test_a_set_up_has_a_limit_too(self):
        hooks["open"] = lambda cell: time.sleep(60)
        with mock.patch.object(runner, "time_limit", lambda expected: 0.1):
            run = self.run_it(self.experiment("times = 4", "times = 1"))
        self.assertEqual(run.counts()["failed"], CELLS)
        self.assertIn("set-up: the set-up took more than", run.points[0]["failed"])

    def test_the_limit_grows_with_the_expected_duration(self):
        self.assertEqual(limits.time_limit(10), 90)

    def test_the_limit_is_gone_after_it(self):
        with limits.limited(0.05, "it"):
            pass
        time.sleep(0.1)
        self.assertEqual(signal.getitimer(signal.ITIMER_REAL), (0.0, 0.0))

    def test_the_harness_tells_what_it_waits_for(self):
        from tombolo_lab import harness

        try:
            until = harness.until
        except LabError:
            self.skipTest("this is no checkout")
        with (
            self.assertRaisesRegex(PointTimeout, "waiting for a reply from afar, test_runner.py"),
            limits.limited(0.1, "the point"),
        ):
            until("a reply from afar", lambda: False)
        with (
            self.assertRaisesRegex(PointTimeout, "waiting for sleep: a line of output, test_run"),
            limits.limited(3, "the point"),
            harness.Process(["sleep", "100"]) as process,
        ):
            process.wait_line(lambda line: True)
        process.popen.stdout.close()


class StopRules(RunnerTest):
    def until(self, until, times=2, at_most=8):
        rule = f"times = {times}\nuntil = {until}\nat_most = {at_most}"
        return self.experiment("times = 4", rule)

    def noisy(self, spread):
        """Values with a relative spread, the same in each run."""
        source = random.Random(1)
        return lambda cell: {"value": 100 * source.gauss(1, spread), "share": 0}

    def test_narrow_intervals_end_it_after_the_least_number(self):
        run = self.run_it(self.until(0.05))
        self.assertEqual(len(run.points), 2 * CELLS)
        self.assertIn("narrow enough", run.conditions["sessions"][0]["stopped"])

    def test_wide_intervals_end_it_at_the_limit(self):
        hooks["measure"] = self.noisy(0.5)
        run = self.run_it(self.until(0.01))
        self.assertEqual(len(run.points), 8 * CELLS)
        self.assertIn("limit of 8 repetitions", run.conditions["sessions"][0]["stopped"])

    def test_it_goes_on_until_every_cell_is_narrow(self):
        hooks["measure"] = self.noisy(0.05)
        run = self.run_it(self.until(0.06, at_most=60))
        blocks = len(run.points) // CELLS
        self.assertGreater(blocks, 2)
        self.assertLess(blocks, 60)
        from tombolo_lab.stopping import relative_half_width

        for cell in run.experiment.cells():
            values = [p["measures"]["value"] for p in run.points if p["cell"] == cell]
            self.assertLessEqual(relative_half_width(values), 0.06)
        # One block less was not enough.
        self.assertTrue(any(
            relative_half_width([p["measures"]["value"] for p in run.points
                                 if p["cell"] == cell and p["block"] < blocks - 1]) > 0.06
            for cell in run.experiment.cells()
        ))  # fmt: skip

    def test_in_the_given_order_each_cell_has_its_own_number(self):
        source = random.Random(1)
        hooks["measure"] = lambda cell: {
            "value": 100 * source.gauss(1, 0.3) if cell["kind"] == "red" else 5, "share": 0,
        }  # fmt: skip
        rule = 'times = 2\nuntil = 0.01\nat_most = 8\n[order]\nkind = "given"'
        run = self.run_it(self.experiment("times = 4", rule))
        counts = Counter(point["cell"]["kind"] for point in run.points)
        self.assertEqual(counts, {"red": 3 * 8, "green": 3 * 2})

    def test_disturbed_points_do_not_narrow_an_interval(self):
        FakeMeter.usages = [usage(others=2000.0)] * 3
        with (
            mock.patch.object(machine, "Meter", FakeMeter),
            mock.patch.object(machine, "wait_quiet", lambda *_: None),
        ):
            run = self.run_it(self.until(0.05))
        self.assertEqual(run.counts()["disturbed"], 1)
        self.assertEqual(len({point["block"] for point in run.points}), 3)

    def test_a_cell_whose_points_were_all_disturbed_is_not_narrow(self):
        first = []

        def measure(cell):
            first.append(cell) if not first else None
            if cell == first[0]:
                return {"value": 1.0, "share": 0.5, "disturbed": "the client was late"}

        hooks["measure"] = measure
        run = self.run_it(self.until(0.05, at_most=4))
        self.assertEqual(len({point["block"] for point in run.points}), 4)
        self.assertIn("limit of 4 repetitions", run.conditions["sessions"][0]["stopped"])

    def test_no_block_begins_after_the_minutes(self):
        experiment = self.experiment("times = 4", "times = 4\nminutes = 0.000001")
        run = self.run_it(experiment)
        self.assertEqual(len(run.points), CELLS)
        self.assertIn("no repetition begins after", run.conditions["sessions"][0]["stopped"])

    def test_minutes_in_the_given_order_leave_one_repetition_of_each_cell(self):
        rule = 'times = 4\nminutes = 0.000001\n[order]\nkind = "given"'
        run = self.run_it(self.experiment("times = 4", rule))
        self.assertEqual(len(run.points), CELLS)


class Resuming(RunnerTest):
    def interrupted(self, experiment, after, number=signal.SIGINT):
        """Runs until a signal in the point after `after` others."""
        count = [0]

        def measure(cell):
            count[0] += 1
            if count[0] == after + 1:
                os.kill(os.getpid(), number)
                time.sleep(5)

        hooks["measure"] = measure
        with self.assertRaises(KeyboardInterrupt):
            self.run_it(experiment)
        hooks.clear()

    def test_a_signal_ends_the_set_up_keeps_the_points_and_says_how_to_go_on(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number):
                small_workload.reset()
                self.folder = self.base / str(int(number))
                handler = signal.getsignal(number)
                self.interrupted(self.experiment(), 7, number)
                self.assertEqual(signal.getsignal(number), handler)
                self.assertEqual(len(Run.load(self.folder).points), 7)
                self.assertEqual(len(self.called("open")), len(self.called("close")))
                self.assertIn(f"tombolo lab run --resume {self.folder}", self.out.getvalue())
                self.assertIsNone(sandbox.current)

    def test_resuming_measures_only_what_is_missing_in_the_same_order(self):
        experiment = self.experiment()
        for after in (0, 1, 5, 6, 7, CELLS * BLOCKS - 1):
            with self.subTest(after=after):
                small_workload.reset()
                self.folder = self.base / f"after-{after}"
                self.interrupted(experiment, after)
                small_workload.reset()
                run = self.run_it(experiment, resume=True)
                self.assertEqual(len(self.called("measure")), CELLS * BLOCKS - after)
                order = [(b, cell) for b in range(BLOCKS) for cell in experiment.block(b)]
                self.assertEqual([(p["block"], p["cell"]) for p in run.points], order)
                self.assertEqual(
                    [s["stopped"] for s in run.conditions["sessions"]],
                    ["interrupted", "all repetitions were measured"],
                )

    def test_deadlines_have_the_same_task_sets_after_a_resumption_and_a_retry(self):
        """Real runner and workload; what misses would print tells the seed that it was given."""
        path = self.base / "deadlines.toml"
        path.write_text(
            'title = "D"\nabout = "D."\nworkload = "deadlines"\nprimary = "missed"\n'
            'measures = ["missed", "demanded", "requests"]\n'
            "[factors]\nload = [50, 90, 110]\n[repeat]\ntimes = 4\n"
            "[disturbed]\nothers_cpus = 1000\nstolen_cpus = 1000\n"
        )
        experiment = model.load(str(path))
        calls, trouble = [0], {}

        def rows(command, _):
            calls[0] += 1
            trouble.get(calls[0], lambda: None)()
            words = dict(zip(command[2::2], command[3::2], strict=True))
            row = {"tasks": "spread", "order": "edf", "admission": False, "missed": 0,
                   "demanded": 0, "requests": int(words["--first"])}  # fmt: skip
            return [row]

        def stop():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)

        self.enterContext(mock.patch("tombolo_lab.workloads.rpc.rows_of", rows))
        self.enterContext(mock.patch.object(harness, "example", Path))
        whole = self.run_it(experiment)
        seeds = [point["measures"]["requests"] for point in whole.points]
        self.assertEqual(len(set(seeds)), 12)
        self.assertTrue(all(seed < 1 << 48 for seed in seeds))
        self.folder, calls[0], trouble[5] = self.base / "again", 0, stop
        with self.assertRaises(KeyboardInterrupt):
            self.run_it(experiment)
        self.assertEqual(len(Run.load(self.folder).points), 4)
        # The second set-up after the resumption fails once.
        calls[0], trouble = 0, {2: lambda: 1 / 0}
        again = self.run_it(experiment, resume=True)
        self.assertEqual(final_points(again.points), final_points(whole.points))
        self.assertEqual(calls[0], 9)
        path.write_text("seed = 7\n" + path.read_text())
        other = model.load(str(path))
        self.folder = self.base / "other"
        others = {point["measures"]["requests"] for point in self.run_it(other).points}
        self.assertFalse(others & set(seeds))

    def test_resuming_a_complete_run_measures_nothing(self):
        self.run_it()
        small_workload.reset()
        run = self.run_it(resume=True)
        self.assertEqual(self.called("open"), [])
        self.assertEqual(len(run.points), CELLS * BLOCKS)

    def test_failed_points_are_not_repeated(self):
        hooks["measure"] = lambda cell: 1 / 0
        run = self.run_it(self.experiment("times = 4", "times = 2"))
        small_workload.reset()
        again = self.run_it(self.experiment("times = 4", "times = 2"), resume=True)
        self.assertEqual(again.points, run.points)
        self.assertEqual(self.called("measure"), [])

    def test_a_block_that_was_begun_is_finished_after_the_minutes(self):
        experiment = self.experiment("times = 4", "times = 4\nminutes = 10")
        self.interrupted(experiment, CELLS + 2)
        with mock.patch.object(runner.Runner, "elapsed_s", lambda self: 601.0):
            run = self.run_it(experiment, resume=True)
        self.assertEqual(len(run.points), 2 * CELLS)

    def test_it_stops_where_a_run_that_was_not_interrupted_stops(self):
        experiment = self.experiment("times = 4", "times = 2\nuntil = 0.2\nat_most = 50")

        def values(cell):
            # A value for each cell and block, whatever was measured before.
            values.count += 1
            source = random.Random(f"{values.count}")
            return {"value": 100 * source.gauss(1, 0.2), "share": 0}

        values.count = 0
        hooks["measure"] = values
        whole = self.run_it(experiment)
        self.assertGreater(len(whole.points), 3 * CELLS)
        for after in (2 * CELLS, 2 * CELLS + 3, len(whole.points) - 1):
            with self.subTest(after=after):
                self.folder = self.base / f"stop-{after}"
                self.interrupted_values(experiment, after, values)
                values.count = after
                hooks["measure"] = values
                run = self.run_it(experiment, resume=True)
                self.assertEqual(final_points(run.points), final_points(whole.points))

    def interrupted_values(self, experiment, after, values):
        values.count = 0

        def measure(cell):
            if values.count == after:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            return values(cell)

        hooks["measure"] = measure
        with self.assertRaises(KeyboardInterrupt):
            self.run_it(experiment)

    def test_another_experiment_is_refused_and_the_difference_is_named(self):
        self.run_it()
        other = self.experiment("times = 4", "times = 5", "size = [1, 2, 3]", "size = [1, 2]")
        with self.assertRaises(LabError) as caught:
            self.run_it(other, resume=True)
        text = str(caught.exception)
        self.assertIn("cannot be resumed: the experiment differs:", text)
        self.assertIn("factors.size was [1, 2, 3], is [1, 2]", text)
        self.assertIn("repeat.times was 4, is 5", text)
        self.assertNotIn("program", text)
        self.assertEqual(len(Run.load(self.folder).points), CELLS * BLOCKS)

    def test_another_program_kernel_or_workload_is_refused(self):
        self.run_it()
        for key, value, words in (
            ("program_sha256", "34" * 32,
             "the program (/usr/bin/tombolo) differs: SHA-256 was 121212121212, is 343434343434"),
            ("program_sha256", None, "SHA-256 was 121212121212, is none"),
            ("kernel", "6.2", "the kernel differs: it was 6.1, is 6.2"),
        ):  # fmt: skip
            with self.subTest(words=words):
                self.conditions = {**CONDITIONS, key: value}
                with self.assertRaises(LabError) as caught:
                    self.run_it(resume=True)
                self.assertIn(words, str(caught.exception))
        self.conditions = CONDITIONS
        with (
            mock.patch.object(machine, "file_hash", lambda path: "56" * 32),
            self.assertRaisesRegex(LabError, r"source of the workload \(small\) differs"),
        ):
            self.run_it(resume=True)
        self.run_it(resume=True)

    def test_other_files_than_those_measured_before_are_refused(self):
        """The workload's programs as its check names them, on the way of the real workloads."""
        tree = self.base / "tree"
        (tree / "tests/lib").mkdir(parents=True)
        for path in ("tests/lib/__init__.py", "examples/misses", "bin/qemu-system-x86_64"):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text("one")
            (tree / path).chmod(0o755)
        self.enterContext(mock.patch.dict(os.environ, {
            "TOMBOLO_TREE": str(tree), "TOMBOLO_EXAMPLES": str(tree / "examples"),
            "PATH": f"{tree / 'bin'}:{os.environ['PATH']}",
        }))  # fmt: skip
        os.environ.pop("TOMBOLO_QEMU", None)

        def check(cell):
            harness.example("misses")
            harness.need_program("qemu-system-x86_64")

        hooks["check"] = check
        run = self.run_it()
        self.assertLessEqual(
            {"examples/misses", "bin/qemu-system-x86_64", str(LAB / "tombolo_lab/sandbox.py"),
             str(LAB / "tests/small_workload.py")}, set(run.conditions["hashes"]),
        )  # fmt: skip
        self.run_it(resume=True)
        for path in ("examples/misses", "bin/qemu-system-x86_64"):
            with self.subTest(path=path):
                (tree / path).write_text("two")
                with self.assertRaises(LabError) as caught:
                    self.run_it(resume=True)
                text = str(caught.exception)
                self.assertRegex(
                    text, rf"begun with, found others .*: {path} was 7692c3ad3540, is 3fc4ccfe7458"
                )
                self.assertIn(". Put these files back, or begin a new run.", text)
                (tree / path).write_text("one")
        kept = json.loads((self.folder / "conditions.json").read_text())
        del kept["hashes"]
        (self.folder / "conditions.json").write_text(json.dumps(kept))
        with self.assertRaisesRegex(LabError, "found none: it was begun .*. Begin a new run."):
            self.run_it(resume=True)

    def test_the_sources_of_a_workload_are_those_that_it_imports(self):
        def names(module):
            found = runner.source_files(LAB / f"tombolo_lab/workloads/{module}.py")
            return {path.name for path in found if path.parent.name == "workloads"}

        self.assertEqual(
            names("bypass"),
            {"__init__.py", "bypass.py", "router.py", "stacks.py", "tools.py", "endpoints.py"},
        )
        self.assertIn("calls.py", names("rpc"))
        self.assertNotIn("bypass.py", names("rpc"))

    def test_a_second_run_in_a_folder_is_refused(self):
        self.run_it()
        with self.assertRaisesRegex(LabError, "holds a run already"):
            self.run_it()


class Killed(RunnerTest):
    """A run that is killed at any moment: nothing stays, and the rest can be measured."""

    def session(self, experiment, delay_s=None):
        """One session in a process of its own, killed after a delay; True when it came to its
        end."""
        resume = (self.folder / "experiment.toml").exists()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            machine.die_with(parent)
            code = 1
            with contextlib.suppress(BaseException):
                runner.run(experiment, self.folder, resume, io.StringIO())
                code = 0
            os._exit(code)
        if delay_s is None:
            _, status = os.waitpid(child, 0)
            self.assertEqual(os.waitstatus_to_exitcode(status), 0)
            return True
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        self.assertIn(code, (0, -signal.SIGKILL))
        return code == 0

    def nothing_left(self, trace):
        """Asserts that processes and folders that the trace names are gone, or go now."""
        deadline = time.monotonic() + PATIENCE_S
        made = [line.split() for line in trace.read_text().splitlines()] if trace.exists() else []
        for pid, folder, _ in made:
            while Path(folder).exists() or self.is_sleep(pid):
                self.assertLess(time.monotonic(), deadline, f"{pid} or {folder} is left")
                time.sleep(0.01)
        return made

    @staticmethod
    def is_sleep(pid):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return Path(f"/proc/{pid}/comm").read_text() == "sleep\n" and state != "Z"
        except OSError:
            return False

    def test_killed_at_many_moments_it_has_the_same_points(self):
        trace = self.base / "trace"
        settings = ["wait_s=0.004", f"trace={trace}"]
        experiment = self.experiment(settings=settings)
        begun = time.monotonic()
        self.session(experiment)
        took_s = time.monotonic() - begun
        expected = final_points(Run.load(self.folder).points)
        self.assertEqual(len(expected), CELLS * BLOCKS)
        source = random.Random(20261125)
        kills = interrupted_within = 0
        for number in range(40):
            # Six sessions; more where a load that has ended since made the first one look slow.
            if number >= 6 and kills > 6 and interrupted_within > 3:
                break
            self.folder = self.base / f"killed-{number}"
            for _ in range(200):
                trace.unlink(missing_ok=True)
                before = Run.load(self.folder).points if kills and self.is_begun() else []
                ended = self.session(experiment, source.uniform(0, 0.7 * took_s))
                made = self.nothing_left(trace)
                if self.is_begun():
                    points = Run.load(self.folder).points
                    # What was kept stays as it is.
                    self.assertEqual(points[: len(before)], before)
                if ended:
                    break
                kills += 1
                interrupted_within += bool(made)
            self.session(experiment)
            self.assertEqual(final_points(Run.load(self.folder).points), expected)
        self.assertGreater(kills, 6)
        self.assertGreater(interrupted_within, 3)

    def is_begun(self):
        return (self.folder / "experiment.toml").exists()


class Progress(RunnerTest):
    def test_lines_for_a_file_are_few_and_have_the_time_left(self):
        self.run_it()
        lines = self.out.getvalue().splitlines()
        self.assertLess(len(lines), 5)
        self.assertRegex(lines[0], r"^small: repetition 1, point 1 of 24 · .* left · value \d+")
        self.assertEqual(
            lines[-1], "small: 24 points, 0 of them disturbed, 0 failed: "
            "all repetitions were measured",
        )  # fmt: skip

    def test_a_terminal_has_one_line_that_is_replaced(self):
        self.out.isatty = lambda: True
        self.run_it()
        text = self.out.getvalue()
        self.assertEqual(text.count("\n"), 1)
        self.assertIn("point 24 of 24 · done", text)

    def test_time_left_comes_from_what_was_measured(self):
        from tombolo_lab.progress import Estimate

        experiment = self.experiment()
        cells = experiment.cells()
        estimate = Estimate(small_workload.Small(), experiment, cells)
        # 10 ms for each point, and 2 of 6 set-ups of 10 ms for each point.
        least, most = estimate.left_s(Counter(), 0)
        self.assertAlmostEqual(least, CELLS * BLOCKS * (0.01 + 0.01 / 3))
        self.assertEqual(least, most)
        # The first cell took 100 times as long: the others are expected to do so too.
        estimate.add(cells[0], 1.0)
        estimate.add_overhead(0.5, 1)
        done = Counter({cell_key(cells[0]): 1})
        self.assertAlmostEqual(estimate.left_s(done, 0)[0], (CELLS * BLOCKS - 1) * 1.5)
        # Measured cells count for themselves.
        estimate.add(cells[1], 3.0)
        done[cell_key(cells[1])] = 1
        self.assertAlmostEqual(
            estimate.cell_s(cell_key(cells[0])) + estimate.cell_s(cell_key(cells[1])), 5.0
        )

    def test_time_left_with_until_is_a_span(self):
        from tombolo_lab.progress import Estimate

        rule = "times = 2\nuntil = 0.05\nat_most = 10"
        experiment = self.experiment("times = 4", rule)
        cells = experiment.cells()
        estimate = Estimate(small_workload.Small(), experiment, cells)
        least, most = estimate.left_s(Counter({cell_key(cell): 1 for cell in cells}), 0)
        self.assertAlmostEqual(most / least, 9)
        least, most = estimate.left_s(Counter({cell_key(cell): 2 for cell in cells}), 0)
        self.assertEqual(least, 0)
        self.assertGreater(most, 0)

    def test_minutes_bound_the_time_left(self):
        from tombolo_lab.progress import Estimate

        experiment = self.experiment("times = 4", "times = 4\nminutes = 1")
        estimate = Estimate(small_workload.Small(), experiment, experiment.cells())
        estimate.add(experiment.cells()[0], 1000.0)
        block = sum(estimate.cell_s(cell_key(cell)) for cell in experiment.cells())
        self.assertAlmostEqual(estimate.left_s(Counter(), 0)[1], 60 + block)
        self.assertAlmostEqual(estimate.left_s(Counter(), 59)[1], 1 + block)


class Words(unittest.TestCase):
    def test_differences_of_files_are_named_by_key(self):
        before = 'a = 1\nb = "x"\n[c]\nd = [1]\n[c.e]\nf = 1\n'
        now = "a = 2\n[c]\nd = [1]\ng = 3\n[c.e]\nf = 2\n"
        self.assertEqual(
            runner.toml_differences(before, now),
            ["a was 1, is 2", "b is gone", "c.e.f was 1, is 2", "c.g is new"],
        )
        self.assertEqual(runner.toml_differences(before, before), ["its text"])

    def test_a_reason_has_kind_text_and_place(self):
        try:
            int("x")
        except ValueError as error:
            self.assertRegex(
                runner.reason_of(error),
                r"^ValueError: invalid literal for int.*'x' \(test_runner.py:\d+\)$",
            )
        self.assertEqual(runner.reason_of(LabError("plain")), "plain")
        try:
            raise AssertionError
        except AssertionError as error:
            self.assertRegex(runner.reason_of(error), r"^AssertionError \(test_runner.py:\d+\)$")

    def test_a_long_reason_is_cut(self):
        self.assertLessEqual(len(runner.reason_of(ValueError("x" * 10_000))), 2000)


if __name__ == "__main__":
    unittest.main()
