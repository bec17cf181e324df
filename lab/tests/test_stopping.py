"""The t quantile and the stop rule. Sources: NIST/SEMATECH e-Handbook, section 1.3.6.7.2, "Critical
Values of the Student's t Distribution" (two-sided 5 % and 1 %)."""

import importlib.util
import math
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.stopping import all_narrow, relative_half_width, t_quantile, t_within

# Degrees of freedom: t at 0.975, t at 0.995.
TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    29: (2.045, 2.756),
    30: (2.042, 2.750),
    100: (1.984, 2.626),
}


class Quantile(unittest.TestCase):
    def test_the_published_table(self):
        for freedom, (five, one) in TABLE.items():
            with self.subTest(freedom=freedom):
                self.assertAlmostEqual(t_quantile(freedom, 0.95), five, delta=0.0006)
                self.assertAlmostEqual(t_quantile(freedom, 0.99), one, delta=0.0006)

    def test_one_degree_of_freedom_is_the_cauchy_distribution(self):
        for level in (0.1, 0.5, 0.9, 0.999):
            self.assertAlmostEqual(
                t_quantile(1, level) / math.tan(math.pi * level / 2), 1, places=9
            )

    def test_many_degrees_of_freedom_are_the_normal_distribution(self):
        self.assertAlmostEqual(t_quantile(100_000), 1.959964, places=4)

    def test_quantile_and_probability_are_inverse(self):
        for freedom in (1, 2, 7, 8, 1000):
            for level in (0.5, 0.95, 0.9999):
                self.assertAlmostEqual(t_within(t_quantile(freedom, level), freedom), level)

    def test_impossible_questions(self):
        for freedom, level in ((0, 0.95), (3, 0), (3, 1), (3, 1.5)):
            with self.subTest(freedom=freedom, level=level), self.assertRaises(ValueError):
                t_quantile(freedom, level)

    @unittest.skipUnless(importlib.util.find_spec("scipy"), "SciPy is not installed")
    def test_scipy_agrees(self):
        from scipy.stats import t

        for freedom in (1, 2, 3, 10, 31, 300):
            for level in (0.2, 0.95, 0.999):
                expected = t.ppf((1 + level) / 2, freedom)
                self.assertAlmostEqual(t_quantile(freedom, level) / expected, 1, places=7)


class Narrowness(unittest.TestCase):
    def test_a_mean_with_its_interval(self):
        # Mean 10, deviation 1, n = 4: half width 3.182446 / 2.
        values = [10 - math.sqrt(1.5), 10, 10, 10 + math.sqrt(1.5)]
        self.assertAlmostEqual(relative_half_width(values), 0.3182446 / 2, places=6)

    def test_one_value_has_no_interval(self):
        self.assertEqual(relative_half_width([3.0]), math.inf)
        self.assertEqual(relative_half_width([]), math.inf)

    def test_equal_values_are_narrow_also_at_zero(self):
        self.assertEqual(relative_half_width([0.0, 0.0, 0.0]), 0)
        self.assertEqual(relative_half_width([-1.0, 1.0]), math.inf)

    def test_the_sign_of_the_mean_does_not_matter(self):
        self.assertEqual(relative_half_width([-9, -11]), relative_half_width([9, 11]))

    def test_every_cell_must_be_narrow(self):
        wide, narrow = [1.0, 2.0, 3.0], [1.0, 1.001, 0.999]
        self.assertTrue(all_narrow([narrow, narrow], 0.05))
        self.assertFalse(all_narrow([narrow, wide], 0.05))

    def test_a_cell_without_values_does_not_count(self):
        self.assertTrue(all_narrow([[], [1.0, 1.0]], 0.05))
        self.assertFalse(all_narrow([[], [1.0]], 0.05))


if __name__ == "__main__":
    unittest.main()
