"""Effects and analyses of variance, checked against published examples (named at each)."""

import importlib.util
import itertools
import math
import random
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
# NIST/SEMATECH e-Handbook, 1.3.5.10 (GEAR.DAT): diameters of gears in ten batches.
GEAR = (
    (1.006, 0.996, 0.998, 1.000, 0.992, 0.993, 1.002, 0.999, 0.994, 1.000),
    (0.998, 1.006, 1.000, 1.002, 0.997, 0.998, 0.996, 1.000, 1.006, 0.988),
    (0.991, 0.987, 0.997, 0.999, 0.995, 0.994, 1.000, 0.999, 0.996, 0.996),
    (1.005, 1.002, 0.994, 1.000, 0.995, 0.994, 0.998, 0.996, 1.002, 0.996),
    (0.998, 0.998, 0.982, 0.990, 1.002, 0.984, 0.996, 0.993, 0.980, 0.996),
    (1.009, 1.013, 1.009, 0.997, 0.988, 1.002, 0.995, 0.998, 0.981, 0.996),
    (0.990, 1.004, 0.996, 1.001, 0.998, 1.000, 1.018, 1.010, 0.996, 1.002),
    (0.998, 1.000, 1.006, 1.000, 1.002, 0.996, 0.998, 0.996, 1.002, 1.006),
    (1.002, 0.998, 0.996, 0.995, 0.996, 1.004, 1.004, 0.998, 0.999, 0.991),
    (0.991, 0.995, 0.984, 0.994, 0.997, 0.997, 0.991, 0.998, 1.004, 0.997),
)
# NIST/SEMATECH e-Handbook, 1.3.5.13 (LEW.DAT): deflections of a beam, in their order.
LEW = (
    -213, -564, -35, -15, 141, 115, -420, -360, 203, -338, -431, 194, -220, -513, 154, -125, -559,
    92, -21, -579, -52, 99, -543, -175, 162, -457, -346, 204, -300, -474, 164, -107, -572, -8, 83,
    -541, -224, 180, -420, -374, 201, -236, -531, 83, 27, -564, -112, 131, -507, -254, 199, -311,
    -495, 143, -46, -579, -90, 136, -472, -338, 202, -287, -477, 169, -124, -568, 17, 48, -568,
    -135, 162, -430, -422, 172, -74, -577, -13, 92, -534, -243, 194, -355, -465, 156, -81, -578,
    -64, 139, -449, -384, 193, -198, -538, 110, -44, -577, -6, 66, -552, -164, 161, -460, -344,
    205, -281, -504, 134, -28, -576, -118, 156, -437, -381, 200, -220, -540, 83, 11, -568, -160,
    172, -414, -408, 188, -125, -572, -32, 139, -492, -321, 205, -262, -504, 142, -83, -574, 0, 48,
    -571, -106, 137, -501, -266, 190, -391, -406, 194, -186, -553, 83, -13, -577, -49, 103, -515,
    -280, 201, 300, -506, 131, -45, -578, -80, 138, -462, -361, 201, -211, -554, 32, 74, -533,
    -235, 187, -372, -442, 182, -147, -566, 25, 68, -535, -244, 194, -351, -463, 174, -125, -570,
    15, 72, -550, -190, 172, -424, -385, 198, -218, -536, 96,
)  # fmt: skip


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

    def split_plots(self, seed, spread, change=0.0):
        """Rows of five blocks of a factor of the set-up and three others, each set-up with an error
        of its own; `change` is added at the high level of the set-up's factor."""
        source, rows = random.Random(seed), []
        for block, setup in itertools.product(range(5), (0, 1)):
            moved = 10 + source.gauss(0, spread) + change * setup
            for levels in itertools.product((0, 1), repeat=3):
                row = {"a": setup, **dict(zip("bcd", levels, strict=True))}
                row |= {"y": moved + source.gauss(0, 0.3), "plot": f"{block} {setup}"}
                rows.append(row)
        return pandas.DataFrame(rows)

    def test_a_factor_of_the_set_up_is_judged_by_set_ups(self):
        factors = dict.fromkeys("abcd", (0, 1))
        found = {"plots": 0, "rows": 0}
        variance = dict(found)
        for seed in range(60):
            frame = self.split_plots(seed, 1.0)
            for name, plots in (("plots", "plot"), ("rows", None)):
                effects_of = effects.two_level(frame, factors, "y", plots=plots)
                found[name] += not effects_of.of("A").low <= 0 <= effects_of.of("A").high
                [row] = [r for r in effects.anova(frame, factors, "y", plots).rows if r.name == "a"]
                variance[name] += row.p < 0.05
        # Nothing differs: 5 % are expected, and independent rows find more than half of the runs.
        for counts in (found, variance):
            self.assertLessEqual(counts["plots"], 8)
            self.assertGreater(counts["rows"], 25)

    def test_effects_of_and_within_set_ups_are_found(self):
        factors = dict.fromkeys("abcd", (0, 1))
        frame = self.split_plots(1, 0.2, change=2.0)
        frame["y"] += 0.6 * frame["b"]
        found = effects.two_level(frame, factors, "y", plots="plot")
        self.assertEqual([e.name for e in found.effects if e.is_significant], ["I", "A", "B"])
        # A t test of ten set-ups' means has the same interval: half of that of the difference.
        from tombolo_lab import statistics

        means = frame.groupby(["a", "plot"])["y"].mean()
        low, high = means[0].tolist(), means[1].tolist()
        pooled = math.sqrt((statistics.deviation(low) ** 2 + statistics.deviation(high) ** 2) / 2)
        half = 2.306004 * pooled / math.sqrt(10)
        self.assertAlmostEqual(found.of("A").high - found.of("A").q, half, 5)
        rows = {row.name: row for row in effects.anova(frame, factors, "y", "plot").rows}
        self.assertEqual((rows[effects.SET_UPS].freedom, rows["Residual"].freedom), (8, 61))
        self.assertLess(rows["b"].p, 0.001)

    def test_effects_are_corrected_for_their_number(self):
        factors = dict.fromkeys("abcde", (0, 1))
        any_found = 0
        for seed in range(40):
            source = random.Random(seed)
            rows = [
                {**dict(zip("abcde", levels, strict=True)), "y": source.gauss(10, 1)}
                for levels in itertools.product((0, 1), repeat=5)
                for _ in range(3)
            ]
            found = effects.two_level(pandas.DataFrame(rows), factors, "y")
            any_found += any(e.is_significant for e in found.effects[1:])
        # Without a correction nearly half of such runs have an effect.
        self.assertLessEqual(any_found, 6)

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

    def test_a_measure_of_one_level_only_is_analysed_without_the_factor(self):
        rows = [
            {"p": p, "s": s, "y": s + 0.1 * block if p == "udp" else float("nan")}
            for block, p, s in itertools.product(range(5), ("tcp", "udp"), (1, 2))
        ]
        frame = pandas.DataFrame(rows)
        found = effects.anova(frame, {"p": ("tcp", "udp"), "s": (1, 2)}, "y")
        self.assertEqual([row.name for row in found.rows], ["s", "Residual"])
        self.assertIn("needs a factor", effects.anova(frame, {"p": ("tcp", "udp")}, "y").why)

    def test_a_fraction_keeps_one_term_of_those_it_cannot_tell_apart(self):
        factors = dict.fromkeys("abcd", (0, 1))
        plan = design.fraction(factors, ["D=ABC"])
        source = random.Random(1)
        rows = [
            {**cell, "y": 5 * cell["a"] * cell["b"] + source.gauss(0, 0.1)}
            for cell in design.fractional_cells(factors, plan)
            for _ in range(4)
        ]
        found = effects.anova(pandas.DataFrame(rows), factors, "y")
        self.assertEqual(
            [(row.name, row.freedom) for row in found.rows],
            [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("a × b", 1), ("a × c", 1), ("a × d", 1),
             ("Residual", 24)],
        )  # fmt: skip
        self.assertEqual(found.left_out, ("b × c", "b × d", "c × d"))
        self.assertAlmostEqual(sum(row.share for row in found.rows), 1)

    def test_a_main_effect_is_not_shared_with_its_alias(self):
        factors = dict.fromkeys("abc", (0, 1))
        plan = design.fraction(factors, ["C=AB"])
        source = random.Random(1)
        rows = [
            {**cell, "y": 5 * cell["c"] + source.gauss(0, 0.1)}
            for cell in design.fractional_cells(factors, plan)
            for _ in range(4)
        ]
        found = {row.name: row for row in effects.anova(pandas.DataFrame(rows), factors, "y").rows}
        self.assertEqual(list(found), ["a", "b", "c", "Residual"])
        self.assertLess(found["c"].p, 1e-6)

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

    def test_the_published_example_of_equal_spread(self):
        # The handbook's W = 1.705910 is that of the medians; with means it is 2.159.
        from scipy import stats

        found = effects.check_spread(GEAR)
        self.assertAlmostEqual(float(stats.f.isf(found.p, 9, 90)), 1.705910, delta=1e-5)
        self.assertAlmostEqual(found.p, 0.0991, 4)

    def test_the_published_example_of_runs(self):
        # The handbook's Z = 2.6938: 120 runs, of which random values have 101.
        from scipy import stats

        found = effects.check_order(LEW)
        self.assertAlmostEqual(float(stats.norm.isf(found.p / 2)), 2.6938, 4)
        self.assertTrue(found.is_doubtful)

    def test_a_drift_is_found(self):
        drift = [float(i) for i in range(40)]
        self.assertTrue(effects.check_order(drift).is_doubtful)
        mixed = drift[:]
        random.Random(1).shuffle(mixed)
        self.assertFalse(effects.check_order(mixed).is_doubtful)
        self.assertIn("five", effects.check_order([1, 2, 3]).why)


if __name__ == "__main__":
    unittest.main()
