"""The last lines of the benches: their keys are those that docs/benches.md documents."""

import argparse
import json
import re
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import LabError, benches, model
from tombolo_lab.benches import __main__ as program
from tombolo_lab.results import Run

DOCS = Path(__file__).resolve().parents[2] / "docs/benches.md"
CONDITIONS = {
    "command": "x", "date": "2026-11-25T00:00:00Z", "commit": "abc", "kernel": "6.1",
    "cpu": "a CPU", "cpus": 2, "load": [0, 0, 0],
}  # fmt: skip

CONDITION_KEYS = [
    "command", "date", "commit", "kernel", "cpu", "cpus", "load", "load_after", "tsc_khz",
    "took_s", "others_cpus", "stolen_cpus",
]  # fmt: skip


def options(name, **changed):
    given = {"name": name, "only": None, "repeats": None, "set": [], "quick": False}
    return argparse.Namespace(**{**given, **changed})


def value_of(measure, number):
    """A value in the measure's range, different from block to block."""
    low = measure.low if measure.low is not None else 0
    high = measure.high if measure.high is not None else low + 1000
    return low + (high - low) * (0.3 + 0.1 * (number % 3))


def synthetic(part, chosen, blocks=3):
    """A run of all cells of a bench's experiment, with made-up values."""
    experiment = program.experiment_of(part, chosen)
    declared = model.workload_class(experiment.workload).measures
    points = []
    for block in range(blocks):
        for number, cell in enumerate(experiment.cells()):
            values = {name: value_of(declared[name], block + number) for name in declared}
            points.append(
                {
                    "block": block, "cell": cell, "attempt": 1, "measures": values,
                    "disturbed": None, "took_s": 1.0, "others_cpus": 0.1, "stolen_cpus": 0.0,
                }
            )  # fmt: skip
    return Run(Path(tempfile.gettempdir()) / part.experiment, experiment, CONDITIONS, points, [])


def documented():
    """Bench → the object of its last line in the docs."""
    text = DOCS.read_text().partition("## Last lines")[2].partition("\n## ")[0]
    found = {}
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        value = json.loads(block)
        found[value["bench"]] = value
    return found


def differences(value, wanted, where=""):
    """Where the keys of an object differ from the documented ones. NAME stands for any key."""
    if not isinstance(wanted, dict) or value is None:
        return []
    if list(wanted) == ["NAME"]:
        return [
            text
            for key in value
            for text in differences(value[key], wanted["NAME"], f"{where}.{key}")
        ]
    found = [f"{where}.{key}" for key in value.keys() ^ wanted.keys()]
    for key in value.keys() & wanted.keys():
        found += differences(value[key], wanted[key], f"{where}.{key}")
    return found


class Lines(unittest.TestCase):
    def test_every_bench_is_documented(self):
        self.assertEqual(sorted([*benches.NAMES, "lab"]), sorted(documented()))

    def test_each_line_has_the_documented_keys(self):
        for name, wanted in documented().items():
            if name == "lab":
                continue
            with self.subTest(bench=name):
                chosen = options(name)
                runs = {p.experiment: synthetic(p, chosen) for p in benches.load(name).PARTS}
                line = program.last_line(name, runs, {}, Path("build/lab/a-run"))
                line = json.loads(json.dumps(line))
                self.assertEqual(list(line)[-2:], ["raw", "conditions"])
                self.assertEqual(list(line["conditions"]), CONDITION_KEYS)
                del line["raw"], line["conditions"]
                self.assertEqual(differences(line, wanted), [])

    def test_no_figure_is_missing_where_everything_was_measured(self):
        for name in benches.NAMES:
            with self.subTest(bench=name):
                chosen = options(name)
                runs = {p.experiment: synthetic(p, chosen) for p in benches.load(name).PARTS}
                line = benches.load(name).line(runs)
                missing = [key for key, value in line.items() if value is None]
                self.assertEqual(missing, [])

    def test_a_line_of_one_part_leaves_the_others_out(self):
        for name in benches.NAMES:
            parts = benches.load(name).PARTS
            for part in parts if len(parts) > 1 else ():
                with self.subTest(bench=name, only=part.experiment):
                    runs = {part.experiment: synthetic(part, options(name))}
                    self.assertTrue(benches.load(name).line(runs))

    def test_the_experiments_of_benches_load_in_their_short_forms(self):
        for name in benches.NAMES:
            for part in benches.load(name).PARTS:
                self.assertTrue(program.experiment_of(part, options(name, quick=True)).cells())


