"""The folder of a run: what is written is read again, a torn line is cut off, a lock keeps others
away."""

import dataclasses
import importlib.util
import json
import os
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(LAB)]
import small_workload

from tombolo_lab import LabError, model, results
from tombolo_lab.results import Run, Store, StoreError
from tombolo_lab.workloads import REGISTRY


def point(block, kind="red", size=1, value=1.0, **changed):
    return {
        "block": block,
        "cell": {"kind": kind, "size": size},
        "attempt": 1,
        "measures": {"value": value, "share": None},
        "disturbed": None,
        "started": "2026-11-25T10:00:00Z",
        "took_s": 0.5,
        **changed,
    }


def failed(block, kind="red", size=1):
    cell = {"kind": kind, "size": size}
    return {"block": block, "cell": cell, "attempt": 1, "failed": "it broke"}


class InFolder(unittest.TestCase):
    """A folder for a run of the small experiment."""

    def setUp(self):
        self.enterContext(mock.patch.dict(REGISTRY, {"small": small_workload.TARGET}))
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory())) / "a" / "run"
        path = self.folder.parent.parent / "small.toml"
        path.write_text(small_workload.EXPERIMENT)
        self.experiment = model.load(str(path))

    def store(self, points=()):
        with Store(self.folder, self.experiment) as store:
            store.create({"cpus": 2, "tools": {}}, [{"cell": {"kind": "red"}, "reason": "no"}])
            for each in points:
                store.append(each)


