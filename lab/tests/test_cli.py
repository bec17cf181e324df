"""The command line: what it prints, where, and with which exit code.

The runner and the reports are replaced by recorders here; they have tests of their own.
"""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
import types
import unittest
from pathlib import Path
from unittest import mock

LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(LAB)]
import fake_workload

import tombolo_lab
from tombolo_lab import LabError, cli, harness, model
from tombolo_lab.cli import Exit
from tombolo_lab.results import Run
from tombolo_lab.workloads import REGISTRY

MINE = """\
# A comment that a copy keeps.
title = "What a link carries"
about = "One paragraph."
workload = "fake"
[factors]
attachment = ["ivshmem", "vhost-user", "user"]
protocol = ["tcp", "udp"]
[fixed]
seconds = 59
[[exclude]]
attachment = "vhost-user"
protocol = "udp"
[repeat]
times = 12
until = 0.05
at_most = 120
[quick.fixed]
seconds = 1
[quick.repeat]
times = 1
"""


def points(*states):
    """Points of blocks 0, 1 …, each "good", "disturbed" or "failed"."""
    made = []
    for block, state in enumerate(states):
        point = {"block": block, "cell": {"protocol": "tcp"}, "attempt": 1}
        if state == "failed":
            made.append({**point, "failed": "no reply"})
        else:
            reason = "0.9 CPUs of other work" if state == "disturbed" else None
            made.append({**point, "measures": {"mbit_s": 1.0}, "disturbed": reason})
    return made


def result(*states, skipped=0):
    """What the runner gives."""
    entries = [{"cell": {}, "reason": "no root"}] * skipped
    return Run(Path("r"), None, {}, points(*states), entries)


class CommandCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        before = Path.cwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, before)
        self.patch(mock.patch.dict(REGISTRY, {"fake": fake_workload.TARGET}))
        experiments = self.folder / "experiments"
        experiments.mkdir()
        (experiments / "capacity.toml").write_text(MINE)
        self.patch(mock.patch.object(model, "EXPERIMENTS", experiments))

    def patch(self, patcher):
        patcher.start()
        self.addCleanup(patcher.stop)

    def module(self, name, **attributes):
        """Puts a module made of `attributes` in the place of tombolo_lab.NAME."""
        made = types.ModuleType(f"tombolo_lab.{name}")
        vars(made).update(attributes)
        self.patch(mock.patch.dict(sys.modules, {f"tombolo_lab.{name}": made}))
        self.patch(mock.patch.object(tombolo_lab, name, made, create=True))

    def command(self, *words):
        """Runs a command: its exit code, standard output and standard error."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main([str(word) for word in words])
            except SystemExit as stopped:
                code = stopped.code
        return code, out.getvalue(), err.getvalue()

    def usage_error(self, *words):
        code, out, err = self.command(*words)
        self.assertEqual((code, out), (Exit.USAGE, ""))
        self.assertNotIn("Traceback", err)
        return err


class Listing(CommandCase):
    def test_ls(self):
        code, out, err = self.command("ls")
        self.assertEqual((code, err), (Exit.GOOD, ""))
        head, row = out.splitlines()
        self.assertEqual(head.split(), ["NAME", "CELLS", "REPEATS", "TIME", "QUICK", "TITLE"])
        # 5 cells of 60 s, 12 to 120 times; quick: 5 cells of 2 s.
        self.assertRegex(row, r"^capacity +5 +12-120 +60 min to 10 h +10 s +What a link carries$")
        self.assertEqual(head.index("TITLE"), row.index("What"))

    def test_ls_json(self):
        code, out, _ = self.command("ls", "--json")
        self.assertEqual(code, Exit.GOOD)
        self.assertEqual(
            json.loads(out),
            [
                {
                    "name": "capacity",
                    "title": "What a link carries",
                    "workload": "fake",
                    "cells": 5,
                    "repetitions": 12,
                    "repetitions_at_most": 120,
                    "expected_s": [3600.0, 36000.0],
                    "quick_expected_s": [10.0, 10.0],
                }
            ],
        )

    def test_ls_goes_on_after_an_invalid_file(self):
        (self.folder / "experiments/broken.toml").write_text(MINE.replace("tcp", "tpc"))
        code, out, err = self.command("ls")
        self.assertEqual(code, Exit.USAGE)
        self.assertIn("capacity", out)
        self.assertRegex(err, r"broken.toml:7: factors.protocol\[0\]: .*did you mean tcp\?")

    def test_durations(self):
        texts = {
            0: "0 s",
            0.2: "1 s",
            99: "99 s",
            100: "2 min",
            5969: "99 min",
            5990: "1 h 40 min",
            7200: "2 h",
            90061: "25 h 1 min",
        }
        for seconds, text in texts.items():
            self.assertEqual(cli.duration(seconds), text, seconds)
        self.assertEqual(cli.span((60.2, 60.4)), "60 s")
        self.assertEqual(cli.span((60, 600)), "60 s to 10 min")


class Showing(CommandCase):
    def test_show_is_a_valid_file_behind_comments(self):
        code, out, err = self.command("show", "capacity", "--set", "protocol=tcp", "--seed", "3")
        self.assertEqual((code, err), (Exit.GOOD, ""))
        data = tomllib.loads(out)
        self.assertEqual(data["factors"]["protocol"], ["tcp"])
        self.assertEqual((data["seed"], data["name"]), (3, "capacity"))
        path = self.folder / "again.toml"
        path.write_text(out)
        self.assertEqual(model.load(str(path)).resolved() + "", out[out.index("name =") :])

    def test_what_show_says(self):
        _, out, _ = self.command("show", "capacity")
        comments = [line[2:] for line in out.splitlines() if line.startswith("# ")]
        text = "\n".join(comments)
        self.assertIn("capacity: What a link carries", comments)
        self.assertIn("5 cells; 6 combinations, 1 excluded.", comments)
        self.assertIn("12 repetitions, up to 120 until the 95 % interval of mbit_s is", text)
        # Two of the five cells are skipped, so three of 60 s and, when quick, of 2 s remain.
        self.assertIn("Expected time here: 36 min to 6 h (quick: 6 s).", comments)
        self.assertIn("Workload fake: Sends imagined frames.", comments)
        self.assertIn("Needs: imagination.", comments)
        self.assertIn("Skipped here: 2 of 5 cells.", comments)
        self.assertIn("  2 cells: qemu-system-x86_64 is missing (attachment=user)", comments)
        self.assertIn(
            "  offered: Offered rate; a whole number from 1 to 10000 (Mbit/s); default 100",
            comments,
        )
        self.assertIn("  mbit_s (Mbit/s): Bandwidth at the sink; higher is better", comments)
        self.assertLessEqual(max(map(len, out.splitlines())), 100)

    def test_where_no_cell_can_run_the_time_is_that_of_elsewhere(self):
        out = self.command("show", "capacity", "--set", "attachment=user")[1]
        self.assertIn("# No cell can run here. Expected time elsewhere: ", out)
        self.assertNotIn("0 s", out)

    def test_what_is_shown_steers_no_terminal(self):
        code, out, _ = self.command(
            "run", "capacity", "--dry-run", "--set", "comment=\x1b[31mred\u202e"
        )
        self.assertEqual(code, Exit.GOOD)
        self.assertNotIn("\x1b", out)
        code, out, _ = self.command(
            "run", "capacity", "--dry-run", "--set", "comment=\x1b[31mred,\u202e"
        )
        self.assertIn("comment=\\x1b[31mred", out)
        self.assertIn("comment=\\u202e", out)

    def test_nothing_skipped(self):
        _, out, _ = self.command("show", "capacity", "--set", "attachment=ivshmem")
        self.assertIn("# Nothing is skipped here.\n", out)

    def test_the_skip_of_the_repositorys_harness_is_a_skip_too(self):
        class OtherSkip(Exception):
            pass

        check = mock.Mock(side_effect=OtherSkip("no guest image"))
        self.patch(mock.patch.object(fake_workload.Fake, "check", check))
        self.patch(mock.patch.object(harness, "skips", lambda: (OtherSkip,)))
        _, out, _ = self.command("show", "capacity")
        self.assertIn("# Skipped here: 5 of 5 cells.\n#   5 cells: no guest image\n", out)

    def test_show_json(self):
        code, out, _ = self.command("show", "capacity", "--json", "--quick")
        self.assertEqual(code, Exit.GOOD)
        value = json.loads(out)
        self.assertEqual(value["cells"], 5)
        self.assertEqual(value["combinations"], 6)
        self.assertEqual(value["repeat"]["times"], 1)
        self.assertEqual(value["expected_s"], [6.0, 6.0])
        self.assertEqual(value["needs"], ["imagination"])
        self.assertEqual(
            value["skipped"],
            [
                {
                    "reason": "qemu-system-x86_64 is missing",
                    "cells": [
                        {"attachment": "user", "protocol": "tcp"},
                        {"attachment": "user", "protocol": "udp"},
                    ],
                }
            ],
        )
        self.assertEqual(tomllib.loads(value["resolved"])["fixed"], {"seconds": 1.0})

    def test_a_fractional_design_shows_its_relation(self):
        Path("f.toml").write_text(
            'title = "T"\nabout = "A"\nworkload = "fake"\n[factors]\nprotocol = ["tcp", "udp"]\n'
            "offload = [false, true]\noffered = [1, 2]\n"
            '[design]\nkind = "fractional"\ngenerators = ["C=AB"]\n'
        )
        _, out, _ = self.command("show", "f.toml")
        self.assertIn(
            "# 4 cells of 8 combinations: 2^(3-1), resolution III; I = ABC with "
            "A protocol, B offload, C "
            "offered.\n",
            out,
        )
        _, out, _ = self.command("show", "f.toml", "--json")
        shown = json.loads(out)["design"]
        self.assertEqual((shown["resolution"], shown["relation"]), (3, "I = ABC"))

    def test_wrong_names_and_values(self):
        self.assertIn("did you mean capacity?", self.usage_error("show", "capcity"))
        err = self.usage_error("show", "capacity", "--set", "protocol=upd")
        self.assertIn("--set protocol=upd: protocol: expected one of tcp, udp", err)
        self.assertIn("invalid whole number value", self.usage_error("show", "x", "--seed", "a"))
        self.assertIn("invalid whole number value", self.usage_error("show", "x", "--seed", "-1"))
        self.assertIn("invalid choice", self.usage_error("shwo", "capacity"))
        self.assertIn("COMMAND", self.usage_error())


class Copying(CommandCase):
    def test_a_copy_is_the_file_itself_and_can_be_run(self):
        code, out, _ = self.command("copy", "capacity", "mine.toml")
        self.assertEqual(code, Exit.GOOD)
        self.assertIn("tombolo lab run ./mine.toml", out)
        self.assertEqual(Path("mine.toml").read_text(), MINE)
        self.assertEqual(self.command("run", "./mine.toml", "--dry-run")[0], Exit.GOOD)

    def test_a_copy_into_a_folder_keeps_the_name(self):
        Path("there").mkdir()
        self.assertEqual(self.command("copy", "capacity", "there")[0], Exit.GOOD)
        self.assertEqual(Path("there/capacity.toml").read_text(), MINE)

    def test_a_copy_replaces_nothing(self):
        Path("mine.toml").write_text("precious")
        self.assertIn("exists already", self.usage_error("copy", "capacity", "mine.toml"))
        self.assertEqual(Path("mine.toml").read_text(), "precious")
        self.assertIn("ends in .toml", self.usage_error("copy", "capacity", "mine.txt"))
        err = self.usage_error("copy", "capacity", "none/mine.toml")
        self.assertIn("No such file or directory", err)
        self.assertIn("did you mean capacity?", self.usage_error("copy", "capacit", "a.toml"))


    def test_a_copy_onto_a_full_disk_leaves_nothing(self):
        with full_disk():
            err = self.usage_error("copy", "capacity", "mine.toml")
        self.assertIn("mine.toml: File too large", err)
        self.assertFalse(Path("mine.toml").exists())


@contextlib.contextmanager
def full_disk():
    """Within the `with` no file can hold a byte, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Running(CommandCase):
    def setUp(self):
        super().setUp()
        self.runs = []
        self.result = result("good", "good")
        self.module("runner", run=self.record)
        self.module("report", write=lambda run, folder: folder / "report.html")

    def record(self, experiment, folder, resume, out):
        self.assertIs(out, sys.stderr)
        self.runs.append((experiment, folder, resume))
        return self.result

    def test_run(self):
        code, out, err = self.command(
            "run", "capacity", "--quick", "--set", "protocol=udp", "--seed", 9, "--into", "r"
        )
        self.assertEqual((code, err), (Exit.GOOD, ""))
        self.assertEqual(out, "2 points, 0 disturbed, 0 failed, 0 cells skipped: r/report.html\n")
        experiment, folder, resume = self.runs[0]
        self.assertEqual((experiment.seed, experiment.repeat.times), (9, 1))
        self.assertEqual(experiment.factors["protocol"], ("udp",))
        self.assertEqual((folder, resume), (Path("r"), False))

    def test_the_folder_is_new_and_named_for_date_and_experiment(self):
        self.command("run", "capacity")
        folder = self.runs[0][1]
        self.assertRegex(str(folder), r"^build/lab/\d{8}-\d{6}-capacity$")
        with mock.patch("time.strftime", lambda _: "20261125-100000"):
            Path("build/lab/20261125-100000-capacity").mkdir(parents=True)
            Path("build/lab/20261125-100000-capacity-2").mkdir()
            self.command("run", "capacity")
        self.assertEqual(str(self.runs[1][1]), "build/lab/20261125-100000-capacity-3")

    def test_counts_and_exit_codes(self):
        for states, code, text in (
            (["good", "disturbed"], Exit.GOOD, "1 point, 1 disturbed, 0 failed, 1 cell skipped:"),
            (["good", "failed"], Exit.FAILED, "1 point, 0 disturbed, 1 failed, 1 cell skipped:"),
        ):
            self.result = result(*states, skipped=1)
            got, out, _ = self.command("run", "capacity")
            self.assertEqual(got, code)
            self.assertTrue(out.startswith(text), out)

    def test_a_run_without_a_point_that_counts_fails(self):
        for states in ([], ["failed"], ["disturbed"]):
            self.result = result(*states)
            code, out, err = self.command("run", "capacity", "--into", "r")
            self.assertEqual(code, Exit.FAILED)
            self.assertIn("r: no point counts", err)
            self.assertNotIn("report.html", out)

    def test_json(self):
        self.result = result("good", "disturbed", "failed", "good")
        code, out, _ = self.command("run", "capacity", "--into", "r", "--json")
        self.assertEqual(code, Exit.FAILED)
        self.assertEqual(
            json.loads(out),
            {
                "folder": "r",
                "points": 2,
                "disturbed": 1,
                "failed": 1,
                "disturbed_attempts": 1,
                "skipped_cells": 0,
                "report": "r/report.html",
            },
        )

    def test_without_the_libraries_of_reports_the_points_still_count(self):
        def write(run, folder):
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas.core")

        self.module("report", write=write)
        code, out, err = self.command("run", "capacity", "--into", "r")
        self.assertEqual(code, Exit.GOOD)
        self.assertIn("apt-get install python3-pandas; then: tombolo lab report r", err)
        self.assertTrue(out.endswith("0 cells skipped: r\n"), out)

    def test_a_report_that_fails_loses_no_points(self):
        for error, text in (
            (ValueError("negative dimension"), "the report failed: ValueError: negative dimension"),
            (OSError(28, "No space left", "r/report.html"), "r/report.html: No space left"),
        ):
            self.module("report", write=mock.Mock(side_effect=error))
            code, out, err = self.command("run", "capacity", "--into", "r")
            self.assertEqual(code, Exit.FAILED)
            self.assertTrue(out.startswith("2 points"), out)
            self.assertIn(text, err)
            self.assertIn("kept in r; make the report again: tombolo lab report r", err)

    def test_two_runs_of_one_second_have_two_folders(self):
        with mock.patch("time.strftime", lambda _: "20261125-100000"):
            for _ in range(2):
                self.command("run", "capacity")
        folders = [str(folder) for _, folder, _ in self.runs]
        self.assertEqual(folders[1], folders[0] + "-2")

    def test_a_dry_run_and_a_run_that_does_not_begin_leave_no_folder(self):
        self.assertEqual(self.command("run", "capacity", "--dry-run")[0], Exit.GOOD)
        self.module("runner", run=mock.Mock(side_effect=LabError("no root")))
        self.assertEqual(self.command("run", "capacity")[0], Exit.FAILED)
        self.assertEqual(list(Path("build/lab").glob("*")), [])

    def test_an_import_error_of_ours_is_not_hidden(self):
        def write(run, folder):
            raise ModuleNotFoundError(
                "No module named 'tombolo_lab.nothing'", name="tombolo_lab.nothing"
            )

        self.module("report", write=write)
        with self.assertRaises(ModuleNotFoundError):
            self.command("run", "capacity")

    def test_a_folder_that_holds_a_run_is_not_used_again(self):
        Path("r").mkdir()
        self.assertEqual(self.command("run", "capacity", "--into", "r")[0], Exit.GOOD)
        Path("r/points.jsonl").write_text("")
        err = self.usage_error("run", "capacity", "--into", "r")
        self.assertIn("holds a run already; go on with --resume r", err)

    def test_resume(self):
        Path("r").mkdir()
        experiment = model.load("capacity", ["protocol=udp"], quick=True)
        Path("r/experiment.toml").write_text(experiment.resolved())
        for words in (["--resume", "r"], ["capacity", "--resume", "r"]):
            self.assertEqual(self.command("run", *words)[0], Exit.GOOD)
            resumed, folder, resume = self.runs[-1]
            self.assertEqual((folder, resume), (Path("r"), True))
            self.assertEqual(resumed.resolved(), experiment.resolved())
        for option in (
            ["--quick"],
            ["--set", "seconds=1"],
            ["--seed", "0"],
            ["--into", "x"],
            ["--dry-run"],
        ):
            err = self.usage_error("run", "--resume", "r", *option)
            self.assertIn(f"--resume: not together with {option[0]}", err)
        err = self.usage_error("run", "stress", "--resume", "r")
        self.assertIn("expected a run of stress, found one of capacity", err)
        self.assertIn("not the folder of a run", self.usage_error("run", "--resume", "none"))
        self.assertIn("name an experiment", self.usage_error("run"))
        self.assertEqual(len(self.runs), 2)

    def test_dry_run(self):
        code, out, _ = self.command("run", "capacity", "--dry-run", "--into", "r")
        self.assertEqual((code, self.runs), (Exit.GOOD, []))
        self.assertFalse(Path("r").exists())
        lines = out.splitlines()
        self.assertIn("results go to r", lines)
        self.assertIn(
            "at least 36 points: 3 cells, 2 set-ups in each repetition; 36 min to 6 h", lines
        )
        first = lines[lines.index("first repetition:") + 1 :]
        self.assertEqual(
            sorted(first),
            [
                "  attachment=ivshmem protocol=tcp",
                "  attachment=ivshmem protocol=udp",
                "  attachment=vhost-user protocol=tcp",
            ],
        )
        code, out, _ = self.command("run", "capacity", "--dry-run", "--into", "r", "--json")
        value = json.loads(out)
        self.assertEqual((value["points"], value["set_ups_per_block"]), (36, 2))
        _, out, _ = self.command(
            "run", "capacity", "--dry-run", "--json", "--set", "attachment=ivshmem"
        )
        self.assertEqual(json.loads(out)["set_ups_per_block"], 1)
        self.assertEqual(
            [cli.cell_text(cell) for cell in value["first_block"]], [line.strip() for line in first]
        )

    def test_an_interrupt_and_an_error_of_the_runner(self):
        for error, code in ((KeyboardInterrupt(), 130), (LabError("disk is full"), 1)):
            self.module("runner", run=mock.Mock(side_effect=error))
            got, out, err = self.command("run", "capacity")
            self.assertEqual((got, out), (code, ""))
        self.assertEqual(err, "tombolo lab: disk is full\n")


