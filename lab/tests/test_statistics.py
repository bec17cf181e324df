"""Statistics, checked against published examples (named at each) and by simulation."""

import importlib.util
import math
import random
import sys
import unittest
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
LIBRARIES = all(importlib.util.find_spec(name) for name in ("numpy", "pandas", "scipy"))
if LIBRARIES:
    import numpy

    from tombolo_lab import statistics as s

# R. Jain 1991, example 13.1: 32 CPU times. Mean 3.90, deviation 0.95.
CPU_TIMES = [
    3.1, 4.2, 2.8, 5.1, 2.8, 4.4, 5.6, 3.9, 3.9, 2.7, 4.1, 3.6, 3.1, 4.5, 3.8, 2.9,
    3.4, 3.3, 2.8, 4.5, 4.9, 5.3, 1.9, 3.7, 3.2, 4.1, 5.1, 3.2, 3.9, 4.8, 5.9, 4.2,
]  # fmt: skip
# Student 1908, "The probable error of a mean": extra sleep with two drugs; `sleep` in R.
SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)
# Anscombe 1973, "Graphs in statistical analysis", first set: r = 0.816.
ANSCOMBE = (
    [10, 8, 13, 9, 11, 14, 6, 4, 12, 7, 5],
    [8.04, 6.95, 7.58, 8.81, 8.33, 9.96, 7.24, 4.26, 10.84, 4.82, 5.68],
)
# Hollander and Wolfe 1973, p. 187: lightness of canned tuna by Hunter's L and by a panel.
TUNA = (
    [44.4, 45.9, 41.9, 53.3, 44.7, 44.1, 50.7, 45.2, 60.1],
    [2.6, 3.1, 2.5, 5.0, 3.6, 4.0, 5.2, 2.8, 3.8],
)
# McDonald, "Handbook of Biological Statistics", 3rd edition 2014, p. 212, with the figures of its R
# companion (Mangiafico): frigatebirds by volume of the pouch and pitch. Two have the same volume.
FRIGATEBIRDS = (
    [1760, 2040, 2440, 2550, 2730, 2740, 3010, 3080, 3370, 3740, 4910, 5090, 5090, 5380, 5850,
     6730, 6990, 7960],
    [529, 566, 473, 461, 465, 532, 484, 527, 488, 485, 478, 434, 468, 449, 425, 389, 421, 416],
)  # fmt: skip
# D. G. Bonett, R package statpsych, example of ci.spear: his interval, of data with ties.
TIED = (
    [67, 28, 30, 28, 52, 40, 25, 37, 44, 10, 14, 20, 28, 40, 51],
    [21, 4, 9, 12, 35, 18, 10, 22, 24, 1, 6, 8, 13, 16, 19],
)


class Case(unittest.TestCase):
    def setUp(self):
        if not LIBRARIES:
            self.skipTest("python3-pandas and python3-scipy are not installed")
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("error")