class Program(unittest.TestCase):
    def test_repeats_replace_those_of_the_file(self):
        part = benches.load("switch").PARTS[0]
        experiment = program.experiment_of(part, options("switch", repeats=2, set=["seconds=1"]))
        self.assertEqual((experiment.repeat.times, experiment.fixed["seconds"]), (2, 1.0))

    def test_a_setting_that_no_experiment_knows_is_an_error(self):
        chosen = options("switch", set=["sise=64"])
        with self.assertRaisesRegex(LabError, "expected one of forwarder, size"):
            program.check_settings(benches.load("switch"), chosen)

    def test_what_was_not_measured_is_named(self):
        run = synthetic(benches.load("switch").PARTS[0], options("switch"))
        run.points[0] = {"block": 0, "cell": run.points[0]["cell"], "failed": "it broke"}
        self.assertEqual(
            program.failures({"switch": run}),
            ["switch, forwarder tombolo, size 64: it broke"],
        )

    def test_conditions_weigh_points_by_their_time(self):
        run = synthetic(benches.load("switch").PARTS[0], options("switch"))
        found = program.conditions({"switch": run})
        self.assertEqual((found["others_cpus"], found["commit"]), (0.1, "abc"))
        self.assertEqual(found["took_s"], len(run.points))


class Figures(unittest.TestCase):
    def test_medians_and_pairs_are_of_the_cells_that_are_asked_for(self):
        run = synthetic(benches.load("switch").PARTS[0], options("switch"))
        for point in run.points:
            point["measures"]["mpps"] = 6.0 if point["cell"]["forwarder"] == "tombolo" else 2.0
        figures = benches.Figures(run)
        self.assertEqual(figures.median("mpps", forwarder="tombolo", size=64), 6.0)
        ours, base = ({"forwarder": name, "size": 64} for name in ("tombolo", "ovs_dpdk"))
        self.assertEqual(figures.paired("mpps", ours, base), [3.0, 3.0, 3.0])
        self.assertIsNone(figures.median("mpps", size=99))
        self.assertEqual((benches.ratio(None, 2), benches.ratio(1, 3)), (None, 0.333))


class Span(unittest.TestCase):
    def line(self, name, change):
        """The line of one part, with measures changed by `change(cell, measures)`."""
        part = next(p for p in benches.load("span").PARTS if p.experiment == name)
        run = synthetic(part, options("span"))
        for point in run.points:
            change(point["cell"], point["measures"])
        return benches.load("span").line({name: run})

    def test_the_tunnel_is_compared_by_rate_and_by_cpu_time(self):
        values = {"tombolo": (900.0, 4.0), "kernel": (1000.0, 3.0), "kernel-again": (1100.0, 6.0)}
        values["least"] = (1500.0, 1.5)

        def change(cell, measures):
            measures["tcp_mbit_s"], measures["small_cpu_us"] = values[cell["port"]]

        line = self.line("tunnel", change)
        ratios, noise, least = line["ratios"], line["noise"], line["least"]
        self.assertEqual((ratios["tcp_vs_kernel"], ratios["small_vs_kernel"]), (0.9, 0.75))
        self.assertEqual((noise["tcp_vs_kernel"], noise["small_vs_kernel"]), (1.1, 0.5))
        self.assertEqual((least["tcp_vs_kernel"], "small_vs_kernel" in least), (1.5, False))

    def test_lost_answers_are_those_of_all_calls(self):
        lost = {"tcp": None, "plain": 1, "tls": 2, "zenoh": 4, "local": 0}
        line = self.line("machines", lambda cell, m: m.update(lost_answers=lost[cell["row"]]))
        self.assertEqual(line["lost_answers"], 3 * 7)

    def test_each_way_of_calls_is_compared_with_a_tcp_connection(self):
        times = {"tcp": 50.0, "plain": 100.0, "tls": 150.0, "zenoh": 400.0, "local": 25.0}
        line = self.line("machines", lambda cell, m: m.update(p50_us=times[cell["row"]]))
        ratios = {key: line["ratios"][key] for key in ("call_vs_tcp", "call_zenoh_vs_tcp")}
        self.assertEqual(ratios, {"call_vs_tcp": 3.0, "call_zenoh_vs_tcp": 8.0})
        self.assertEqual((line["call_us"], line["call_zenoh_us"]), (150.0, 400.0))

    def test_the_longest_time_to_agree_counts_and_a_change_is_told_to_each_machine(self):
        def change(cell, measures):
            self.assertEqual(cell["loss"], 0.0)
            measures |= {"join_ms": 255.0, "move_max_ms": 2.0, "heal_ms": 2960.0, "dead_s": 14.2}
            measures |= {"bytes_per_change": 4198.0, "messages_per_change": 99.0}

        line = self.line("converge", change)
        self.assertEqual((line["converge_ms_100"], line["bytes_per_change"]), (2960.0, 42.4))


