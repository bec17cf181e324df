"""Reports and comparisons: whole pages of synthetic runs, large, odd and degenerate ones."""

import html.parser
import importlib.util
import itertools
import json
import random
import re
import sys
import tempfile
import unittest
import warnings
from collections import defaultdict
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from tombolo_lab import LabError, model
from tombolo_lab.results import Run, cell_key
from tombolo_lab.workloads import REGISTRY, Measure, Parameter, Workload

LIBRARIES = all(
    importlib.util.find_spec(name)
    for name in ("numpy", "pandas", "scipy", "statsmodels", "matplotlib", "jinja2")
)
if LIBRARIES:
    from tombolo_lab import publish, report
    from tombolo_lab.report import flamegraphs

EVIL = '<script>alert("x")</script> & "quotes"'


class Shown(Workload):
    """A workload that is only reported, never run."""

    name = "shown"
    doc = "Is reported."
    parameters = {
        "kind": Parameter("Kind", str),
        "size": Parameter("Size", int, low=0, high=10**6, unit="B"),
        "on": Parameter("Switch", bool),
        "rate": Parameter("Rate", float, unit="Mbit/s"),
    }
    measures = {
        "mbit_s": Measure("Throughput", "Mbit/s", "higher"),
        "rtt_us": Measure("Round trip", "µs", "lower"),
        "loss": Measure("Loss", "", "lower", 0, 1),
    }


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects what tests look for."""

    VOID = {"meta", "br", "link", "img", "hr", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.references, self.scripts, self.text = [], [], [], 0, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.references += [found[k] for k in ("href", "src", "xlink:href") if k in found]
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            raise AssertionError(f"</{tag}> closes {self.open[-3:]}")
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


class Case(unittest.TestCase):
    def setUp(self):
        if not LIBRARIES:
            self.skipTest("the libraries of reports are not installed")
        self.enterContext(warnings.catch_warnings())
        warnings.simplefilter("error")
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.dict(REGISTRY, {"shown": f"{__name__}:Shown"}))

    def run_of(self, text, value, times=5, samples=None, conditions=None, name="run"):
        folder = self.folder / name
        folder.mkdir()
        (folder / "experiment.toml").write_text(text)
        experiment = model.load(str(folder / "experiment.toml"))
        source, points = random.Random(name), []
        for block in range(times):
            for cell in experiment.cells():
                found = value(cell, source)
                point = {"block": block, "cell": cell, "attempt": 1}
                if isinstance(found, str):
                    points.append({**point, "failed": found})
                    continue
                measures = {m: found if m != "loss" else 0.0 for m in experiment.measures}
                if isinstance(found, dict):
                    measures = {m: found[m] for m in experiment.measures}
                point |= {"measures": measures, "disturbed": None}
                if samples:
                    point["samples"] = {
                        "rtt_us": [source.lognormvariate(3, 0.4) for _ in range(samples)]
                    }
                points.append(point)
        found = {"kernel": "6.1", "cpu": EVIL, **(conditions or {})}
        (folder / "conditions.json").write_text(json.dumps(found))
        (folder / "skipped.json").write_text("[]")
        lines = "".join(json.dumps(point) + "\n" for point in points)
        (folder / "points.jsonl").write_text(lines)
        return Run.load(folder)

    def page(self, path):
        text = path.read_text()
        page = Page(text)
        self.assertEqual(page.open, [])
        self.assertEqual(len(page.ids), len(set(page.ids)), "an id is there twice")
        for reference in page.references:
            # A heat map's colour bar is an image within the drawing.
            if not reference.startswith("data:image/png;base64,"):
                self.assertTrue(reference.startswith("#"), reference[:80])
                self.assertTrue(reference[1:] in page.ids, reference)
        self.assertEqual(page.scripts, 0)
        self.assertIsNone(re.search(r"@import|url\((?!#)", text))
        return text, page

    def holds(self, text, *parts):
        """Without the page in the message."""
        for part in parts:
            self.assertTrue(part in text, part)

    def lacks(self, text, *parts):
        for part in parts:
            self.assertFalse(part in text, part)


ALL = f"""
title = "All kinds of plots {EVIL.replace('"', "'")}"
about = "A paragraph."
workload = "shown"
correlations = [["mbit_s", "rtt_us"]]
[factors]
kind = ["ivshmem", "vhost-user", "a very long name of an attachment that must be wrapped"]
size = [64, 256, 1024, 1460]
on = [false, true]
[[plots]]
kind = "curve"
x = "size"
curves = "kind"
panels = ["on"]
log = "xy"
[[plots]]
kind = "bars"
x = "kind"
curves = "on"
[[plots]]
kind = "box"
x = "kind"
[[plots]]
kind = "histogram"
x = "rtt_us"
curves = "kind"
[[plots]]
kind = "percentiles"
y = "rtt_us"
curves = "kind"
[[plots]]
kind = "heat"
x = "size"
y = "kind"
[[plots]]
kind = "curve"
x = "kind"
[[published]]
label = "Others (2021)"
source = "A paper"
match = {{ kind = "ivshmem", size = 64 }}
measure = "mbit_s"
value = 889
differs = "Hardware NIC"
"""
TWO_LEVELS = """
title = "Effects"
about = "A paragraph."
workload = "shown"
measures = ["mbit_s"]
[factors]
kind = ["one", "two"]
on = [false, true]
size = [1, 2]
[[plots]]
kind = "effects"
"""


def plausible(cell, source):
    base = {"ivshmem": 900.0, "vhost-user": 700.0}.get(cell["kind"], 300.0)
    return base * (cell["size"] / 1460) ** 0.7 * source.gauss(1, 0.03)


class Report(Case):
    def test_every_kind_of_plot(self):
        run = self.run_of(ALL, plausible, samples=300, conditions={"warnings": [EVIL]})
        path = report.write(run, run.folder)
        text, page = self.page(path)
        self.lacks(text, "<script>")
        self.holds(text, "&lt;script&gt;")
        self.assertIn("All kinds of plots", "".join(page.text))
        stems = {p.stem for p in (run.folder / "plots").glob("*.svg")}
        self.assertEqual(stems, {p.stem for p in (run.folder / "plots").glob("*.png")})
        self.assertEqual(len(stems), 7)
        for stem in stems:
            self.holds(text, f'id="{stem}"')
        self.holds(re.sub(r"\s+", " ", text), "120 point(s) count")
        found = json.loads((run.folder / "summary.json").read_text())
        self.assertEqual(len(found["cells"]), 24)
        self.assertEqual(len(found["published"]), 1)
        self.holds(text, "Hardware NIC")

    def test_panels_that_share_an_axis_show_all_points(self):
        """Also where the panel that is drawn first has small values, and begins at zero."""
        from tombolo_lab.report import plots

        text = ALL.replace('log = "xy"', "")
        run = self.run_of(text, lambda cell, source: 30.0 + cell["size"] + 5000.0 * cell["on"])
        report.write(run, run.folder)
        found = json.loads((run.folder / "summary.json").read_text())
        for number in (0, 1):
            [(_, _, figure)] = plots.Painter(run, found).figures(1, run.experiment.plots[number])
            self.addCleanup(plots.pyplot.close, figure)
            for axes in figure.axes:
                low, high = axes.get_ylim()
                self.assertLessEqual(low, axes.dataLim.y0)
                self.assertGreaterEqual(high, axes.dataLim.y1)

    def test_a_logarithmic_axis_begins_near_the_least_value_in_every_panel(self):
        """Bars would begin at zero, and so would an interval that reaches beyond it."""
        from tombolo_lab.report import plots

        text = ALL[: ALL.index("[[plots]]")] + (
            '[[plots]]\nkind = "bars"\nx = "size"\ncurves = "kind"\npanels = ["on"]\nlog = "y"\n'
            '[[plots]]\nkind = "curve"\nx = "size"\ncurves = "kind"\npanels = ["on"]\nlog = "y"\n'
        )
        # Of values between 1 and 1,000, so that intervals of means go below zero.
        run = self.run_of(text, lambda cell, source: 10.0 ** source.uniform(0, 3))
        report.write(run, run.folder)
        painter = plots.Painter(run, json.loads((run.folder / "summary.json").read_text()))
        for number, plot in enumerate(run.experiment.plots):
            [(_, _, figure)] = painter.figures(number, plot)
            self.addCleanup(plots.pyplot.close, figure)
            self.assertEqual(len(figure.axes), 2)
            for axes in figure.axes:
                self.assertEqual(axes.get_yscale(), "log")
                # A third of the least value, which is near 1.
                self.assertTrue(0.3 < axes.get_ylim()[0] < 0.5, axes.get_ylim())
                self.assertFalse(axes.patches, "no bar begins at zero")

    def test_a_value_over_several_cells_is_of_those_that_all_levels_have(self):
        """`on` is at one size only, and its values are far from the others."""
        from tombolo_lab.report import plots

        text = ALL[: ALL.index("[[plots]]")] + (
            '[[exclude]]\non = true\nsize = [64, 256, 1024]\n'
            '[[plots]]\nkind = "curve"\nx = "size"\ncurves = "kind"\n'
            '[[plots]]\nkind = "bars"\nx = "kind"\ncurves = "on"\n'
            '[[plots]]\nkind = "bars"\nx = "size"\n'
            '[[plots]]\nkind = "box"\nx = "size"\ncurves = "kind"\n'
            '[[plots]]\nkind = "percentiles"\ny = "rtt_us"\ncurves = "on"\n'
        )
        calls = []

        def value(cell, source):
            # Two points of the one kind are missing: cells count alike all the same.
            calls.append(cell["kind"])
            if cell["kind"] == "ivshmem" and calls.count("ivshmem") <= 2:
                return "failed"
            low = 100.0 if cell["kind"] == "ivshmem" else 400.0
            return low + source.random() + 5000.0 * cell["on"]

        run = self.run_of(text, value)
        report.write(run, run.folder)
        found = json.loads((run.folder / "summary.json").read_text())
        painter = plots.Painter(run, found)
        figures = []
        for number, plot in enumerate(run.experiment.plots):
            [(_, _, figure)] = painter.figures(number, plot)
            self.addCleanup(plots.pyplot.close, figure)
            figures.append(figure)
        notes = [" ".join("".join(t.get_text() for t in f.texts).split()) for f in figures]
        sizes, ways, pooled, boxes, lines = (figure.axes[0] for figure in figures)
        # Sizes: without the level that one of them has, with an interval, for each is one cell.
        self.assertLess(sizes.dataLim.y1, 1000)
        self.assertEqual(len(sizes.containers[0].lines[2]), 1)
        self.assertGreater(min(len(p) for p in sizes.containers[0].lines[2][0].get_segments()), 1)
        self.assertTrue(notes[0].startswith("At on no only. Left out, since"))
        self.assertTrue(notes[0].endswith("have them: on yes."))
        # Ways: at the only size that both have.
        self.assertIn("At size 1460 only.", notes[1])
        self.assertIn("have them: size 64, 256, 1024.", notes[1])
        # Pooled kinds: the mean of the cells' means, and no whisker.
        heights = [bar.get_height() for bar in pooled.patches]
        for height in heights:
            self.assertAlmostEqual(height, (100 + 400 + 400) / 3 + 0.5, delta=0.5)
        self.assertTrue(all(bars.errorbar is None for bars in pooled.containers))
        self.assertIn("mean of the means of 3 cells, so without an interval", notes[2])
        self.assertIn("all 3 levels of kind; on no. Left out", notes[2])
        self.assertLess(boxes.dataLim.y1, 1000)
        self.assertTrue(notes[3].startswith("At on no only."))
        self.assertIn("the values of 3 cells together: all 3 levels of kind", notes[4])
        self.assertEqual(len(lines.lines), 2)
        # The drawing itself says it, not only the page about it.
        with plots.text_in_drawings():
            [first, *_] = plots.draw(run, found, run.folder)
        self.assertIn("At on no only.", first.svg)

    def test_where_nothing_is_common_nothing_is_drawn(self):
        from tombolo_lab.report import plots

        text = ALL[: ALL.index("[[plots]]")] + (
            '[[exclude]]\non = true\nsize = 64\n[[exclude]]\non = false\nsize = [256, 1024, 1460]\n'
            '[[plots]]\nkind = "curve"\nx = "size"\ncurves = "kind"\n'
        )
        run = self.run_of(text, plausible)
        report.write(run, run.folder)
        found = json.loads((run.folder / "summary.json").read_text())
        [(_, _, figure)] = plots.Painter(run, found).figures(0, run.experiment.plots[0])
        self.addCleanup(plots.pyplot.close, figure)
        self.assertEqual(figure.axes[0].containers, [])
        self.assertIn("Nothing is drawn: no combination of on", figure.texts[0].get_text())

    def test_a_note_names_what_it_goes_over_shortly(self):
        from tombolo_lab.report import plots

        run = self.run_of(ALL, plausible)
        pairs = [(64, False), (64, True), (256, True)]
        cells = [
            {"kind": kind, "size": size, "on": on}
            for kind in ("ivshmem", "vhost-user")
            for size, on in pairs
        ]
        note = plots.Shared(("kind", "size", "on"), tuple(cells), ()).note(run.experiment, "bars")
        self.assertTrue(
            note.endswith(
                "6 cells, so without an interval: kind ivshmem, vhost-user; "
                "size 64 with all 2 levels of on, or size 256 with on yes."
            ),
            note,
        )

    def test_percentiles_of_thinned_samples_end_at_their_ranks(self):
        from tombolo_lab.report import plots

        ends = []
        for number, of in enumerate((300, 5000)):
            run = self.run_of(ALL, plausible, samples=300, name=f"run{number}")
            for point in run.points:
                point["notes"] = {"samples_of": {"rtt_us": of}}
            report.write(run, run.folder)
            found = json.loads((run.folder / "summary.json").read_text())
            [(_, _, figure)] = plots.Painter(run, found).figures(5, run.experiment.plots[4])
            self.addCleanup(plots.pyplot.close, figure)
            ends.append(max(line.get_xdata()[-1] for line in figure.axes[0].lines))
        # 12,000 values of a curve, and 300 ranks of each point: -log10 of what lies beyond.
        self.assertGreater(ends[0], 4)
        self.assertLessEqual(ends[1], 2.4772)

    def test_effects(self):
        def value(cell, source):
            base = 10.0 + 3 * cell["on"] + 2 * (cell["kind"] == "two")
            # The same noise in each cell: nothing but the two effects differs.
            return base + self.noise[cell_key(cell)].pop()

        self.noise = defaultdict(lambda: [0.1, -0.1, 0.05, -0.05, 0.0])
        run = self.run_of(TWO_LEVELS, value)
        text, _ = self.page(report.write(run, run.folder))
        self.holds(text, '<td class="mark">on</td>', '<td class="mark">kind</td>')
        self.lacks(text, '<td class="mark">size</td>')

    def interactions_of(self, text, value):
        """The panels of a plot of interactions by the two factors in their titles, and its note."""
        from tombolo_lab.report import plots

        run = self.run_of(text, value, name=f"run{len(list(self.folder.iterdir()))}")
        self.page(report.write(run, run.folder))
        found = json.loads((run.folder / "summary.json").read_text())
        [(stem, _, figure)] = plots.Painter(run, found).figures(1, run.experiment.plots[0])
        self.addCleanup(plots.pyplot.close, figure)
        self.assertEqual(stem, "01-interactions-mbit-s")
        panels = {}
        for axes in figure.axes:
            if axes.get_visible() and axes.get_legend():
                name, _, more = axes.get_legend().get_title().get_text().partition("\n")
                panels[name] = (axes, more)
        return panels, " ".join(" ".join(t.get_text() for t in figure.texts).split())

    def test_interactions(self):
        def value(cell, source):
            both = cell["on"] and cell["kind"] == "two"
            return 10.0 + 8 * both + cell["size"] + self.noise[cell_key(cell)].pop()

        text = TWO_LEVELS.replace('"effects"', '"interactions"')
        self.noise = defaultdict(lambda: [0.1, -0.1, 0.05, -0.05, 0.0])
        panels, note = self.interactions_of(text, value)
        # The strongest first.
        self.assertEqual(list(panels)[0], "kind × on")
        self.assertEqual(set(panels), {"kind × on", "kind × size", "on × size"})
        for name, (axes, more) in panels.items():
            title = axes.get_legend().get_title()
            is_real = name == "kind × on"
            self.assertEqual(title.get_fontweight(), "bold" if is_real else "normal")
            self.assertEqual(more.endswith(": significant"), is_real, more)
        self.assertRegex(panels["kind × on"][1], r"^\d+\.\d % of the variation, p < 0\.001: ")
        axes = panels["kind × on"][0]
        lines = [container.lines[0].get_ydata().tolist() for container in axes.containers]
        for found, expected in zip(lines, ([11.5, 11.5], [11.5, 19.5]), strict=True):
            for one, other in zip(found, expected, strict=True):
                self.assertAlmostEqual(one, other)
        # Of two cells, which have no interval: no whisker, not one of no length.
        for container in axes.containers:
            self.assertFalse(container.has_yerr)
        texts = [entry.get_text() for entry in axes.get_legend().get_texts()]
        self.assertEqual(texts, ["on no", "on yes"])
        self.assertIn("mean of the means of 2 cells: no interval", note)

    def test_ticks_of_small_effects_do_not_touch(self):
        figure = self.first_figure(TWO_LEVELS, lambda _, source: 0.8192 + source.random() / 2000)
        shown = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
        self.assertGreater(len(boxes), 2)
        for one, other in itertools.pairwise(boxes):
            self.assertLess(one.x1, other.x0)

    def first_figure(self, text, value):
        """The first drawing of a run, as in its report."""
        from tombolo_lab.report import plots

        run = self.run_of(text, value)
        report.write(run, run.folder)
        painter = plots.Painter(run, json.loads((run.folder / "summary.json").read_text()))
        with plots.pyplot.rc_context(plots.STYLE):
            [(_, _, figure)] = painter.figures(1, run.experiment.plots[0])
        self.addCleanup(plots.pyplot.close, figure)
        figure.canvas.draw()
        return figure

    def stands_apart(self, text, value):
        """What stands apart from the numbers of the axes of a run's first drawing."""
        axes = self.first_figure(text, value).axes[0]
        return "".join(axis.get_offset_text().get_text() for axis in (axes.xaxis, axes.yaxis))

    def test_no_power_of_ten_stands_in_the_label_of_an_axis(self):
        found = self.stands_apart(TWO_LEVELS, lambda cell, source: 1e-6 * source.random())
        self.assertEqual(found, "")

    def test_no_summand_is_left_out_of_the_numbers_of_an_axis(self):
        text = TWO_LEVELS.replace('"effects"', '"curve"\nx = "size"')
        found = self.stands_apart(text, lambda cell, source: 199.9 + source.random() / 100)
        self.assertEqual(found, "")

    def test_a_panel_without_values_is_left_out(self):
        text = TWO_LEVELS.replace('"effects"', '"bars"\nx = "size"\npanels = ["kind"]')
        figure = self.first_figure(text, lambda cell, _: 5.0 if cell["kind"] == "one" else None)
        self.assertEqual([axes.get_title() for axes in figure.axes], ["kind one"])

    def test_large_levels_are_brief(self):
        from tombolo_lab.report import style

        levels = (0.5, 64, 65536, 100_000, 999_999, 1_048_576, 10_000_000, 2**30, 10**12)
        texts = ["0.5", "64", "65536", "100k", "1M", "1.05M", "10M", "1.07G", "1T"]
        self.assertEqual([style.brief(level) for level in levels], texts)

    def test_many_names_of_several_lines_do_not_touch(self):
        from tombolo_lab.report import plots

        text = TWO_LEVELS.replace('"effects"', '"bars"\nx = "size"')
        text = text.replace("[1, 2]", str(list(range(1, 18))))
        name = "the_name_of_a_setting={0} and_that_of_another={0}"
        with mock.patch.object(plots, "level_text", lambda level: name.format(level)):
            figure = self.first_figure(text, lambda cell, source: 5.0 + source.random())
        labels = figure.axes[0].get_xticklabels()
        self.assertEqual([label.get_text().count("\n") for label in labels], [1] * 17)
        for one, other in itertools.pairwise(label.get_window_extent() for label in labels):
            self.assertLess(one.x1, other.x0)

    def test_interactions_of_two_factors_have_intervals(self):
        text = TWO_LEVELS.replace('"effects"', '"interactions"').replace("[1, 2]", "[1]")
        panels, note = self.interactions_of(text, lambda cell, source: 5.0 + source.random())
        [(axes, _)] = panels.values()
        for container in axes.containers:
            self.assertEqual([len(path) for path in container.lines[2][0].get_segments()], [2, 2])
        self.assertNotIn("cells", note)

    def test_interactions_of_a_fraction_and_of_many_factors(self):
        text = TWO_LEVELS.replace('"effects"', '"interactions"')
        four = text.replace("size = [1, 2]", "size = [1, 2]\nrate = [1.0, 2.0]")
        panels, note = self.interactions_of(
            four + '[design]\nkind = "fractional"\ngenerators = ["D=ABC"]\n',
            lambda cell, source: 5.0 + source.random(),
        )
        self.assertEqual(set(panels), {"kind × on", "kind × size", "kind × rate"})
        self.assertIn("mean of the means of 2 cells", note)
        self.assertIn("cannot be told from its aliases", note)
        self.enterContext(mock.patch("tombolo_lab.report.interactions.MOST_PANELS", 5))
        panels, note = self.interactions_of(four, lambda cell, source: 5.0 + source.random())
        self.assertEqual(len(panels), 5)
        self.assertIn("The 5 largest of 6 interactions", note)

    def test_where_there_are_no_interactions_it_is_said(self):
        text = TWO_LEVELS.replace('"effects"', '"interactions"')
        fraction = '[design]\nkind = "fractional"\ngenerators = ["C=AB"]\n'
        for more, value, why in (
            ("", lambda cell, source: "broke" if cell["on"] else 1.0, "4 of 8 cells have values"),
            (fraction, lambda cell, source: source.random(), "cannot tell them from single"),
        ):
            panels, note = self.interactions_of(text + more, value)
            self.assertEqual(panels, {})
            self.assertIn(f"no interactions: {why}" if not more else why, note)
        panels, _ = self.interactions_of(text, lambda cell, source: 7.0)
        texts = {more for _, more in panels.values()}
        self.assertEqual(texts, {"no variation, p = 1.000: not significant"})

    def test_what_was_counted_by_range_is_drawn_by_range(self):
        from tombolo_lab.report import plots

        text = ALL[: ALL.index("[[plots]]")] + (
            '[[plots]]\nkind = "histogram"\nx = "mbit_s"\ncurves = "on"\npanels = ["kind"]\n'
        )
        run = self.run_of(text, plausible, times=2)
        for point in run.points:
            on = point["cell"]["on"]
            rows = [[0, 0, 0], [1, 1, 6], [2, 3, 0], [4, 7, 2 * on], [8, None, 0]]
            point["notes"] = {"histograms": {"mbit_s": rows}}
        report.write(run, run.folder)
        found = json.loads((run.folder / "summary.json").read_text())
        # Two repetitions.
        [ranges] = [
            part["measures"]["mbit_s"]["ranges"]
            for part in found["cells"]
            if part["cell"] == {"kind": "ivshmem", "size": 64, "on": True}
        ]
        self.assertEqual(ranges, [[0, 0, 0], [1, 1, 12], [2, 3, 0], [4, 7, 4], [8, None, 0]])
        self.assertNotIn("ranges", found["cells"][0]["measures"]["rtt_us"])
        [(_, _, figure)] = plots.Painter(run, found).figures(1, run.experiment.plots[0])
        self.addCleanup(plots.pyplot.close, figure)
        axes = figure.axes[0]
        # From the first range with a count to the last, and the empty one between them.
        names = [text.get_text() for text in axes.get_xticklabels()]
        self.assertEqual(names, ["1", "2–3", "4–7"])
        shares = [line.get_ydata() for line in axes.lines]
        self.assertEqual([list(map(float, y)) for y in shares], [[100, 0, 0], [75, 0, 25]])
        self.assertEqual(axes.get_ylim()[0], 0)
        self.assertIn("the values of 4 cells together", figure.texts[0].get_text())
        self.assertEqual(plots.range_name(1024, None), "1024 or more")

    def test_the_same_run_gives_the_same_files(self):
        run = self.run_of(TWO_LEVELS, lambda cell, source: 5.0 + cell["size"])
        first = report.write(run, self.folder / "a").read_bytes()
        self.assertEqual(first, report.write(run, self.folder / "b").read_bytes())
        for path in (self.folder / "a/plots").iterdir():
            self.assertEqual(path.read_bytes(), (self.folder / "b/plots" / path.name).read_bytes())

    def test_degenerate_runs(self):
        one = (
            'title="One"\nabout="x"\nworkload="shown"\n[factors]\nsize=[1]\n'
            '[[plots]]\nkind="histogram"\nx="rtt_us"\n[[plots]]\nkind="percentiles"\n'
        )
        for number, (times, value) in enumerate(((1, 3.0), (2, 0.0), (4, 7.0))):
            run = self.run_of(one, lambda *_, v=value: v, times, name=f"one{number}")
            self.page(report.write(run, run.folder))
        many = (
            'title="Many"\nabout="x"\nworkload="shown"\n[factors]\nkind=['
            + ",".join(f'"level {n} of forty"' for n in range(40))
            + ']\nsize=[1,2]\n[[plots]]\nkind="bars"\nx="kind"\n[[plots]]\nkind="curve"\n'
            'x="size"\ncurves="kind"\n'
        )
        run = self.run_of(many, lambda cell, source: source.random() + 1, name="many")
        self.page(report.write(run, run.folder))
        # Forty curves need six panels of seven.
        self.assertTrue((run.folder / "plots/02-curve-mbit-s.svg").exists())

    def test_an_experiment_without_plots_has_one(self):
        text = TWO_LEVELS.partition("[[plots]]")[0]
        run = self.run_of(text, lambda cell, source: source.random())
        self.page(report.write(run, run.folder))
        self.assertEqual(len(list((run.folder / "plots").glob("*.svg"))), 1)

    def test_a_run_without_points_has_no_report(self):
        run = self.run_of(TWO_LEVELS, lambda *_: "it broke")
        with self.assertRaisesRegex(LabError, "no point counts"):
            report.write(run, run.folder)

    def test_failed_points_are_counted_with_their_reasons(self):
        run = self.run_of(
            TWO_LEVELS, lambda cell, source: f"broke {EVIL}" if cell["on"] else source.random()
        )
        text, _ = self.page(report.write(run, run.folder))
        self.holds(text, "20 × broke &lt;script&gt;")
        self.holds(text, "4 of 8 cells have values")

    def test_flame_graphs_are_shown_without_their_scripts(self):
        run = self.run_of(TWO_LEVELS, lambda cell, source: source.random())
        (run.folder / "plots").mkdir()
        flame = (
            '<?xml version="1.0"?><svg onload="init()"><script>x()</script><text>ksys</text></svg>'
        )
        (run.folder / "plots/forwarding.flame.svg").write_text(flame)
        text, _ = self.page(report.write(run, run.folder))
        self.holds(text, "Flame graph: forwarding")
        self.lacks(text, "onload")

    def test_a_foreign_drawing_loads_and_runs_nothing(self):
        run = self.run_of(TWO_LEVELS, lambda cell, source: source.random())
        (run.folder / "plots").mkdir()
        evil = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            "onload='alert(1)' viewBox=\"0 0 9 9\"><script>a</script ><script href='http://e/x'/>"
            '<style>@import "http://e/y";</style>'
            '<a href="javascript:alert(3)"><text x="1" onclick="x()">k&lt;sys</text></a>'
            '<image xlink:href="http://evil/x.png"/><rect fill="url(http://evil/z)" width="3"/>'
            '<foreignObject><iframe src="http://evil"></iframe></foreignObject></svg>'
        )
        (run.folder / "plots/a.flame.svg").write_text(evil)
        (run.folder / "plots/b.flame.svg").write_text("<svg><g></svg>")
        bomb = '<!DOCTYPE svg [<!ENTITY a "aaaa">]><svg>&a;</svg>'
        (run.folder / "plots/c.flame.svg").write_text(bomb)
        text, _ = self.page(report.write(run, run.folder))
        self.holds(text, '<svg viewBox="0 0 9 9"><text x="1">k&lt;sys</text><rect width="3"></rect>')
        self.lacks(text, "http://e", "evil", "onload", "alert(1", "alert(3", "onclick", "iframe")
        self.lacks(text, "@import")
        self.lacks(text, "Flame graph: b", "Flame graph: c")
        self.holds(text, "default-src 'none'")

    def test_logarithmic_axes_have_plain_numbers(self):
        from tombolo_lab.report import plots

        run = self.run_of(ALL.replace('y = "rtt_us"', 'y = "rtt_us"\nlog = "y"'), plausible, 5, 40)
        with plots.text_in_drawings():
            report.write(run, run.folder)
        for path in (run.folder / "plots").glob("*.svg"):
            self.lacks(path.read_text(), "mathdefault")
        self.holds((run.folder / "plots" / "01-curve-mbit-s.svg").read_text(), ">100<")

    def test_a_cut_is_said(self):
        from tombolo_lab.report import plots

        run = self.run_of(TWO_LEVELS, plausible)
        for name, value in (("MOST_ROWS", 2), ("plots.MOST_EFFECTS", 3)):
            self.enterContext(mock.patch(f"tombolo_lab.report.{name}", value))
        with plots.text_in_drawings():
            text = report.write(run, run.folder).read_text()
        left = len(json.loads((run.folder / "summary.json").read_text())["ratios"]) - 2
        self.holds(text, f"{left} more row(s) are in summary.json", "the 3 largest of 7")

    def test_a_dollar_is_a_dollar(self):
        bars = '[[plots]]\nkind = "bars"\nx = "on"\ncurves = "kind"\n'
        for number, plots in enumerate(("", bars)):
            text = TWO_LEVELS.partition("[[plots]]")[0].replace('"one"', '"$_{$"') + plots
            run = self.run_of(text, plausible, name=f"dollar{number}")
            self.page(report.write(run, run.folder))

    def test_numbers_for_readers(self):
        for value, text in (
            (0, "0"), (None, "–"), (12345.678, "12 346"), (0.001234, "0.001234"), (1.5, "1.5"),
            (1e9, "1.000·10^9"), (-2.50, "-2.5"), (999.96, "1 000"), (100.0, "100"),
        ):  # fmt: skip
            self.assertEqual(report.number(value), text)
        self.assertEqual(report.p_value(0.0001), "< 0.001")