class Reporting(CommandCase):
    def setUp(self):
        super().setUp()

        def load(folder):
            if not folder.is_dir():
                raise LabError(f"{folder}: not the folder of a run")
            return f"run of {folder}"

        self.module("results", Run=types.SimpleNamespace(load=load))
        self.calls = []
        self.module("report", write=self.write, compare=self.compare)
        for name in "ab":
            Path(name).mkdir()

    def write(self, run, folder):
        self.calls.append((run, folder))
        return folder / "report.html"

    def compare(self, a, b, folder):
        self.calls.append((a, b, folder))
        return {"ratios": [1.5]}, folder / "compare.html"

    def test_report(self):
        self.assertEqual(self.command("report", "a"), (Exit.GOOD, "a/report.html\n", ""))
        self.assertEqual(self.calls, [("run of a", Path("a"))])
        self.assertIn("none: not the folder of a run", self.usage_error("report", "none"))

    def test_compare(self):
        code, out, _ = self.command("compare", "a", "b", "--into", "c")
        self.assertEqual((code, out), (Exit.GOOD, "c/compare.html\n"))
        self.assertEqual(self.calls, [("run of a", "run of b", Path("c"))])
        code, out, _ = self.command("compare", "a", "b", "--json")
        self.assertEqual((code, json.loads(out)), (Exit.GOOD, {"ratios": [1.5]}))
        self.assertRegex(str(self.calls[1][2]), r"^build/lab/\d{8}-\d{6}-compare$")
        self.assertIn("none: not the folder", self.usage_error("compare", "a", "none"))

    def test_a_report_that_cannot_be_written_says_which_file_and_why(self):
        error = OSError(30, "Read-only file system", "a/.summary.json.new")
        self.module(
            "report", write=mock.Mock(side_effect=error), compare=mock.Mock(side_effect=error)
        )
        code, out, err = self.command("report", "a")
        self.assertEqual((code, out), (Exit.FAILED, ""))
        self.assertIn("tombolo lab: a/.summary.json.new: Read-only file system\n", err)
        self.assertIn("tombolo lab report a", err)
        code, out, err = self.command("compare", "a", "b", "--into", "c")
        self.assertEqual((code, out), (Exit.FAILED, ""))
        self.assertEqual(err, "tombolo lab: a/.summary.json.new: Read-only file system\n")

    def test_runs_that_cannot_be_compared_fail(self):
        self.module("report", compare=mock.Mock(side_effect=LabError("no cell in common")))
        code, out, err = self.command("compare", "a", "b")
        self.assertEqual((code, out), (Exit.FAILED, ""))
        self.assertEqual(err, "tombolo lab: no cell in common\n")

    def test_missing_libraries(self):
        error = ModuleNotFoundError("No module named 'scipy'", name="scipy")
        self.module(
            "report", write=mock.Mock(side_effect=error), compare=mock.Mock(side_effect=error)
        )
        for words in (("report", "a"), ("compare", "a", "b")):
            code, _, err = self.command(*words)
            self.assertEqual(code, Exit.FAILED)
            self.assertIn("apt-get install python3-scipy", err)


