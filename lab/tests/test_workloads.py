"""The interface of workloads: what the runner takes from `measure`, and the registry."""

import importlib
import math
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.workloads import REGISTRY, BadPoint, Measure, Workload, checked_point

MEASURES = {
    "mbit_s": Measure("Bandwidth", "Mbit/s", "higher"),
    "loss": Measure("Lost part", "", "lower", high=1),
    "shift": Measure("Signed", "µs", "", low=None),
}


def check(returned, wanted=("mbit_s", "loss")):
    return checked_point(MEASURES, wanted, returned)


class CheckedPoint(unittest.TestCase):
    def refused(self, returned, *words, **more):
        with self.assertRaises(BadPoint) as caught:
            check(returned, **more)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_numbers_and_what_does_not_apply_are_taken(self):
        values, samples, tools = check({"mbit_s": 3, "loss": None, "shift": -2.5})
        self.assertEqual(values, {"mbit_s": 3, "loss": None, "shift": -2.5})
        self.assertEqual((samples, tools), ({}, {}))

    def test_bounds_belong_to_the_range(self):
        self.assertEqual(check({"mbit_s": 0, "loss": 1})[0], {"mbit_s": 0, "loss": 1})

    def test_a_missing_measure_is_named(self):
        self.refused({"mbit_s": 1.0}, "no value for loss")

    def test_a_measure_that_the_experiment_does_not_want_may_be_missing(self):
        self.assertEqual(check({"loss": 0.5}, wanted=("loss",))[0], {"loss": 0.5})

    def test_values_that_are_no_numbers_in_the_range_are_refused(self):
        for value, words in (
            (math.nan, ("loss", "finite", "nan")),
            (math.inf, ("loss", "finite", "inf")),
            (-0.001, ("loss", "at least 0", "-0.001")),
            (1.001, ("loss", "at most 1", "1.001")),
            ("0.5", ("loss", "a number", "'0.5'")),
            (True, ("loss", "a number", "True")),
        ):
            with self.subTest(value=value):
                self.refused({"mbit_s": 1.0, "loss": value}, *words)

    def test_the_unit_is_in_the_message(self):
        self.refused({"mbit_s": -1, "loss": 0}, "Mbit/s")

    def test_a_measure_that_is_not_declared_is_refused(self):
        self.refused({"mbit_s": 1, "loss": 0, "los": 0}, "'los'", "mbit_s, loss, shift")

    def test_something_else_than_a_dict_is_refused(self):
        self.refused(None, "expected a dict, found NoneType")

    def test_samples_are_checked_like_values(self):
        good = {"mbit_s": 1, "loss": 0, "samples": {"loss": [0, 0.5, 1]}}
        self.assertEqual(check(good)[1], {"loss": [0.0, 0.5, 1.0]})
        self.refused({"mbit_s": 1, "loss": 0, "samples": {"loss": [0, 2]}}, "number 1", "at most 1")
        self.refused({"mbit_s": 1, "loss": 0, "samples": {"rtt": [1]}}, "'rtt'")
        self.refused({"mbit_s": 1, "loss": 0, "samples": [1]}, "samples", "list")

    def test_tools_become_texts(self):
        self.assertEqual(
            check({"mbit_s": 1, "loss": 0, "tools": {"iperf3": 3.12}})[2], {"iperf3": "3.12"}
        )

    def test_scalars_of_arrays_become_plain_numbers(self):
        class Scalar:
            def item(self):
                return 4.5

        value = check({"mbit_s": Scalar(), "loss": 0})[0]["mbit_s"]
        self.assertEqual((type(value), value), (float, 4.5))


class Registry(unittest.TestCase):
    def test_the_base_class_opens_nothing_and_measures_nothing(self):
        workload = Workload()
        workload.check({})
        with workload.open({}) as setup:
            self.assertIsNone(setup)
        with self.assertRaises(NotImplementedError):
            workload.measure(None, {})

    def test_every_entry_names_a_workload_that_declares_itself_well(self):
        for name, target in REGISTRY.items():
            module, _, attribute = target.partition(":")
            with self.subTest(workload=name):
                found = getattr(importlib.import_module(module), attribute)
                self.assertTrue(issubclass(found, Workload))
                self.assertEqual(found.name, name)
                self.assertTrue(found.doc and found.parameters and found.measures)
                for measure in found.measures.values():
                    self.assertIn(measure.better, ("higher", "lower", ""))
                for key, parameter in found.parameters.items():
                    self.assertIn(parameter.kind, (str, int, float, bool), key)
                    if parameter.choices is not None and parameter.default is not None:
                        self.assertIn(parameter.default, parameter.choices, key)


if __name__ == "__main__":
    unittest.main()
