"""The workload `bypass`: what is made of a slice's counts."""

import unittest

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


if __name__ == "__main__":
    unittest.main()