class Bypass(unittest.TestCase):
    def matrix(self, rate_of, blocks=6):
        """The line of one load between two taps, with a rate by path and block."""
        part = benches.load("bypass").PARTS[0]
        chosen = options("bypass", set=["ends=tap-tap", "load=udp64_1"])
        run = synthetic(part, chosen, blocks)
        for point in run.points:
            rate = rate_of(point["cell"]["path"], point["block"])
            point["measures"] |= {"frames_s": rate, "cpu_ns": 1e9 / rate}
        return benches.load("bypass").line({part.experiment: run}), run

    def test_what_is_faster_beyond_the_noise_is_called_so(self):
        rates = {"bypass": 3e6, "bypass_nat": 1e6, "nat": 2e6, "nat_again": 2e6}
        line, _ = self.matrix(lambda path, block: rates.get(path, 1e6) * (1 + 0.01 * (block % 3)))
        cells = line["table"]
        self.assertEqual(cells["tap-tap udp64_1"]["ratio"], 3.0)
        self.assertEqual(cells["tap-tap udp64_1"]["by_cpu"]["ratio"], 3.0)
        self.assertEqual(cells["tap-tap udp64_1"]["verdict"], "faster")
        self.assertEqual(line["slower"], ["tap-tap udp64_1 nat"])
        self.assertEqual((line["worst_cell_name"], line["ratios"]["worst_cell"]),
                         ("tap-tap udp64_1 nat", 0.5))  # fmt: skip

    def test_what_lies_within_the_noise_of_equals_is_equal(self):
        noise = (0.7, 1.0, 1.4)

        def rate(path, block):
            return 1e6 * (noise[block % 3] if path.endswith("again") else 1.1)

        line, _ = self.matrix(rate)
        self.assertEqual(line["verdicts"], {"faster": 0, "equal": 2, "slower": 0})

    def test_one_repetition_has_no_verdict(self):
        line, _ = self.matrix(lambda path, block: 5e6 if path == "bypass" else 1e6, blocks=1)
        cell = line["table"]["tap-tap udp64_1"]
        self.assertEqual((cell["ratio"], cell["low"], cell["verdict"]), (5.0, None, "equal"))

    def test_a_path_that_always_failed_is_named_with_its_reason(self):
        _, run = self.matrix(lambda path, block: 1e6)
        for number, point in enumerate(run.points):
            if point["cell"]["path"] == "nat":
                run.points[number] = {**point, "failed": "the load ended"}
        line = benches.load("bypass").line({"bypass-matrix": run})
        self.assertEqual(line["not_measured"], {"tap-tap udp64_1 nat": "the load ended"})
        self.assertEqual(line["cells"], 1)


if __name__ == "__main__":
    unittest.main()
