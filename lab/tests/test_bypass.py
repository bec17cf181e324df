"""The workload `bypass`: what is made of a slice's counts."""

import unittest
from unittest import mock

from tombolo_lab.workloads import bypass

ROW = {
    "cpu_ns": 900.0, "rate": 4000.0, "sent": 500, "got": 400, "got_bytes": 25_600, "seconds": 0.1,
}  # fmt: skip


class Figures(unittest.TestCase):
    def test_of_frames(self):
        found = bypass.figures(ROW, "udp64_1")
        self.assertEqual((found["frames_s"], found["cpu_ns"]), (4000.0, 900.0))
        self.assertAlmostEqual(found["loss"], 0.2)
        self.assertNotIn("disturbed", found)

    def test_a_slice_in_which_nothing_was_sent_is_disturbed(self):
        row = ROW | {"cpu_ns": None, "rate": 0.0, "sent": 0, "got": 0, "got_bytes": 0}
        self.assertIn("no turn", bypass.figures(row, "udp64_1")["disturbed"])
        self.assertNotIn("disturbed", bypass.figures(row | {"sent": 1}, "udp64_1"))

    def test_a_slice_in_which_nothing_arrived_is_measured_again(self):
        def frames(*rows):
            setting = mock.Mock(attached=False)
            setting.measure.side_effect = rows
            setup, workload = mock.Mock(), bypass.Bypass()
            setup.get.return_value, workload.counters = setting, False
            defaults = {name: p.default for name, p in workload.parameters.items()}
            return workload.measure(setup, defaults)["frames_s"]

        nothing = ROW | {"rate": 0.0, "got": 0, "got_bytes": 0}
        idle = nothing | {"cpu_ns": None, "sent": 0}
        self.assertEqual(frames(nothing, idle, ROW), 4000.0)
        self.assertEqual(frames(ROW), 4000.0)
        # A path that loses all of them is not tried for ever.
        self.assertEqual(frames(nothing, nothing, nothing), 0.0)


if __name__ == "__main__":
    unittest.main()