class Published(Case):
    def test_a_page_with_its_files(self):
        run = self.run_of(ALL, plausible, samples=50)
        target = self.folder / "pages"
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        text = (target / "README.md").read_text()
        for name in re.findall(r"\]\(([^)]+\.(?:svg|csv))\)", text):
            self.assertTrue((target / name).is_file(), name)
        self.assertEqual(text.count("!["), 7)
        self.assertIn("Others (2021), mbit_s | 889 |", text)
        self.assertIn("kind ivshmem, size 64, on no |", text)
        self.assertIn("Pearson's correlation of mbit_s and rtt_us", text)

    def test_the_command_repeats_the_run_anywhere(self):
        run = self.run_of(TWO_LEVELS, plausible)
        name = run.experiment.name
        for said, shown in (
            (f"tombolo lab run {name} --into /d --set 'on=a b,c'",
             f"tombolo lab run {name} --set 'on=a b,c'"),
            (f"tombolo lab run --into=/d {name} --quick", f"tombolo lab run {name} --quick"),
            (f"./x bench {name}", f"tombolo lab run {name}"),
            ("tombolo lab run /d/mine.toml", f"tombolo lab run {name}"),
        ):  # fmt: skip
            run.conditions["command"] = said
            self.assertEqual(publish.command_of(run), shown)

    def test_a_drawing_is_compact_and_looks_the_same(self):
        run = self.run_of(TWO_LEVELS, plausible)
        with report.plots.text_in_drawings():
            report.write(run, run.folder)
        drawings = sorted((run.folder / "plots").glob("[0-9]*.svg"))
        self.assertTrue(drawings)
        for path in drawings:
            before = path.read_text()
            after = publish.compact(before)
            self.assertLess(len(after), 0.7 * len(before), path.name)
            texts = [re.findall(r"<text[^>]*>([^<]*)<", svg) for svg in (before, after)]
            self.assertEqual(texts[0], texts[1], path.name)
            # A font is a style, and no attribute that browsers know.
            self.assertIn("Verdana", after)
            self.assertNotIn('font="', after)
            # What is referred to is there still.
            names = set(re.findall(r'id="([^"]+)"', after))
            referred = re.findall(r'(?:url\(#|xlink:href="#)([\w.-]+)', after)
            self.assertLessEqual(set(referred), names, path.name)

    def test_figures_are_short_and_those_that_do_not_apply_are_left_out(self):
        text = (
            "size,measure,unit,n,mean,median,deviation,cv,low,high,boot_low,boot_high,p50\n"
            "64,mbit_s,Mbit/s,3,1.2345678,2.0,0.1,0.2,1e-05,12345.678901,1.0,2.0,\n"
            "64,loss,,0,,,,,,,,,\n"
            "128,mbit_s,Mbit/s,3,3.5,,,,,,,,\n"
            "128,loss,,3,0.25,,,,,,,,0.125\n"
        )
        self.assertEqual(
            publish.figures(text),
            "size,n,mbit_s (Mbit/s),mbit_s median,mbit_s low,mbit_s high,loss,loss p50\n"
            "64,3,1.2346,2,1e-05,12346,,\n"
            "128,3,3.5,,,,0.25,0.125\n",
        )
        # Measures of which a cell has more values than of others have a count each.
        self.assertEqual(
            publish.figures(text.replace("128,loss,,3,", "128,loss,,2,")).splitlines()[0],
            "size,mbit_s (Mbit/s),mbit_s n,mbit_s median,mbit_s low,mbit_s high,"
            "loss,loss n,loss p50",
        )

    def test_a_drawing_of_what_never_differs_is_left_out(self):
        run = self.run_of(ALL, lambda *_: 3.0)
        target = self.folder / "pages"
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        # A histogram is of the values within the points.
        names = [path.name.split("-", 2)[2] for path in target.glob("*.svg")]
        self.assertEqual(names, ["histogram-rtt-us.svg"])

    def test_an_experiment_without_plots_is_published(self):
        run = self.run_of(ALL[: ALL.index("[[plots]]")], plausible)
        target = self.folder / "pages"
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        self.assertEqual((target / "README.md").read_text().count("!["), 1)

    def test_the_last_attempt_is_not_measured_again(self):
        run = self.run_of(ALL, plausible, times=2)
        lines = [*map(json.loads, (run.folder / "points.jsonl").read_text().splitlines())]
        # One point has a good second attempt; another is disturbed in both.
        for index, good in ((0, True), (1, False)):
            first = {**lines[index], "disturbed": "other work"}
            again = {**lines[index], "attempt": 2, "disturbed": None if good else "other work"}
            lines[index] = first
            lines.append(again)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.folder / "points.jsonl").write_text(text)
        target = self.folder / "pages"
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        page = (target / "README.md").read_text()
        self.assertIn("2 attempts were disturbed and measured again, 1 points were", page)

    def test_a_page_keeps_the_sections_of_other_experiments(self):
        target = self.folder / "pages"
        target.mkdir()
        before = "# Results\n\nHead.\n\n## {}: Old\n\n![Old]({}.svg)\n\n## a: Kept\n\n![Kept](a.svg)\n"
        run = self.run_of(TWO_LEVELS, plausible)
        name = run.experiment.name
        (target / "README.md").write_text(before.format(name, "old"))
        for file in ("old.svg", "a.svg"):
            (target / file).write_text("<svg/>")
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        text = (target / "README.md").read_text()
        self.assertIn("\n## a: Kept\n\n![Kept](a.svg)\n", text)
        self.assertIn(f"## {name}: Effects", text)
        self.assertNotIn("Old", text)
        self.assertEqual(
            [(target / file).is_file() for file in ("old.svg", "a.svg")], [False, True]
        )

    def test_warnings_stand_before_the_figures(self):
        run = self.run_of(
            TWO_LEVELS, plausible, conditions={"warnings": ["other work | took\n## a CPU"]}
        )
        target = self.folder / "pages"
        self.assertEqual(publish.main([str(target), str(run.folder)]), 0)
        text = (target / "README.md").read_text()
        self.holds(text, "Read this first:", "- other work \\| took ## a CPU\n")
        self.assertLess(text.index("Read this first"), text.index("| cell |"))

    def test_what_is_no_run_is_said(self):
        self.assertEqual(publish.main([str(self.folder / "pages"), str(self.folder)]), 1)


