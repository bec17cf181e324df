"""Summaries of runs: of real points of the small workload, and of degenerate ones."""

import csv
import dataclasses
import importlib.util
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import small_workload

from tombolo_lab import model
from tombolo_lab.results import Run
from tombolo_lab.workloads import REGISTRY

LIBRARIES = all(
    importlib.util.find_spec(name) for name in ("numpy", "pandas", "scipy", "statsmodels")
)
if LIBRARIES:
    from tombolo_lab import summary


class Case(unittest.TestCase):
    def setUp(self):
        if not LIBRARIES:
            self.skipTest("python3-pandas, python3-scipy or python3-statsmodels is not installed")
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.dict(REGISTRY, {"small": small_workload.TARGET}))

    def run_of(self, value, extra="", times=4, samples=None, skip=lambda block, cell: False):
        """A run of the small workload whose values are value(block, cell)."""
        path = self.folder / "small.toml"
        path.write_text(small_workload.EXPERIMENT + extra)
        experiment = model.load(str(path))
        points = []
        for block in range(times):
            for cell in experiment.cells():
                if skip(block, cell):
                    points.append({"block": block, "cell": cell, "attempt": 1, "failed": "no"})
                    continue
                measures = dict.fromkeys(experiment.measures)
                measures["value"] = value(block, cell)
                point = {"block": block, "cell": cell, "attempt": 1, "measures": measures}
                if samples:
                    point["samples"] = {"value": samples(block, cell)}
                points.append({**point, "disturbed": None})
        return Run(self.folder, experiment, {"warnings": ["a warning of the run"]}, points, [])


def plain(block, cell):
    return cell["size"] * (10.0 if cell["kind"] == "red" else 5.0) * (1 + 0.01 * (block % 3))