class OneSample(Case):
    def test_a_published_sample(self):
        self.assertAlmostEqual(s.mean(CPU_TIMES), 3.90, 2)
        self.assertAlmostEqual(s.deviation(CPU_TIMES), 0.95, 2)
        # t(0.95; 31) = 1.696 in place of the book's z of 1.645.
        found = s.interval_t(CPU_TIMES, 0.90)
        self.assertAlmostEqual(found.low, 3.62, delta=0.02)
        self.assertAlmostEqual(found.high, 4.17, delta=0.02)
        self.assertAlmostEqual(found.half_width, 1.696 * 0.95 / math.sqrt(32), 2)

    def test_large_values_lose_no_digits(self):
        # NIST Statistical Reference Datasets, univariate: NumAcc1 and NumAcc2, certified values.
        self.assertEqual(s.mean([10000001, 10000003, 10000002]), 10000002)
        self.assertEqual(s.deviation([10000001, 10000003, 10000002]), 1)
        second = [1.2] + [1.1, 1.3] * 500
        self.assertAlmostEqual(s.mean(second), 1.2, 14)
        self.assertAlmostEqual(s.deviation(second), 0.1, 14)

    def test_median_midmean_and_variation(self):
        self.assertEqual(s.median([3, 1, 2]), 2)
        self.assertEqual(s.median([4, 1, 3, 2]), 2.5)
        # A quarter at each end is left out.
        self.assertEqual(s.midmean([0, 1, 2, 3, 4, 5, 6, 1000]), 3.5)
        self.assertAlmostEqual(s.variation([9, 11]), math.sqrt(2) / 10)

    def test_percentiles_are_those_of_r(self):
        found = s.percentiles(list(range(1, 11)), (50, 90))
        self.assertEqual(found, {50: 5.5, 90: 9.1})

    def test_a_percentile_needs_a_value_beyond_it(self):
        self.assertIsNone(s.percentiles(range(999), (99.9,))[99.9])
        self.assertIsNotNone(s.percentiles(range(1000), (99.9,))[99.9])
        self.assertIsNone(s.percentiles(range(9999), (99.99,))[99.99])
        self.assertIsNotNone(s.percentiles(range(10000), (99.99,))[99.99])
        with self.assertRaisesRegex(ValueError, "between 0 and 100"):
            s.percentiles([1, 2], (100,))

    def test_what_has_no_interval_says_why(self):
        for function in (s.interval_t, s.interval_bootstrap):
            self.assertEqual(function([]).why, "no values")
            one = function([3.0])
            self.assertEqual((one.estimate, one.low, one.why[:9]), (3.0, None, "one value"))
            equal = function([2.5] * 4)
            self.assertEqual((equal.estimate, equal.low, equal.high), (2.5, 2.5, 2.5))
            self.assertFalse(one.contains(3.0))
            self.assertTrue(equal.contains(2.5))
        self.assertEqual((s.mean([]), s.median([]), s.midmean([])), (None, None, None))
        self.assertEqual((s.deviation([1]), s.variation([1, -1])), (None, None))
        with self.assertRaisesRegex(ValueError, "between 0 and 1"):
            s.interval_t([1, 2], 1.0)

    def test_few_values_have_no_bootstrap_interval(self):
        self.assertEqual(s.least_for_bootstrap(), 6)
        for count in range(2, 6):
            found = s.interval_bootstrap(list(range(count)))
            self.assertEqual((found.low, found.why), (None, "fewer than 6 values"))
        self.assertIsNotNone(s.interval_bootstrap(range(6)).low)
        self.assertEqual((s.least_for_bootstrap(0.9), s.least_for_bootstrap(0.5)), (5, 2))

    def test_the_bootstrap_repeats_itself_and_takes_any_statistic(self):
        first = s.interval_bootstrap(CPU_TIMES, seed=7)
        self.assertEqual(first, s.interval_bootstrap(CPU_TIMES, seed=7))
        self.assertTrue(first.contains(s.median(CPU_TIMES)))
        means = [s.interval_bootstrap(CPU_TIMES, numpy.mean, seed=seed) for seed in (7, 8)]
        self.assertNotEqual(*means)
        largest = s.interval_bootstrap(CPU_TIMES, statistic=lambda values: max(values))
        self.assertEqual(largest.estimate, 5.9)

    def test_intervals_cover_the_truth_as_often_as_they_say(self):
        source, hits_t, hits_boot, rounds = random.Random(5), 0, 0, 400
        for number in range(rounds):
            values = [source.gauss(10, 2) for _ in range(15)]
            hits_t += s.interval_t(values).contains(10)
            boot = s.interval_bootstrap(values, seed=number, resamples=400)
            hits_boot += boot.contains(10)
        # 95 %: the binomial's deviation is 1.1 %. The percentile bootstrap is narrow for n = 15.
        self.assertAlmostEqual(hits_t / rounds, 0.95, delta=0.035)
        self.assertGreater(hits_boot / rounds, 0.88)

    def test_clean_leaves_out_what_is_no_number(self):
        self.assertEqual(s.clean([1, None, float("nan"), float("inf"), 2.0]), [1.0, 2.0])


class TwoSamples(Case):
    def test_ratios_of_pairs(self):
        exact, boot = s.ratio_paired([2, 4, 8], [1, 2, 4])
        self.assertAlmostEqual(exact.estimate, 2)
        self.assertAlmostEqual(exact.low, 2)
        self.assertEqual((boot.estimate, boot.low, boot.high), (2, 2, 2))
        # The geometric mean: a ratio and its inverse cancel.
        self.assertAlmostEqual(s.ratio_paired([2, 1], [1, 2])[0].estimate, 1)
        self.assertIn("positive", s.ratio_paired([0, 1], [1, 1])[0].why)
        self.assertEqual(s.ratio_paired([], [])[0].why, "no pairs")
        with self.assertRaisesRegex(ValueError, "found 1 and 2"):
            s.ratio_paired([1], [1, 2])

    def test_a_column_of_a_against_a(self):
        noise = s.aa_noise([10, 11, 10, 11, 10, 11, 99])
        self.assertAlmostEqual(noise.estimate, 1.1)
        self.assertIsNone(s.aa_noise([10]).estimate)

    def test_welch_as_r_computes_it(self):
        found = s.welch(*SLEEP)  # t.test(extra ~ group, data = sleep)
        self.assertAlmostEqual(found.statistic, -1.8608, 4)
        self.assertAlmostEqual(found.p, 0.07939, 5)
        self.assertEqual(s.welch([1, 1], [1, 1]).p, 1.0)
        self.assertIsNone(s.welch([1, 1], [2, 2]).p)
        self.assertEqual(s.welch([1] * 3, [2] * 3).p, 0.0)
        self.assertIsNone(s.welch([1] * 3, [2] * 2).p)
        self.assertIsNone(s.welch([1], [2, 3]).p)
        # t.test(extra ~ group, data = sleep)$conf.int: -3.3654832 to 0.2054832.
        apart = s.difference(*SLEEP[::-1])
        self.assertAlmostEqual(apart.estimate, -1.58)
        self.assertAlmostEqual(apart.low, -3.3654832, 6)
        self.assertAlmostEqual(apart.high, 0.2054832, 6)
        self.assertIsNone(s.difference([1], [2, 3]).low)

    def test_mann_whitney_exactly(self):
        # 2 of the 20 orders are as extreme.
        found = s.mann_whitney([1, 2, 3], [4, 5, 6])
        self.assertEqual((found.statistic, found.p), (0.0, 0.1))
        self.assertEqual(s.mann_whitney([5, 5], [5, 5]).p, 1.0)

    def test_corrections(self):
        values = [0.01, 0.04, 0.03, 0.005]
        for found, expected in (
            (s.holm(values), [0.03, 0.06, 0.06, 0.02]),
            (s.benjamini_hochberg(values), [0.02, 0.04, 0.04, 0.02]),
        ):
            for a, b in zip(found, expected, strict=True):
                self.assertAlmostEqual(a, b)
        self.assertEqual((s.holm([]), s.benjamini_hochberg([])), ([], []))

    def test_the_example_of_benjamini_and_hochberg(self):
        # Section 3.2 of their paper: theirs rejects four at 0.05, Bonferroni's (and Holm's) three.
        values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240,
                  0.4262, 0.5719, 0.6528, 0.7590, 1.0]  # fmt: skip
        self.assertEqual(sum(p <= 0.05 for p in s.benjamini_hochberg(values)), 4)
        self.assertEqual(sum(p <= 0.05 for p in s.holm(values)), 3)