class Processes(CommandCase):
    """What only a process of its own shows."""

    def start(self, code, **options):
        lines = f"import sys; sys.path[:0] = [{str(LAB)!r}]\n{code}"
        return subprocess.Popen(
            [sys.executable, "-c", lines], stderr=subprocess.PIPE, text=True, **options
        )

    def test_a_closed_pipe_is_silent(self):
        read, write = os.pipe()
        os.close(read)
        code = "from tombolo_lab import cli\n"
        code += "def ls(args): print('x' * 100_000)\ncli.ls = ls\nsys.exit(cli.main(['ls']))"
        process = self.start(code, stdout=write)
        os.close(write)
        self.assertEqual((process.communicate(timeout=60)[1], process.returncode), ("", 0))

    def test_the_libraries_of_reports_are_not_loaded(self):
        code = "from tombolo_lab import cli\ncli.main(['ls', '--json'])\n"
        code += f"print([n for n in {sorted(cli.LIBRARIES)} if n in sys.modules], file=sys.stderr)"
        process = self.start(code, stdout=subprocess.DEVNULL)
        self.assertEqual(process.communicate(timeout=60)[1].splitlines()[-1], "[]")

    def test_version(self):
        self.assertEqual(
            self.command("--version"), (0, f"tombolo lab {tombolo_lab.__version__}\n", "")
        )

    def test_help_names_every_command_and_exit_code(self):
        code, out, _ = self.command("--help")
        self.assertEqual(code, 0)
        for word in ("ls", "show", "run", "report", "compare", "copy", "exit codes", "130"):
            self.assertIn(word, out)
        self.assertTrue(out.startswith("usage: tombolo lab "))
        for name in ("ls", "show", "run", "report", "compare", "copy"):
            code, out, _ = self.command(name, "--help")
            self.assertEqual(code, 0)
            self.assertTrue(out.startswith(f"usage: tombolo lab {name}"))


if __name__ == "__main__":
    unittest.main()
