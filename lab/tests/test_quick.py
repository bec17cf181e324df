"""The checks of the short runs: each must fail on data that are wrong."""

import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import model, quick


class Points(unittest.TestCase):
    def run_of(self, change=lambda points: None):
        experiment = model.load("capacity-udp", quick=True)
        points = [
            {
                "block": block,
                "cell": cell,
                "attempt": 1,
                "measures": {"mbit_s": 1.0, "sent_s": 100.0, "arrived_s": 90.0, "loss": 0.1},
                "disturbed": None,
            }
            for block in range(experiment.repeat.times)
            for cell in experiment.cells()
        ]
        change(points)
        counted = [p for p in points if "failed" not in p and not p.get("disturbed")]
        return SimpleNamespace(
            experiment=experiment, points=points, skipped=[], counted=lambda: counted
        )

    def test_good_points_have_no_fault(self):
        self.assertEqual(quick.faults_of_points(self.run_of()), [])

    def test_what_is_wrong_is_said(self):
        def fails(points):
            points[0] = {**points[0], "failed": "it broke"}

        def miscounts(points):
            points[0]["measures"] = {**points[0]["measures"], "arrived_s": 95.0}

        def lacks(points):
            points[0]["measures"] = {**points[0]["measures"], "mbit_s": None}

        for change, text in (
            (fails, "a point failed: it broke"),
            (fails, "1 of 2 points count"),
            (miscounts, "do not agree"),
            (lacks, "has no value"),
            (lambda points: points.pop(), "1 of 2 points count"),
        ):
            faults = quick.faults_of_points(self.run_of(change))
            self.assertTrue(any(text in fault for fault in faults), (text, faults))

    def test_a_value_that_the_tool_could_not_tell_is_no_fault(self):
        def tells(points):
            points[0]["measures"] = {**points[0]["measures"], "mbit_s": None}
            points[0]["notes"] = {"unmeasured": "no time passed"}

        self.assertEqual(quick.faults_of_points(self.run_of(tells)), [])

    def test_an_interval_without_its_mean_is_a_fault(self):
        numbers = {"low": 1.0, "mean": 5.0, "high": 2.0, "boot_low": None, "median": 5.0,
                   "boot_high": None}  # fmt: skip
        found = {"cells": [{"measures": {"x": numbers}}], "counts": {"points": 1}}
        run = SimpleNamespace(folder=Path("/nonexistent"), counted=lambda: [1])
        faults = quick.faults_of_summary(run, found)
        self.assertIn("x: 5 is outside its interval 1 to 2", faults)
        self.assertIn("there is no report", faults)


class Experiments(unittest.TestCase):
    def test_every_built_in_experiment_loads_in_both_forms(self):
        self.assertGreaterEqual(len(model.names()), 8)
        for name in model.names():
            for short in (False, True):
                experiment = model.load(name, quick=short)
                self.assertTrue(experiment.cells(), name)
                self.assertTrue(experiment.plots, name)

    def test_the_short_forms_take_six_minutes_together(self):
        self.assertLessEqual(set(quick.LEFT_OUT), set(model.names()))
        total = sum(model.load(name, quick=True).expected_seconds()[1] for name in quick.names())
        self.assertLess(total, 360)


if __name__ == "__main__":
    unittest.main()