class Comparison(Case):
    def pair(self, factor, times=6):
        def value(cell, source):
            return plausible({**cell, "kind": "ivshmem"}, source)

        a = self.run_of(TWO_LEVELS, value, times, name="a")
        b = self.run_of(
            TWO_LEVELS, lambda c, s: value(c, s) * factor, times, {}, {"kernel": "6.2"}, "b"
        )
        return report.compare(a, b, self.folder / "out")

    def test_a_change_is_found(self):
        value, path = self.pair(1.3)
        self.page(path)
        self.assertEqual(value["verdicts"]["better"], 8)
        for row in value["rows"]:
            self.assertTrue(row["low"] <= row["ratio"] <= row["high"])
            self.assertAlmostEqual(row["ratio"], 1.3, delta=0.1)
        self.assertIn({"name": "kernel", "a": "6.1", "b": "6.2"}, value["differences"])
        self.assertEqual(json.loads((self.folder / "out/compare.json").read_text()), value)

    def test_nothing_is_found_where_nothing_changed(self):
        value, _ = self.pair(1.0)
        self.assertEqual(value["verdicts"]["not distinguishable"], 8)

    def test_one_repetition_cannot_be_tested(self):
        value, path = self.pair(2.0, times=1)
        self.page(path)
        self.assertEqual(value["verdicts"]["unknown"], 8)

    def losses(self, *functions, times=6):
        """Two runs whose losses are what the functions give for a source of randomness."""
        text = TWO_LEVELS.replace('measures = ["mbit_s"]', 'measures = ["mbit_s", "loss"]')
        runs = [
            self.run_of(
                text,
                lambda c, s, f=function: {"mbit_s": 100 + s.random(), "loss": f(s)},
                times,
                name=f"loss{number}",
            )
            for number, function in enumerate(functions)
        ]
        value, path = report.compare(*runs, self.folder / "out")
        text, _ = self.page(path)
        return [row for row in value["rows"] if row["measure"] == "loss"], text

    def test_a_measure_with_zeros_has_a_verdict_by_its_difference(self):
        rows, text = self.losses(lambda s: 0.0, lambda s: 0.2 + 0.01 * s.random())
        for row in rows:
            self.assertEqual((row["ratio"], row["verdict"]), (None, "worse"))
            apart = row["difference"]
            self.assertTrue(0.19 < apart["low"] < apart["mean"] < apart["high"] < 0.22)
        self.holds(text, "B − A")

    def test_constant_samples_that_differ_have_a_verdict(self):
        rows, _ = self.losses(lambda s: 1.0, lambda s: 0.0, times=3)
        self.assertEqual({row["verdict"] for row in rows}, {"better"})

    def test_two_constant_values_on_a_side_are_too_few(self):
        rows, _ = self.losses(lambda s: 1.0, lambda s: 0.0, times=2)
        self.assertEqual({row["verdict"] for row in rows}, {"unknown"})

    def test_what_differs_in_the_method_is_listed(self):
        text = TWO_LEVELS + '[repeat]\ntimes = 3\n[order]\nkind = "given"\n'
        text += "[disturbed]\ncount = true\n"
        a = self.run_of(TWO_LEVELS, plausible, name="a")
        b = self.run_of(text, plausible, 3, name="b")
        value, _ = report.compare(a, b, self.folder / "out")
        found = {d["name"]: (d["a"], d["b"]) for d in value["differences"]}
        self.assertEqual(found["repeat times"][1], "3")
        self.assertEqual(found["order"], ("randomised", "given"))
        self.assertEqual(found["disturbed count"], ("False", "True"))

    def test_what_only_one_run_has_is_listed(self):
        a = self.run_of(TWO_LEVELS, lambda c, s: s.random() + 1, name="a")
        more = TWO_LEVELS.replace("size = [1, 2]", "size = [1, 3]")
        more = more.replace('["mbit_s"]', '["mbit_s", "rtt_us"]')
        b = self.run_of(more, lambda c, s: s.random() + 1, name="b")
        value, path = report.compare(a, b, self.folder / "out")
        found = value["unshared"]
        sizes = [(row["run"], row["cell"]["size"]) for row in found if row["cell"]]
        self.assertEqual(sorted(sizes), [("A", 2)] * 4 + [("B", 3)] * 4)
        measures = [(row["run"], row["measure"]) for row in found if row["measure"]]
        self.assertEqual(measures, [("B", "rtt_us")])
        text, _ = self.page(path)
        self.holds(text, "A: kind one, on no, size 2", "B: the measure rtt_us")

    def test_a_drawing_of_many_ratios_says_which(self):
        from tombolo_lab.report import plots

        row = {"name": "a cell", "ratio": 1.0, "low": None, "high": None, "significant": False}
        rows = [row] * (plots.MOST_RATIOS + 3) + [{**row, "ratio": None}]
        title = plots.draw_ratios(rows, self.folder, "Ratios").title
        self.assertIn("the first 40 of 43; the others are in the table", title)
        self.assertIn("1 without a ratio", title)
        self.assertEqual(plots.draw_ratios([row], self.folder, "Ratios").title, "Ratios")

    def test_a_run_without_points_is_not_compared(self):
        a = self.run_of(TWO_LEVELS, plausible, name="a")
        b = self.run_of(TWO_LEVELS, lambda *_: "broke", name="b")
        with self.assertRaisesRegex(LabError, "b: no point counts"):
            report.compare(a, b, self.folder / "out")

    def test_runs_that_do_not_fit_are_refused(self):
        a = self.run_of(TWO_LEVELS, lambda *_: 1.0, name="a")
        b = self.run_of(
            TWO_LEVELS.replace("on = [false, true]", "rate = [1.0, 2.0]"), lambda *_: 1.0, name="b"
        )
        with self.assertRaisesRegex(LabError, "the same factors"):
            report.compare(a, b, self.folder / "out")
        c = self.run_of(TWO_LEVELS.replace('"one", "two"', '"x", "y"'), lambda *_: 1.0, name="c")
        with self.assertRaisesRegex(LabError, "no cell and measure in common"):
            report.compare(a, c, self.folder / "out")


