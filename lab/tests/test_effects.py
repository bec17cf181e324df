"""Effects and analyses of variance, checked against published examples (named at each)."""

import importlib.util
import itertools
import sys
import unittest
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
LIBRARIES = all(
    importlib.util.find_spec(name) for name in ("numpy", "pandas", "scipy", "statsmodels")
)
if LIBRARIES:
    import pandas

    from tombolo_lab import design, effects

MEMORY_CACHE = {"memory": ("4", "16"), "cache": ("1", "2")}
# Jain 1991, example 18.1: three repetitions of each cell.
REPEATED = {
    ("4", "1"): (15, 18, 12),
    ("16", "1"): (45, 48, 51),
    ("4", "2"): (25, 28, 19),
    ("16", "2"): (75, 75, 81),
}
# NIST Statistical Reference Datasets, analysis of variance: SiRstv, five instruments.
SIRSTV = {
    1: (196.3052, 196.1240, 196.1890, 196.2569, 196.3403),
    2: (196.3042, 196.3825, 196.1669, 196.3257, 196.0422),
    3: (196.1303, 196.2005, 196.2889, 196.0343, 196.1811),
    4: (196.2795, 196.1748, 196.1494, 196.1485, 195.9885),
    5: (196.2119, 196.1051, 196.1850, 196.0052, 196.2090),
}


def frame_of(cells, names):
    rows = [(*key, value) for key, values in cells.items() for value in values]
    return pandas.DataFrame(rows, columns=[*names, "y"])


class Case(unittest.TestCase):
    def setUp(self):
        if not LIBRARIES:
            self.skipTest("python3-pandas, python3-scipy or python3-statsmodels is not installed")
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("error")


class TwoLevels(Case):
    def test_without_repetitions(self):
        # Jain 1991, example 17.1: 15, 45, 25, 75 give q0 = 40, qA = 20, qB = 10, qAB = 5.
        cells = {key: values[:1] for key, values in REPEATED.items()}
        cells[("16", "1")], cells[("16", "2")] = (45,), (75,)
        found = effects.two_level(frame_of(cells, MEMORY_CACHE), MEMORY_CACHE, "y")
        expected = {"I": (40, None), "A": (20, 0.76), "B": (10, 0.19), "AB": (5, 0.05)}
        for name, (q, share) in expected.items():
            effect = found.of(name)
            self.assertAlmostEqual(effect.q, q)
            self.assertIsNone(effect.low)
            if share:
                self.assertAlmostEqual(effect.share, share, 2)
        self.assertEqual([e.name for e in found.effects], ["I", "A", "B", "AB"])
        self.assertEqual(found.of("AB").factors, ("memory", "cache"))

    def test_with_repetitions(self):
        # Jain 1991, examples 18.1 to 18.4: intervals of 90 % with 8 degrees of freedom.
        found = effects.two_level(frame_of(REPEATED, MEMORY_CACHE), MEMORY_CACHE, "y", level=0.90)
        expected = {
            "I": (41, 39.08, 42.91, None),
            "A": (21.5, 19.58, 23.41, 0.7888),
            "B": (9.5, 7.58, 11.41, 0.1540),
            "AB": (5, 3.08, 6.91, 0.0427),
        }
        for name, (q, low, high, share) in expected.items():
            effect = found.of(name)
            self.assertAlmostEqual(effect.q, q)
            self.assertAlmostEqual(effect.low, low, delta=0.011)
            self.assertAlmostEqual(effect.high, high, delta=0.011)
            self.assertTrue(effect.is_significant)
            if share:
                self.assertAlmostEqual(effect.share, share, 4)
        self.assertAlmostEqual(found.error_share, 0.0145, 4)
        self.assertEqual(found.repetitions, 3)
        self.assertAlmostEqual(sum(e**2 for e in found.residuals), 102)

    def test_a_fraction(self):
        # Jain 1991, section 19.1: the 2^(7-4) design with D=AB, E=AC, F=BC, G=ABC.
        factors = dict.fromkeys("ABCDEFG", (-1, 1))
        plan = design.fraction(factors, ["D=AB", "E=AC", "F=BC", "G=ABC"])
        results = dict(
            zip(
                [(c, b, a) for a, b, c in itertools.product((-1, 1), repeat=3)],
                (20, 35, 7, 42, 36, 50, 45, 82),
                strict=True,
            )
        )
        cells = design.fractional_cells(factors, plan)
        rows = [{**cell, "y": results[cell["A"], cell["B"], cell["C"]]} for cell in cells]
        found = effects.two_level(pandas.DataFrame(rows), factors, "y", plan)
        sums = {"I": 317, "A": 101, "B": 35, "C": 109, "D": 43, "E": 1, "F": 47, "G": 3}
        self.assertEqual({e.name for e in found.effects}, set(sums))
        for name, value in sums.items():
            self.assertAlmostEqual(found.of(name).q, value / 8)
        self.assertAlmostEqual(found.of("A").share, 0.3726, 4)
        self.assertAlmostEqual(found.of("C").share, 0.4340, 4)
        self.assertIn("AB", found.of("D").aliases)

    def test_unequal_repetitions_are_least_squares(self):
        frame = frame_of(REPEATED, MEMORY_CACHE).drop(index=[0])
        found = effects.two_level(frame, MEMORY_CACHE, "y")
        means = {key: sum(values) / 3 for key, values in REPEATED.items()}
        means[("4", "1")] = 15.0
        self.assertAlmostEqual(found.of("I").q, sum(means.values()) / 4)
        self.assertEqual(found.repetitions, 2)

    def test_missing_cells_are_named(self):
        frame = frame_of(REPEATED, MEMORY_CACHE)
        found = effects.two_level(frame[frame["memory"] == "4"], MEMORY_CACHE, "y")
        self.assertEqual(found.why, "2 of 4 cells have values")
        self.assertEqual(effects.two_level(frame[:0], MEMORY_CACHE, "y").effects, ())

    def test_constant_values_have_no_shares(self):
        cells = dict.fromkeys(REPEATED, (7, 7))
        found = effects.two_level(frame_of(cells, MEMORY_CACHE), MEMORY_CACHE, "y")
        self.assertAlmostEqual(found.of("I").q, 7)
        self.assertIsNone(found.error_share)
        self.assertFalse(found.of("A").is_significant)

    def test_effects_of_four_factors_are_left_to_the_error(self):
        factors = dict.fromkeys("abcde", (0, 1))
        rows = [
            {**dict(zip(factors, levels, strict=True)), "y": sum(levels)}
            for levels in itertools.product((0, 1), repeat=5)
        ]
        found = effects.two_level(pandas.DataFrame(rows), factors, "y")
        self.assertEqual(max(len(e.name) for e in found.effects), effects.MOST_FACTORS)
        self.assertAlmostEqual(found.of("C").q, 0.5)

    def test_which_designs_have_effects(self):
        self.assertTrue(effects.is_two_level(MEMORY_CACHE))
        self.assertFalse(effects.is_two_level({"a": (1, 2, 3)}))
        self.assertFalse(effects.is_two_level({}))