class Summary(Case):
    def test_figures_of_each_cell(self):
        found = summary.summarise(self.run_of(plain, times=6))
        self.assertEqual(len(found["cells"]), 6)
        self.assertEqual(found["counts"]["points"], 36)
        for part in found["cells"]:
            numbers = part["measures"]["value"]
            self.assertEqual(numbers["n"], 6)
            self.assertTrue(numbers["low"] <= numbers["mean"] <= numbers["high"])
            self.assertTrue(numbers["boot_low"] <= numbers["median"] <= numbers["boot_high"])
            self.assertAlmostEqual(numbers["mean"], plain(0, part["cell"]) * 1.01)

    def test_ratios_to_the_first_level_of_alternatives_only(self):
        found = summary.summarise(self.run_of(plain))["ratios"]
        self.assertEqual({(r["factor"], r["base"]) for r in found}, {("kind", "red")})
        self.assertEqual(len(found), 3)
        for ratio in found:
            self.assertAlmostEqual(ratio["ratio"], 0.5)
            self.assertEqual(ratio["n"], 4)

    def test_pairs_are_of_the_same_block(self):
        gone = {(0, "red"), (1, "green")}
        run = self.run_of(plain, skip=lambda block, cell: (block, cell["kind"]) in gone)
        found = summary.summarise(run)
        self.assertEqual({r["n"] for r in found["ratios"]}, {2})
        self.assertTrue(any("6 point(s) failed" in text for text in found["warnings"]))

    def test_percentiles_come_from_all_samples(self):
        run = self.run_of(plain, samples=lambda block, cell: list(range(500)))
        numbers = summary.summarise(run)["cells"][0]["measures"]["value"]
        self.assertEqual(numbers["samples"], 2000)
        self.assertAlmostEqual(numbers["percentiles"]["50"], 249.5)
        self.assertIsNone(numbers["percentiles"]["99.99"])
        self.assertIsNotNone(numbers["percentiles"]["99.9"])

    def test_thinned_samples_have_no_percentile_beyond_their_ranks(self):
        run = self.run_of(plain, samples=lambda block, cell: list(range(1500)), times=8)
        for point in run.points:
            point["notes"] = {"samples_of": {"value": 30_000}}
        parts = summary.summarise(run)["cells"][0]["measures"]["value"]["percentiles"]
        self.assertEqual((parts["99.99"], parts["99.9"] is None), (None, False))
        for point in run.points:
            point["notes"] = {"samples_of": {"value": 1500}}
        parts = summary.summarise(run)["cells"][0]["measures"]["value"]["percentiles"]
        self.assertIsNotNone(parts["99.99"])
        # A run of before the notes: the program kept 2,000 of more.
        run = self.run_of(plain, samples=lambda block, cell: list(range(2000)), times=8)
        parts = summary.summarise(run)["cells"][0]["measures"]["value"]["percentiles"]
        self.assertIsNone(parts["99.99"])

    def test_a_figure_over_several_cells_has_no_interval(self):
        extra = (
            '[[published]]\nlabel="them"\nsource="a paper"\nmatch={kind="red"}\n'
            'measure="value"\nvalue=5\ndiffers="all else"\n'
        )
        [found] = summary.summarise(self.run_of(plain, extra))["published"]
        self.assertAlmostEqual(found["ours"]["mean"], 20 * 1.0075)
        self.assertEqual((found["ours"]["low"], found["ours"]["cells"]), (None, 3))
        self.assertIn("3 cells", found["ours"]["why"])

    def test_the_bootstrap_is_advised_where_it_is_known(self):
        def wild(block, cell):
            return 1.0 + (100.0 if block == cell["size"] and cell["kind"] == "red" else 0.1 * block)

        for times, text in ((4, "are rough"), (8, "see the bootstrap")):
            found = summary.summarise(self.run_of(wild, times=times))["warnings"]
            [doubt] = [w for w in found if w.startswith("doubtful: residuals are normal")]
            self.assertIn(text, doubt)

    def test_an_interval_of_a_share_stays_a_share(self):
        run = self.run_of(plain)
        for point in run.points:
            point["measures"]["share"] = 0.9 if point["block"] else 0.0
        for part in summary.summarise(run)["cells"]:
            numbers = part["measures"]["share"]
            self.assertTrue(0 <= numbers["low"] < numbers["high"] <= 1)

    def test_growth_of_curves_on_logarithmic_axes(self):
        plots = '[[plots]]\nkind="curve"\nx="size"\ncurves="kind"\nlog="xy"\n'
        found = summary.summarise(self.run_of(plain, plots))["growth"]
        self.assertEqual([g["where"]["kind"] for g in found], ["red", "green"])
        for fit in found:
            self.assertAlmostEqual(fit["exponent"], 1, 2)

    def test_growth_is_of_levels_that_all_sizes_have(self):
        """Red is at the largest size only, and ten times green there: it bends no fit."""
        extra = (
            '[[exclude]]\nkind = "red"\nsize = [1, 2]\n'
            '[[plots]]\nkind = "curve"\nx = "size"\nlog = "xy"\n'
        )

        def value(block, cell):
            return 50.0 * cell["size"] * (10 if cell["kind"] == "red" else 1)

        fits = summary.summarise(self.run_of(value, extra))["growth"]
        found = {fit["where"]["kind"]: fit for fit in fits}
        self.assertAlmostEqual(found["green"]["exponent"], 1)
        self.assertIsNone(found["red"]["exponent"])
        self.assertEqual(found["red"]["why"], "left out: no value at size 1, 2")

    def test_growth_is_by_each_level_that_the_plot_does_not_name(self):
        extra = '[[plots]]\nkind = "curve"\nx = "size"\nlog = "xy"\n'

        def value(block, cell):
            return float(cell["size"] ** (1 if cell["kind"] == "red" else 2))

        fits = summary.summarise(self.run_of(value, extra))["growth"]
        self.assertEqual([fit["where"] for fit in fits], [{"kind": "red"}, {"kind": "green"}])
        for fit, power in zip(fits, (1, 2), strict=True):
            self.assertAlmostEqual(fit["exponent"], power)

    def test_published_figures_stand_beside_ours(self):
        extra = (
            '[[published]]\nlabel="them"\nsource="a paper"\nmatch={kind="red", size=1}\n'
            'measure="value"\nvalue=5\ndiffers="all else"\n'
        )
        [found] = summary.summarise(self.run_of(plain, extra))["published"]
        self.assertAlmostEqual(found["ratio"], found["ours"]["mean"] / 5)
        self.assertEqual(found["differs"], "all else")

    def test_effects_of_the_factors_that_vary(self):
        run = self.run_of(plain)
        one = dataclasses.replace(run.experiment, factors={"kind": ("red", "green"), "size": (1,)})
        points = [p for p in run.points if p["cell"]["size"] == 1]
        found = summary.summarise(dataclasses.replace(run, experiment=one, points=points))
        effects = found["effects"]["measures"]["value"]["effects"]
        self.assertEqual([effect["name"] for effect in effects], ["I", "A"])
        self.assertAlmostEqual(effects[1]["q"], -2.5, 1)
        self.assertIsNone(summary.summarise(run)["effects"])

    def test_points_of_one_set_up_are_told(self):
        """A factor of the set-up, which only moves whole set-ups, has no significant effect."""
        run = self.run_of(lambda block, cell: 10.0 + ((block * 7 + (cell["kind"] == "red")) * 5 % 3)
                          + 0.01 * ((block + cell["size"]) % 2), times=5)  # fmt: skip
        frame = summary.with_set_ups(run.frame(), run.experiment)
        self.assertEqual(frame[summary.SET_UP].nunique(), 10)
        for _, rows in frame.groupby(summary.SET_UP):
            kinds, blocks = rows["kind"].nunique(), rows["block"].nunique()
            self.assertEqual((len(rows), kinds, blocks), (3, 1, 1))
        found = summary.summarise(run)["anova"]["rows"]
        self.assertEqual([r["name"] for r in found][-2:], ["between set-ups", "Residual"])
        self.assertEqual(found[-2]["freedom"], 8)

    def test_warnings_of_spread_and_of_the_run(self):
        wild = summary.summarise(self.run_of(lambda block, cell: 1.0 + 9 * (block % 2)))
        self.assertTrue(any("spreads by" in text for text in wild["warnings"]))
        self.assertTrue(any("1 more cells spread" in text for text in wild["warnings"]))
        self.assertIn("a warning of the run", wild["warnings"])

    def test_a_search_that_ended_at_its_top_is_told(self):
        measures = small_workload.Small.measures
        searched = dataclasses.replace(measures["value"], top="size")
        with mock.patch.dict(measures, {"value": searched}):
            is_top = lambda block, cell: block == 0 and cell["kind"] == "green"  # noqa: E731
            run = self.run_of(lambda *point: point[1]["size"] * (1 if is_top(*point) else 0.9))
            [text] = [t for t in summary.summarise(run)["warnings"] if "ended" in t]
            self.assertEqual(text, "value ended at size in 3 of 6 cells: it may be higher there")
            below = summary.summarise(self.run_of(lambda block, cell: cell["size"] * 0.9))
            self.assertFalse(any("ended" in text for text in below["warnings"]))

    def test_degenerate_runs_have_a_summary(self):
        for times, value in ((1, plain), (2, lambda block, cell: 0.0), (3, lambda *_: None)):
            found = summary.summarise(self.run_of(value, times=times))
            json.dumps(found, allow_nan=False)
        nothing = summary.summarise(self.run_of(plain, skip=lambda *_: True))
        self.assertEqual((nothing["cells"], nothing["ratios"]), ([], []))

    def test_the_files(self):
        run = self.run_of(plain)
        found = summary.write(run, self.folder / "out")
        self.assertEqual(json.loads((self.folder / "out/summary.json").read_text()), found)
        rows = list(csv.DictReader(io.StringIO((self.folder / "out/summary.csv").read_text())))
        self.assertEqual(len(rows), 6 * len(run.experiment.measures))
        self.assertEqual({row["kind"] for row in rows}, {"red", "green"})


if __name__ == "__main__":
    unittest.main()