class Relations(Case):
    def test_pearson_of_anscombe(self):
        found = s.pearson(*ANSCOMBE)
        self.assertAlmostEqual(found.coefficient, 0.81642, 5)
        self.assertAlmostEqual(found.p, 0.00217, 5)
        self.assertTrue(found.low < found.coefficient < found.high)

    def test_spearman_of_ranks(self):
        # Hours of television against IQ, the usual textbook example: -29/165.
        iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
        hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
        self.assertAlmostEqual(s.spearman(iq, hours).coefficient, -29 / 165)

    def test_the_published_interval_of_a_correlation(self):
        # R, example of cor.test: 95 percent confidence interval -0.1497426 to 0.8955795.
        found = s.pearson(*TUNA)
        self.assertAlmostEqual(found.coefficient, 0.5711816, 7)
        self.assertAlmostEqual(found.p, 0.1082, 4)
        self.assertAlmostEqual(found.low, -0.1497426, 7)
        self.assertAlmostEqual(found.high, 0.8955795, 7)

    def test_published_correlations_of_ranks(self):
        # Without ties (R, example of cor.test with method = "spearman"), and with them. The p value
        # is that of Student's t, which R has for ties only.
        self.assertAlmostEqual(s.spearman(*TUNA).coefficient, 0.6)
        found = s.spearman(*FRIGATEBIRDS)
        self.assertAlmostEqual(found.coefficient, -0.7630357, 7)
        self.assertAlmostEqual(found.p, 0.0002302, 7)

    def test_the_published_interval_of_a_correlation_of_ranks(self):
        found = s.spearman(*TIED)
        self.assertAlmostEqual(found.coefficient, 0.8699639, 7)
        self.assertAlmostEqual(found.low, 0.5840951, 6)
        self.assertAlmostEqual(found.high, 0.9638297, 6)

    def test_relations_that_are_none(self):
        for function in (s.pearson, s.spearman):
            self.assertIn("three", function([1, 2], [1, 2]).why)
            self.assertIn("vary", function([1, 1, 1], [1, 2, 3]).why)
            self.assertEqual(function([1, 2, 3, 4], [2, 4, 6, 8]).low, 1.0)
            with self.assertRaises(ValueError):
                function([1], [1, 2])

    def test_growth_finds_the_exponent(self):
        sizes = [1, 2, 4, 8, 16]
        found = s.growth(sizes, [3 * x**1.5 for x in sizes])
        self.assertAlmostEqual(found.exponent, 1.5)
        self.assertAlmostEqual(found.factor, 3)
        self.assertAlmostEqual(found.r2, 1)
        flat = s.growth(sizes, [5.0] * 5)
        self.assertAlmostEqual(flat.exponent, 0)
        self.assertIn("positive", s.growth([0, 1, 2], [1, 2, 3]).why)
        self.assertIn("three", s.growth([1, 2], [1, 2]).why)

    def test_the_interval_of_an_exponent_covers_it(self):
        source, hits = random.Random(3), 0
        for _ in range(200):
            x = [2.0**k for k in range(8)]
            found = s.growth(x, [v**0.8 * math.exp(source.gauss(0, 0.1)) for v in x])
            hits += found.low <= 0.8 <= found.high
        self.assertGreater(hits / 200, 0.90)


if __name__ == "__main__":
    unittest.main()