class Variance(Case):
    def test_a_certified_analysis(self):
        cells = {(key,): values for key, values in SIRSTV.items()}
        found = effects.anova(frame_of(cells, ["instrument"]), {"instrument": tuple(SIRSTV)}, "y")
        between, within = found.rows
        self.assertAlmostEqual(between.squares, 5.11462616e-02, 9)
        self.assertAlmostEqual(within.squares, 2.16636560e-01, 9)
        self.assertAlmostEqual(between.f, 1.18046237440255, 6)
        self.assertEqual((between.freedom, within.freedom, within.f), (4, 20, None))

    def test_two_factors_with_their_interaction(self):
        # The sums of squares of Jain's example 18.1: 5547, 1083, 300 and 102.
        found = effects.anova(frame_of(REPEATED, MEMORY_CACHE), MEMORY_CACHE, "y")
        rows = {row.name: row for row in found.rows}
        for name, squares in (("memory", 5547), ("cache", 1083), ("memory × cache", 300)):
            self.assertAlmostEqual(rows[name].squares, squares, 6)
            self.assertLess(rows[name].p, 0.01)
        self.assertAlmostEqual(rows["Residual"].squares, 102, 6)
        self.assertAlmostEqual(sum(row.share for row in found.rows), 1)

    def test_what_has_no_analysis_says_why(self):
        frame = frame_of(REPEATED, MEMORY_CACHE)
        self.assertIn("needs a factor", effects.anova(frame[:2], MEMORY_CACHE, "y").why)
        self.assertIn("equal", effects.anova(frame.assign(y=1.0), MEMORY_CACHE, "y").why)
        single = frame.groupby(["memory", "cache"]).head(1)
        self.assertNotIn(
            "memory × cache", [r.name for r in effects.anova(single, MEMORY_CACHE, "y").rows]
        )
        one = frame_of({(n,): (float(n),) for n in range(3)}, ["n"])
        self.assertIn("no repetitions", effects.anova(one, {"n": (0, 1, 2)}, "y").why)


class Residuals(Case):
    def test_normal_and_not(self):
        from scipy import stats

        normal = list(stats.norm.ppf([(i + 0.5) / 50 for i in range(50)]))
        self.assertFalse(effects.check_normal(normal).is_doubtful)
        self.assertTrue(effects.check_normal([0.0] * 49 + [100.0]).is_doubtful)
        self.assertIn("three", effects.check_normal([1.0]).why)
        self.assertIn("equal", effects.check_normal([0.0] * 5).why)

    def test_equal_and_unequal_spread(self):
        narrow, wide = [1, 2, 3, 4, 5, 6], [-300, 200, -400, 400, 500, -90]
        self.assertFalse(effects.check_spread([narrow, [v + 7 for v in narrow]]).is_doubtful)
        self.assertLess(effects.check_spread([narrow, wide]).p, 0.05)
        self.assertIn("two cells", effects.check_spread([narrow]).why)
        self.assertIn("varies", effects.check_spread([[1, 1], [2, 2]]).why)

    def test_a_drift_is_found(self):
        drift = [float(i) for i in range(40)]
        self.assertTrue(effects.check_order(drift).is_doubtful)
        import random

        mixed = drift[:]
        random.Random(1).shuffle(mixed)
        self.assertFalse(effects.check_order(mixed).is_doubtful)
        self.assertIn("five", effects.check_order([1, 2, 3]).why)


if __name__ == "__main__":
    unittest.main()
