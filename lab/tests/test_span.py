"""Workloads of several machines: what is lost, and what the simulation prints."""

import json
import subprocess
import sys
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.workloads import converge, machines, tools


class Answers(unittest.TestCase):
    def test_each_call_is_to_have_one_answer(self):
        for outcomes, answered, lost in (
            ({"served": 10}, 10, 0),
            ({"served": 9, "timed out": 1}, 9, 1),  # it did not come, or
            ({"served": 9, "timed out": 1}, 10, 1),  # its answer did not
            ({"timed out": 10}, 0, 10),
            ({"served": 10}, 12, 2),  # some were answered twice
        ):
            with self.subTest(outcomes=outcomes, answered=answered):
                self.assertEqual(machines.lost(10, outcomes, answered), lost)

    def test_answers_are_of_any_kind_and_count_once(self):
        answers = {"served": 7, "overran": 3, "late": 1, "expired": 2}
        workload = machines.Machines()
        with unittest.mock.patch.object(workload, "said", return_value={"answers": answers}):
            self.assertEqual(workload.answers(("folder", "server", "client")), 10)
        with (
            unittest.mock.patch.object(workload, "said", return_value=None),
            self.assertRaisesRegex(tools.ToolError, "stats"),
        ):
            workload.answers(("folder", "server", "client"))


class Converge(unittest.TestCase):
    def measured(self, rows, code=0):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        done = subprocess.CompletedProcess([], code, text, "it broke")
        workload = converge.Converge()
        with (
            unittest.mock.patch.object(converge.harness, "example"),
            unittest.mock.patch.object(converge.tools, "bounded", return_value=done) as run,
        ):
            found = [workload.measure(None, {"machines": 5, "loss": loss}) for loss in (0.0, 0.01)]
        return found, run.call_count

    def row(self, loss, heal_ms, machines=5):
        row = dict.fromkeys(converge.Converge.measures, 1.0) | {"heal_ms": heal_ms, "members": 500}
        return row | {"machines": machines, "loss": loss, "dead_s": None}

    def test_one_run_gives_the_line_with_loss_and_the_one_without(self):
        found, runs = self.measured([self.row(0.0, 5.0), self.row(0.01, 7.0)])
        self.assertEqual(([row["heal_ms"] for row in found], runs), ([5.0, 7.0], 1))
        self.assertEqual(set(found[0]), set(converge.Converge.measures))

    def test_a_line_that_is_missing_and_a_run_that_failed_are_errors(self):
        with self.assertRaisesRegex(tools.ToolError, "no line of 5 machines"):
            self.measured([self.row(0.0, 5.0, machines=6)])
        with self.assertRaisesRegex(tools.ToolError, "ended with 1.*it broke"):
            self.measured([], code=1)


if __name__ == "__main__":
    unittest.main()