@unittest.skipUnless(LIBRARIES, "needs the libraries of reports")
class FlameGraphs(unittest.TestCase):
    def run_of(self, folder):
        experiment = model.load("bypass-flames")
        stacks = {
            "nat": {"vfs_write;tun_get_user;nf_hook_slow": 60, "vfs_write;ip_forward": 40},
            "bypass_nat": {"vfs_write;bpf: take": 30, "vfs_write": 10, "tiny": 1},
        }
        points = [
            {
                "block": block,
                "cell": cell,
                "measures": {"cpu_ns": 4000.0 if cell["path"] == "nat" else 1000.0},
                "notes": {"stacks": stacks[cell["path"]]},
                "disturbed": None,
            }
            for block in range(2)
            for cell in experiment.cells()
        ]
        return Run(folder, experiment, {}, points, [])

    def test_pictures_have_one_scale_and_the_shares_of_all_repetitions(self):
        with tempfile.TemporaryDirectory() as name:
            paths = flamegraphs.draw(self.run_of(Path(name)), Path(name))
            self.assertEqual([p.name for p in paths], ["nat.flame.svg", "bypass-nat.flame.svg"])
            texts = [path.read_text() for path in paths]
        widths = [float(re.search(r'write: 100.0 %</title><rect [^>]*width="([0-9.]+)"', t)[1])
                  for t in texts]  # fmt: skip
        self.assertAlmostEqual(widths[0] / widths[1], 4, delta=0.05)
        self.assertIn("<title>nf_hook_slow: 60.0 %</title>", texts[0])
        self.assertIn("<title>bpf: take: 73.2 %</title>", texts[1])
        self.assertIn("4000 ns of CPU time per frame", texts[0])
        for text in texts:
            Page(text.replace("/>", "></rect>"))

    def test_a_run_without_stacks_has_no_picture(self):
        with tempfile.TemporaryDirectory() as name:
            run = self.run_of(Path(name))
            for point in run.points:
                del point["notes"]
            self.assertEqual(flamegraphs.draw(run, Path(name)), [])


if __name__ == "__main__":
    unittest.main()