class Folder(InFolder):
    def test_what_is_written_is_read_again(self):
        points = [point(0), point(0, "green", value=7e-9), failed(1)]
        self.store(points)
        run = Run.load(self.folder)
        self.assertEqual(run.points, points)
        self.assertEqual(run.skipped, [{"cell": {"kind": "red"}, "reason": "no"}])
        self.assertEqual(run.conditions["cpus"], 2)
        same = dataclasses.replace(self.experiment, path=run.experiment.path)
        self.assertEqual(run.experiment, same)

    def test_no_file_of_the_writer_stays(self):
        self.store([point(0)])
        names = {path.name for path in self.folder.iterdir()}
        self.assertEqual(
            names, {"experiment.toml", "conditions.json", "points.jsonl", "skipped.json"}
        )

    def test_a_file_that_a_killed_writer_left_is_removed(self):
        self.store([point(0)])
        (self.folder / ".conditions.json.new").write_text("{")
        with Store(self.folder, self.experiment) as store:
            store.resume()
        self.assertEqual([path.name for path in self.folder.glob(".*")], [])

    def test_a_torn_line_is_left_out_and_cut_off(self):
        whole = [point(0, size=size) for size in (1, 2, 3)]
        line = json.dumps(point(1)).encode()
        for length in (1, len(line) // 2, len(line)):
            with self.subTest(length=length):
                self.folder = self.folder.with_name(f"torn-{length}")
                self.store(whole)
                with (self.folder / "points.jsonl").open("ab") as file:
                    file.write(line[:length])
                self.assertEqual(Run.load(self.folder).points, whole)
                with Store(self.folder, self.experiment) as store:
                    store.resume()
                    self.assertEqual(store.points, whole)
                    store.append(point(1))
                self.assertEqual(Run.load(self.folder).points, [*whole, point(1)])

    def test_a_line_within_that_is_no_point_is_named(self):
        for line in ("{", "[]", "{}", '{"block": 0, "cell": {}}', '{"block": "0", "cell": {}}'):
            with self.subTest(line=line):
                self.folder = self.folder.with_name(f"bad-{abs(hash(line))}")
                self.store([point(0)])
                with (self.folder / "points.jsonl").open("a") as file:
                    file.write(line + "\n" + json.dumps(point(1)) + "\n")
                with self.assertRaisesRegex(LabError, r"points\.jsonl:2: expected a point"):
                    Run.load(self.folder)

    def test_a_line_without_its_verdict_or_of_another_cell_is_named(self):
        without = point(1)
        del without["disturbed"]
        foreign, short = point(1), point(1)
        foreign["cell"] = {**foreign["cell"], "size": 99}
        short["cell"] = {"kind": "red"}
        for line, text in (
            (without, "expected a point"), (foreign, "expected a cell"), (short, "expected a cell"),
        ):  # fmt: skip
            self.folder = self.folder.with_name(f"{text[-4:]}-{len(str(line))}")
            self.store([point(0)])
            with (self.folder / "points.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            with self.assertRaisesRegex(LabError, rf"points\.jsonl:2: {text}"):
                Run.load(self.folder)
            with Store(self.folder, self.experiment) as store:
                with self.assertRaisesRegex(LabError, rf"points\.jsonl:2: {text}"):
                    store.resume()

    def test_a_run_that_was_killed_before_its_first_point(self):
        self.store()
        (self.folder / "points.jsonl").unlink()
        with Store(self.folder, self.experiment) as store:
            store.resume()
            store.append(point(0))
        self.assertEqual(Run.load(self.folder).points, [point(0)])

    def test_a_folder_without_a_run(self):
        with self.assertRaisesRegex(LabError, "found no experiment.toml in it"):
            Run.load(self.folder)

    def test_a_folder_with_broken_conditions(self):
        self.store([point(0)])
        (self.folder / "conditions.json").write_text("[]")
        with self.assertRaisesRegex(LabError, "conditions.json: expected a JSON dict, found list"):
            Run.load(self.folder)
        (self.folder / "conditions.json").write_text("{")
        with self.assertRaisesRegex(LabError, "conditions.json: expected a file of a run"):
            Run.load(self.folder)

    def test_a_second_run_is_kept_out_while_the_first_lives(self):
        with Store(self.folder, self.experiment) as store:
            store.create({"tools": {}}, [])
            with (
                mock.patch.object(results, "LOCK_PATIENCE_S", 0.1),
                self.assertRaisesRegex(LabError, "another run writes into it"),
                Store(self.folder, self.experiment),
            ):
                self.fail("it was let in")
        with Store(self.folder, self.experiment) as store:
            store.resume()

    def test_the_lock_goes_with_a_process_that_is_killed(self):
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            with Store(self.folder, self.experiment):
                os.write(told, b"x")
                signal.pause()
        os.read(ready, 1)
        os.close(ready)
        os.close(told)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Store(self.folder, self.experiment) as store:
            store.create({"tools": {}}, [])

    def test_a_run_is_not_created_over_another(self):
        self.store([point(0)])
        with (
            Store(self.folder, self.experiment) as store,
            self.assertRaisesRegex(LabError, "holds a run already"),
        ):
            store.create({}, [])
        self.assertEqual(Run.load(self.folder).points, [point(0)])

    def test_a_full_disk_leaves_whole_lines(self):
        self.store([point(0)])
        with Store(self.folder, self.experiment) as store:
            store.resume()
            real = os.write
            half = lambda handle, data: real(handle, data[: len(data) // 2])  # noqa: E731
            with (
                mock.patch.object(results.os, "write", half),
                self.assertRaisesRegex(StoreError, "no space left"),
            ):
                store.append(point(1))
            self.assertTrue((self.folder / "points.jsonl").read_bytes().endswith(b"}\n"))
        self.assertEqual(Run.load(self.folder).points, [point(0)])

    def test_a_place_that_is_no_folder(self):
        with (
            self.assertRaisesRegex(LabError, "not a folder to write into"),
            Store(Path("/proc/version/run"), self.experiment),
        ):
            pass

    def test_values_that_json_does_not_have_are_never_written(self):
        self.store()
        with Store(self.folder, self.experiment) as store:
            store.resume()
            with self.assertRaises(ValueError):
                store.append(point(0, value=float("nan")))
        self.assertEqual(Run.load(self.folder).points, [])


class Counting(InFolder):
    def setUp(self):
        super().setUp()
        self.store(
            [
                point(0),
                point(0, size=2, disturbed="others", value=900.0),
                point(0, size=2, attempt=2, value=2.0),
                point(1, disturbed="others", value=900.0),
                point(1, attempt=2, disturbed="others", value=900.0),
                point(1, size=2, value=3.0),
                failed(2),
            ]
        )
        self.run_ = Run.load(self.folder)

    def test_only_undisturbed_points_that_did_not_fail_count(self):
        values = [each["measures"]["value"] for each in self.run_.counted()]
        self.assertEqual(values, [1.0, 2.0, 3.0])

    def test_counts_add_up_to_the_points_that_were_planned(self):
        self.assertEqual(
            self.run_.counts(),
            {
                "points": 3,
                "disturbed": 1,
                "failed": 1,
                "disturbed_attempts": 3,
                "skipped_cells": 1,
            },
        )

    @unittest.skipUnless(importlib.util.find_spec("pandas"), "pandas is not installed")
    def test_the_frame_has_a_row_for_each_point_that_counts(self):
        frame = self.run_.frame()
        self.assertEqual(list(frame.columns), ["block", "kind", "size", "value", "share"])
        self.assertEqual(frame["value"].tolist(), [1.0, 2.0, 3.0])
        self.assertEqual(frame["block"].tolist(), [0, 0, 1])
        self.assertEqual(frame["size"].tolist(), [1, 2, 2])
        self.assertTrue(frame["share"].isna().all())
        self.assertEqual(str(frame["share"].dtype), "float64")

    @unittest.skipUnless(importlib.util.find_spec("pandas"), "pandas is not installed")
    def test_a_run_without_points_has_an_empty_frame(self):
        frame = dataclasses.replace(self.run_, points=[]).frame()
        self.assertEqual(list(frame.columns), ["block", "kind", "size", "value", "share"])
        self.assertEqual(len(frame), 0)


class Keys(unittest.TestCase):
    def test_equal_cells_have_equal_keys(self):
        self.assertEqual(results.cell_key({"a": 1, "b": "x"}), results.cell_key({"b": "x", "a": 1}))
        self.assertNotEqual(results.cell_key({"a": 1}), results.cell_key({"a": "1"}))
        self.assertNotEqual(results.cell_key({"a": 1}), results.cell_key({"a": True}))


if __name__ == "__main__":
    unittest.main()
