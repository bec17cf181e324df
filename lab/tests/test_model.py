"""Experiment files: what is read, what is refused and where, what --set and --quick change."""

import dataclasses
import itertools
import sys
import tempfile
import tomllib
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
import fake_workload

from tombolo_lab import LabError, design, model
from tombolo_lab.model import Disturbed, ExperimentError, Plot, Published, Repeat, load
from tombolo_lab.workloads import REGISTRY

FULL = """\
title = "What a link carries"
about = "One paragraph."
workload = "fake"
seed = 7
measures = ["mbit_s", "loss"]
primary = "loss"
correlations = [["mbit_s", "loss"]]

[factors]
attachment = ["ivshmem", "vhost-user", "user"]
protocol = ["tcp", "udp"]
load = [0, 0.5]

[fixed]
seconds = 3
offload = false

[[exclude]]
attachment = ["user", "vhost-user"]
protocol = "udp"

[repeat]
times = 5
until = 0.05
at_most = 30
minutes = 60

[order]
kind = "interleaved"

[disturbed]
others_cpus = 0.5
retries = 1

[[plots]]
kind = "curve"
x = "load"
y = "mbit_s"
curves = "attachment"
panels = ["protocol"]
log = "xy"
title = "Curves"

[[plots]]
kind = "heat"
x = "load"
y = "attachment"

[[published]]
label = "XDP beside Firecracker"
source = "Author, 2021"
match = { protocol = "udp", load = 0 }
measure = "mbit_s"
value = 889
low = 800.5
differs = "Hardware NIC"

[[published]]
label = "Slirp"
source = "Author, 2020"
match = { attachment = "user" }
measure = "mbit_s"
value = 1
differs = "All of it"

[quick]
[quick.factors]
attachment = ["ivshmem", "vhost-user"]
[quick.fixed]
seconds = 0.5
[quick.repeat]
times = 2
"""

SMALL = """\
title = "T"
about = "A"
workload = "fake"
[factors]
protocol = ["tcp", "udp"]
"""

FRACTION = """\
title = "T"
about = "A"
workload = "fake"
[factors]
protocol = ["tcp", "udp"]
offload = [false, true]
load = [0.0, 1.0]
offered = [10, 100]
[design]
kind = "fractional"
generators = ["D=-ABC"]
"""


class FileCase(unittest.TestCase):
    """Tests with the fake workload and files in a folder of their own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        patched = mock.patch.dict(REGISTRY, {"fake": fake_workload.TARGET})
        patched.start()
        self.addCleanup(patched.stop)

    def file(self, text, name="mine.toml"):
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def error(self, text, settings=(), quick=False):
        path = self.file(text)
        with self.assertRaises(ExperimentError) as caught:
            load(path, settings, quick)
        return caught.exception


class Reading(FileCase):
    def test_a_file_with_every_key(self):
        experiment = load(self.file(FULL))
        self.assertEqual(experiment.name, "mine")
        self.assertEqual(experiment.title, "What a link carries")
        self.assertEqual(experiment.seed, 7)
        self.assertEqual(list(experiment.factors), ["attachment", "protocol", "load"])
        self.assertEqual(experiment.factors["load"], (0.0, 0.5))
        self.assertIsInstance(experiment.factors["load"][0], float)
        self.assertEqual(experiment.fixed, {"seconds": 3.0, "offload": False})
        self.assertEqual(
            experiment.exclude, ({"attachment": ("user", "vhost-user"), "protocol": ("udp",)},)
        )
        self.assertEqual(experiment.measures, ("mbit_s", "loss"))
        self.assertEqual(experiment.primary, "loss")
        self.assertEqual(experiment.correlations, (("mbit_s", "loss"),))
        self.assertEqual(experiment.repeat, Repeat(5, 0.05, 30, 60.0))
        self.assertEqual(experiment.order, "interleaved")
        self.assertEqual(experiment.disturbed, Disturbed(0.5, 0.1, 1))
        self.assertEqual(
            experiment.plots,
            (
                Plot("curve", "load", "mbit_s", None, "attachment", ("protocol",), "xy", "Curves"),
                Plot("heat", "load", "attachment", "loss"),
            ),
        )
        self.assertEqual(
            experiment.published[0],
            Published(
                "XDP beside Firecracker",
                "Author, 2021",
                {"protocol": "udp", "load": 0.0},
                "mbit_s",
                889.0,
                800.5,
                None,
                "Hardware NIC",
            ),
        )
        self.assertEqual(len(experiment.published), 2)

    def test_cells_are_those_that_no_rule_excludes_in_canonical_order(self):
        cells = [tuple(cell.values()) for cell in load(self.file(FULL)).cells()]
        self.assertEqual(
            cells,
            [
                ("ivshmem", "tcp", 0.0),
                ("ivshmem", "tcp", 0.5),
                ("ivshmem", "udp", 0.0),
                ("ivshmem", "udp", 0.5),
                ("vhost-user", "tcp", 0.0),
                ("vhost-user", "tcp", 0.5),
                ("user", "tcp", 0.0),
                ("user", "tcp", 0.5),
            ],
        )

    def test_defaults(self):
        experiment = load(self.file(SMALL))
        self.assertEqual(experiment.seed, 20261125)
        self.assertEqual(experiment.measures, ("mbit_s", "loss", "packets"))
        self.assertEqual(experiment.primary, "mbit_s")
        self.assertEqual(experiment.repeat, Repeat(10, None, None, None))
        self.assertEqual(experiment.disturbed, Disturbed(0.3, 0.1, 2))
        self.assertEqual((experiment.order, experiment.design), ("randomised", design.Design()))
        self.assertEqual((experiment.fixed, experiment.exclude), ({}, ()))
        self.assertEqual((experiment.plots, experiment.published), ((), ()))
        self.assertIsNone(experiment.fraction)

    def test_a_point_has_defaults_fixed_conditions_and_levels(self):
        experiment = load(self.file(FULL))
        self.assertEqual(
            experiment.point(experiment.cells()[1]),
            {
                "attachment": "ivshmem",
                "protocol": "tcp",
                "offered": 100,
                "load": 0.5,
                "offload": False,
                "comment": None,
                "seconds": 3.0,
            },
        )

    def test_the_measure_of_a_plot_is_the_primary_one_unless_named(self):
        for kind, more in (
            ("curve", 'x = "protocol"'),
            ("bars", 'x = "protocol"'),
            ("box", 'x = "protocol"'),
            ("effects", ""),
            ("percentiles", 'curves = "protocol"'),
        ):
            plot = load(self.file(f'{SMALL}[[plots]]\nkind = "{kind}"\n{more}\n')).plots[0]
            self.assertEqual((plot.kind, plot.y), (kind, "mbit_s"))
        plot = load(self.file(f'{SMALL}[[plots]]\nkind = "histogram"\n')).plots[0]
        self.assertEqual((plot.x, plot.y), ("mbit_s", None))

    def test_a_plot_of_interactions(self):
        text = (
            f'{SMALL}load = [0, 1]\noffload = [true]\n[[plots]]\nkind = "interactions"\n'
            '[[plots]]\nkind = "effects"\n[quick.factors]\nload = [0]\n'
        )
        for settings, quick, kinds in (
            ((), False, ["interactions", "effects"]),
            # What is left has no interactions to draw: the others stay.
            ((), True, ["effects"]),
            (("load=0,0.5,1",), False, ["effects"]),
            (("load=0",), False, ["effects"]),
            (("load=0,0.5",), True, ["interactions", "effects"]),
        ):
            experiment = load(self.file(text), settings, quick)
            self.assertEqual([plot.kind for plot in experiment.plots], kinds)
            again = load(self.file(experiment.resolved(), "again.toml"))
            self.assertEqual(again.plots, experiment.plots)
        self.assertEqual(load(self.file(text)).plots[0].y, "mbit_s")
        fraction = load(self.file(FRACTION + '[[plots]]\nkind = "interactions"\ny = "loss"\n'))
        self.assertEqual(fraction.plots[0].y, "loss")

    def test_a_fractional_design(self):
        experiment = load(self.file(FRACTION))
        self.assertEqual(experiment.design, design.Design("fractional", ("D=-ABC",)))
        self.assertEqual(experiment.fraction.relation, "I = -ABCD")
        self.assertEqual(len(experiment.cells()), 8)
        self.assertEqual(
            experiment.cells()[0],
            {
                "protocol": "tcp",
                "offload": False,
                "load": 0.0,
                "offered": 100,
            },
        )

    def test_blocks_keep_set_ups_together_and_are_the_same_each_time(self):
        text = FULL.replace('kind = "interleaved"', 'kind = "randomised"')
        experiment = load(self.file(text))
        self.assertEqual(experiment.setup_factors(), ("attachment",))
        blocks = list(itertools.islice(experiment.blocks(), 5))
        self.assertEqual(blocks[4], experiment.block(4))
        self.assertNotEqual(blocks[0], blocks[1])
        for block in blocks:
            attached = [cell["attachment"] for cell in block]
            self.assertEqual(len([key for key, _ in itertools.groupby(attached)]), 3)
        other = dataclasses.replace(experiment, seed=8)
        self.assertNotEqual(list(itertools.islice(other.blocks(), 5)), blocks)

    def test_expected_seconds(self):
        experiment = load(self.file(SMALL + "[repeat]\ntimes = 4\n"))
        self.assertEqual(experiment.expected_seconds(), (48.0, 48.0))  # 2 cells, 5 s + 1 s, 4 times
        self.assertEqual(experiment.expected_seconds(experiment.cells()[:1]), (24.0, 24.0))
        repeat = "[repeat]\ntimes = 4\nuntil = 0.1\nat_most = 10\n"
        self.assertEqual(load(self.file(SMALL + repeat)).expected_seconds(), (48.0, 120.0))
        limited = load(self.file(SMALL + repeat + "minutes = 1\n"))
        self.assertEqual(limited.expected_seconds(), (48.0, 72.0), "the block at the limit ends")

    def test_expected_seconds_count_each_set_up_once_in_a_repetition(self):
        experiment = load(self.file(FULL + "# 8 cells in 3 set-ups, 3 s + 1 s, 5 to 30 times\n"))
        setup = mock.patch.object(fake_workload.Fake, "setup_seconds", lambda self, cell: 10.0)
        with setup:
            self.assertEqual(experiment.expected_seconds(), (310.0, 1860.0))
            one = load(self.file(SMALL + "[repeat]\ntimes = 4\n"))
            self.assertEqual(one.expected_seconds(), (88.0, 88.0), "one set-up for both cells")
            self.assertEqual(one.expected_seconds([]), (0.0, 0.0))
            given = load(self.file(SMALL + '[repeat]\ntimes = 4\n[order]\nkind = "given"\n'))
            self.assertEqual(given.expected_seconds(), (128.0, 128.0), "each cell has its own")

    def test_set_ups_are_those_that_stand_together(self):
        text = SMALL + 'attachment = ["ivshmem", "vhost-user"]\n'
        for order, count in (("randomised", 2), ("interleaved", 4), ("given", 4)):
            experiment = load(self.file(f'{text}[order]\nkind = "{order}"\n'))
            groups = experiment.set_ups(experiment.cells())
            self.assertEqual(len(groups), count, order)
            self.assertEqual(sum(map(len, groups)), 4)
            for group in groups:
                self.assertEqual(len({cell["attachment"] for cell in group}), 1)

    def test_the_name_comes_from_the_file_unless_it_is_given(self):
        self.assertEqual(load(self.file(SMALL, "my own (2).toml")).name, "my-own-2-")
        self.assertEqual(load(self.file(SMALL, ".toml")).name, "toml")
        self.assertEqual(load(self.file('name = "n"\n' + SMALL)).name, "n")
        for name in ("../x", "a b", ".a", ""):
            self.assertEqual(self.error(f'name = "{name}"\n{SMALL}').key, "name")


class Changing(FileCase):
    def test_quick_replaces_factors_and_fixed_by_key_and_repeat_as_a_whole(self):
        experiment = load(self.file(FULL), quick=True)
        self.assertEqual(experiment.factors["attachment"], ("ivshmem", "vhost-user"))
        self.assertEqual(experiment.factors["load"], (0.0, 0.5))
        self.assertEqual(experiment.fixed, {"seconds": 0.5, "offload": False})
        self.assertEqual(experiment.repeat, Repeat(2, None, None, None))
        self.assertEqual(experiment.disturbed, Disturbed(0.5, 0.1, 1, True))
        self.assertEqual(
            experiment.exclude, ({"attachment": ("vhost-user",), "protocol": ("udp",)},)
        )
        self.assertEqual([p.label for p in experiment.published], ["XDP beside Firecracker"])

    def test_quick_without_its_table_is_the_full_experiment(self):
        path = self.file(SMALL)
        self.assertEqual(load(path, quick=True), load(path))

    def test_set_replaces_levels(self):
        experiment = load(self.file(FULL), ["protocol=udp", "load=1,0.25"])
        self.assertEqual(experiment.factors["protocol"], ("udp",))
        self.assertEqual(experiment.factors["load"], (1.0, 0.25))
        self.assertEqual(list(experiment.factors), ["attachment", "protocol", "load"])
        self.assertEqual(len(experiment.cells()), 2, "the rule excludes all but ivshmem")
        self.assertEqual(len(experiment.published), 1, "no load=0 is run")

    def test_set_of_a_removed_level_drops_its_rules_and_published_figures(self):
        experiment = load(self.file(FULL), ["attachment=ivshmem"])
        self.assertEqual(experiment.exclude, ())
        self.assertEqual([p.label for p in experiment.published], ["XDP beside Firecracker"])

    def test_set_of_what_is_no_factor(self):
        experiment = load(self.file(FULL), ["seconds=1", "offered=50", "comment=a b=c"])
        self.assertEqual(
            experiment.fixed,
            {
                "seconds": 1.0,
                "offload": False,
                "offered": 50,
                "comment": "a b=c",
            },
        )
        experiment = load(self.file(FULL), ["offload=true, False"])
        self.assertEqual(experiment.factors["offload"], (True, False))
        self.assertEqual(list(experiment.factors)[-1], "offload")
        self.assertNotIn("offload", experiment.fixed)

    def test_set_comes_after_quick(self):
        experiment = load(self.file(FULL), ["attachment=user", "seconds=2"], quick=True)
        self.assertEqual(experiment.factors["attachment"], ("user",))
        self.assertEqual(experiment.fixed["seconds"], 2.0)
        self.assertEqual(experiment.repeat.times, 2)

    def test_wrong_settings(self):
        cases = [
            ("protocol", "expected factor=level,level…", None),
            ("protocol=", "expected factor=level,level…", None),
            ("=tcp", "expected a parameter of the workload fake", None),
            ("protcol=tcp", "expected a parameter of the workload fake", "protocol"),
            ("protocol=tpc", "expected one of tcp, udp", "tcp"),
            ("offered=1.5", "expected a whole number from 1 to 10000 (Mbit/s)", None),
            ("offered=0", "expected a whole number from 1 to 10000 (Mbit/s)", None),
            ("offered=" + "9" * 5000, "expected a whole number from 1", None),
            ("load=nan", "expected a number from 0 to 1", None),
            ("load=-0.1", "expected a number from 0 to 1", None),
            ("seconds=inf", "expected a number of at least 0.1 (s)", None),
            ("offload=yes", "expected true or false", None),
            ("offered=5,5", "expected each level once, found 5 again", None),
            ("load=0,0.0", "expected each level once, found 0.0 again", None),
            ("protocol=tcp,", "expected one of tcp, udp", None),
            ("comment=default,", 'expected a text, found ""', None),
            ("offered=1_000", "expected a whole number from 1", None),
            ("offered=\u0663", "expected a whole number from 1", None),
            ("load=0_1", "expected a number from 0 to 1", None),
        ]
        for setting, message, close in cases:
            with self.subTest(setting=setting[:30]):
                error = self.error(FULL, [setting])
                self.assertIn(message, str(error))
                self.assertTrue(str(error).startswith(f"--set {setting}"))
                self.assertEqual(error.near, close)
                self.assertIsNone(error.line)
        error = self.error(FULL, ["load=0", "load=1"])
        self.assertIn("expected one --set for each name, found load again", str(error))

    def test_a_fractional_design_keeps_two_levels(self):
        path = self.file(FRACTION)
        self.assertEqual(len(load(path, ["offered=5,6"]).cells()), 8)
        self.assertEqual(len(load(path, ["seconds=1,2"]).cells()), 16, "a fifth factor, E")
        error = self.error(FRACTION, ["offered=5,6,7"])
        self.assertIn("expected two levels for each factor", str(error))
        self.assertIn("found 3", str(error))
        self.assertTrue(str(error).startswith("--set offered=5,6,7: offered:"))


class Resolved(FileCase):
    def round_trip(self, experiment):
        text = experiment.resolved()
        tomllib.loads(text)
        again = load(self.file(text, "experiment.toml"))
        self.assertEqual(dataclasses.replace(again, path=experiment.path), experiment)
        self.assertEqual(again.cells(), experiment.cells())
        self.assertEqual(again.resolved(), text)
        # Equality alone would take 1 for 1.0 and True.
        self.assertEqual(repr(again.factors), repr(experiment.factors))
        self.assertEqual(repr(again.fixed), repr(experiment.fixed))

    def test_experiments_come_back_from_their_resolved_text(self):
        for text in (FULL, SMALL, FRACTION):
            path = self.file(text)
            for quick in (False, True):
                for settings in ((), ("load=0,1",), ("offered=5,6", 'comment=ü "q" \\ \t')):
                    with self.subTest(text=text[:20], quick=quick, settings=settings):
                        self.round_trip(load(path, settings, quick))

    def test_odd_texts(self):
        text = FULL.replace('"One paragraph."', '"""\nTwo "lines"\n\\\\ and # more\\u0001"""')
        experiment = load(self.file(text))
        self.assertEqual(experiment.about, 'Two "lines"\n\\ and # more\x01')
        self.round_trip(experiment)

    def test_another_seed_is_kept(self):
        self.round_trip(dataclasses.replace(load(self.file(FULL)), seed=2**63 - 1))


class Wrong(FileCase):
    """Each case is a change of FULL, and the line, key, expected, found and near of its error."""

    def check(self, old, new, at, key, expected, found, close=None):
        """`at` is a part of the changed text; the error is on the line where it stands."""
        self.assertIn(old, FULL)
        text = FULL.replace(old, new, 1)
        with self.subTest(new=new):
            error = self.error(text)
            self.assertIn(at, text)
            line = text[: text.index(at)].count("\n") + 1
            self.assertEqual((error.key, error.line), (key, line), str(error))
            self.assertIn(expected, error.expected)
            self.assertEqual(error.found, found)
            self.assertEqual(error.near, close)

    def test_plots_that_choose_by_effects(self):
        plot = '[[plots]]\nkind = "interactions"\n'
        two = f"{SMALL}load = [0, 1]\n"
        for text, key, expected, found in (
            (SMALL + plot, "kind", "two factors or more, of two levels each", "1 of two levels"),
            (f"{SMALL}load = [0, 0.5, 1]\n{plot}", "kind", "of two levels", "3 levels of load"),
            (f'{two}[[exclude]]\nload = 1\nprotocol = "udp"\n{plot}', "kind", "no excluded cells",
             "[[exclude]]"),
            (f'{two}{plot}x = "load"\n', "x", "no x in a plot of kind interactions", '"load"'),
            (f'{two}{plot}panels = ["load"]\n', "panels", "no panels in a plot", "an array"),
            (f'{two}{plot}log = "y"\n', "log", "no log in a plot of kind interactions", '"y"'),
            (f'{two}[[plots]]\nkind = "effects"\nlog = "x"\n', "log", "no log", '"x"'),
        ):  # fmt: skip
            with self.subTest(text=text[len(SMALL) :]):
                error = self.error(text)
                self.assertEqual((error.key, error.found), (f"plots[0].{key}", found))
                self.assertIn(expected, error.expected)

    def test_the_message(self):
        error = self.error(FULL.replace('"udp"]', '"upd"]'))
        self.assertEqual(
            str(error),
            f"{self.folder}/mine.toml:11: factors.protocol[1]: expected one of tcp, udp, "
            'found "upd"; did you mean udp?',
        )
        self.assertIsInstance(error, LabError)

    def test_top_level_keys(self):
        self.check(
            "seed", "sed", "sed =", "sed", "a key of an experiment: name,", "another key", "seed"
        )
        self.check('title = "What a link carries"', "", "\n", "title", "a text", "nothing")
        self.check('"One paragraph."', "3", "about", "about", "a text", "3")
        self.check('"One paragraph."', '" "', "about", "about", "not empty", '" "')
        self.check('"fake"', '"fak"', "workload", "workload", "one of ", '"fak"', "fake")
        self.check('"fake"', "[]", "workload", "workload", "one of ", "an array")
        self.check("seed = 7", "seed = 7.0", "seed", "seed", "a whole number of at least 0", "7.0")
        self.check("seed = 7", "seed = -1", "seed", "seed", "a whole number of at least 0", "-1")
        self.check("seed = 7", "seed = true", "seed", "seed", "a whole number", "true")
        self.check(
            "seed = 7",
            f"seed = {10**400}",
            "seed",
            "seed",
            "a whole number",
            str(10**400)[:59] + "…",
        )
        self.check("seed = 7", "seed = 1979-05-27", "seed", "seed", "a whole number", "a date")

    def test_factors_and_fixed(self):
        self.check(
            'protocol = ["tcp"',
            'protocl = ["tcp"',
            "protocl =",
            "factors.protocl",
            "a parameter of the workload fake: attachment",
            "another key",
            "protocol",
        )
        self.check(
            'protocol = ["tcp", "udp"]',
            "protocol = []",
            "protocol = []",
            "factors.protocol",
            "an array of levels, each one of tcp, udp",
            "an empty array",
        )
        self.check(
            'protocol = ["tcp", "udp"]',
            'protocol = "tcp"',
            'protocol = "tcp"',
            "factors.protocol",
            "an array of levels",
            '"tcp"',
        )
        self.check(
            '"tcp", "udp"]',
            '"tcp",\n"udp", # c\n "tcp"]',
            ' "tcp"]\nload',
            "factors.protocol[2]",
            "each level once",
            '"tcp" again',
        )
        self.check(
            "[0, 0.5]", "[0,\n0.0]", "0.0]", "factors.load[1]", "each level once", "0.0 again"
        )
        self.check(
            "[0, 0.5]", "[0, true]", "load = [", "factors.load[1]", "a number from 0 to 1", "true"
        )
        self.check("[0, 0.5]", "[0, nan]", "load = [", "factors.load[1]", "a number", "nan")
        self.check("[0, 0.5]", "[0, 1.5]", "load = [", "factors.load[1]", "from 0 to 1", "1.5")
        self.check("[0, 0.5]", '[0, "x"]', "load = [", "factors.load[1]", "from 0 to 1", '"x"')
        self.check("[0, 0.5]", "[[0]]", "load = [", "factors.load[0]", "from 0 to 1", "an array")
        self.check(
            "seconds = 3",
            "seconds = 0",
            "seconds",
            "fixed.seconds",
            "a number of at least 0.1 (s)",
            "0",
        )
        self.check(
            "seconds = 3",
            "second = 3",
            "second =",
            "fixed.second",
            "a parameter",
            "another key",
            "seconds",
        )
        self.check(
            "offload = false", 'offload = "no"', "offload", "fixed.offload", "true or false", '"no"'
        )
        self.check(
            "offload = false", "offload = 0", "offload", "fixed.offload", "true or false", "0"
        )
        self.check(
            "offload = false",
            "load = 0",
            "load = 0\n",
            "fixed.load",
            "a parameter that is no factor",
            "a factor of this name",
        )
        self.check("[fixed]", "[fixed.a]", "[fixed.a]", "fixed.a", "a parameter", "another key")
        self.check("offload = false", "comment = 1", "comment", "fixed.comment", "a text", "1")

    def test_a_file_without_factors(self):
        error = self.error(SMALL.partition("[factors]")[0])
        self.assertEqual(
            (error.key, error.expected, error.found, error.line),
            ("factors", "a table [factors]", "nothing", 1),
        )
        error = self.error(SMALL.partition("protocol")[0])
        self.assertEqual((error.key, error.found, error.line), ("factors", "an empty table", 4))
        error = self.error(SMALL.partition("[factors]")[0] + "factors = 1")
        self.assertEqual((error.key, error.found, error.line), ("factors", "1", 4))

    def test_a_key_that_belongs_before_the_tables(self):
        error = self.error(SMALL + 'measures = ["loss"]\n')
        self.assertEqual(error.expected, "measures before the first [table] of the file")
        self.assertEqual((error.line, error.found), (6, "it in factors"))
        error = self.error(SMALL + '[repeat]\ntimes = 1\nprimary = "loss"\n')
        self.assertEqual(error.expected, "primary before the first [table] of the file")
        self.assertEqual((error.line, error.found), (8, "it in repeat"))

    def test_exclude(self):
        self.check(
            'protocol = "udp"\n\n[repeat]',
            'protocol = "sctp"\n\n[repeat]',
            'protocol = "sctp"',
            "exclude[0].protocol",
            "a level of protocol: tcp, udp",
            '"sctp"',
        )
        self.check(
            '"user", "vhost-user"]\np',
            '"user", "vhost"]\np',
            'attachment = ["user"',
            "exclude[0].attachment",
            "a level of attachment",
            '"vhost"',
            "vhost-user",
        )
        self.check(
            'attachment = ["user", "vhost-user"]',
            "attachment = []",
            "attachment = []",
            "exclude[0].attachment",
            "a level or an array of levels",
            "an empty array",
        )
        self.check(
            'attachment = ["user", "vhost-user"]',
            "offered = 100",
            "offered",
            "exclude[0].offered",
            "a factor: attachment, protocol, load",
            "another key",
        )
        self.check(
            "[[exclude]]", "[exclude]", "[exclude]", "exclude", "tables [[exclude]]", "a table"
        )
        error = self.error(SMALL + "[[exclude]]\n[[exclude]]\n")
        self.assertEqual((error.line, error.key), (6, "exclude[0]"))
        error = self.error(SMALL + '[[exclude]]\nprotocol = ["tcp", "udp"]\n')
        self.assertEqual((error.line, error.key), (6, "exclude"))
        self.assertEqual(error.found, "no cell is left")

    def test_measures(self):
        self.check(
            '"loss"]\nprimary',
            '"los"]\nprimary',
            "measures",
            "measures[1]",
            "a measure of the workload: mbit_s, loss, packets",
            '"los"',
            "loss",
        )
        self.check(
            '"loss"]\nprimary',
            '"mbit_s"]\nprimary',
            "measures",
            "measures[1]",
            "each measure once",
            '"mbit_s" again',
        )
        self.check(
            '["mbit_s", "loss"]',
            "[]",
            "measures",
            "measures",
            "an array of measures",
            "an empty array",
        )
        self.check('["mbit_s", "loss"]', '"loss"', "measures", "measures", "an array", '"loss"')
        self.check(
            'primary = "loss"',
            'primary = "packets"',
            "primary",
            "primary",
            "one of mbit_s, loss",
            '"packets"',
        )
        self.check(
            '[["mbit_s", "loss"]]',
            '[["mbit_s"]]',
            "correlations",
            "correlations[0]",
            "a pair of measures",
            "an array",
        )
        self.check(
            '[["mbit_s", "loss"]]',
            '[["mbit_s", "packets"]]',
            "correlations",
            "correlations[0][1]",
            "a measure: mbit_s, loss",
            '"packets"',
        )
        self.check(
            '[["mbit_s", "loss"]]',
            '[["loss", "loss"]]',
            "correlations",
            "correlations[0]",
            "two different measures",
            '"loss" twice',
        )

    def test_repeat_order_disturbed(self):
        self.check(
            "times = 5",
            "times = 0",
            "times = 0",
            "repeat.times",
            "a whole number from 1 to 10000",
            "0",
        )
        self.check(
            "times = 5", "times = 1", "times = 1", "repeat.times", "at least 2 with until", "1"
        )
        self.check(
            "times = 5",
            "time = 5",
            "time =",
            "repeat.time",
            "a key of [repeat]: times",
            "another key",
            "times",
        )
        self.check(
            "until = 0.05", "until = 0", "until", "repeat.until", "a number above 0 up to 1", "0"
        )
        self.check(
            "until = 0.05\n",
            "",
            "at_most",
            "repeat.at_most",
            "at_most only together with until",
            "no until",
        )
        self.check(
            "at_most = 30\n", "", "[repeat]", "repeat.at_most", "a whole number from 5", "nothing"
        )
        self.check(
            "at_most = 30", "at_most = 4", "at_most", "repeat.at_most", "from 5 to 10000", "4"
        )
        self.check(
            "minutes = 60", "minutes = 0", "minutes", "repeat.minutes", "a number above 0", "0"
        )
        self.check(
            'kind = "interleaved"',
            'kind = "randomized"',
            'kind = "randomized"',
            "order.kind",
            "one of randomised, interleaved, given",
            '"randomized"',
            "randomised",
        )
        expected = "a factor: attachment, protocol, load"
        for names, index, found, close in (
            ('["attachement"]', 0, '"attachement"', "attachment"),
            ('["load", ["load"]]', 1, "an array", None),
            ("[1]", 0, "1", None),
        ):
            together = f"[order]\ntogether = {names}"
            key = f"order.together[{index}]"
            self.check("[order]", together, "together", key, expected, found, close)
        self.check(
            "[order]",
            '[order]\ntogether = ["load", "load"]',
            "together",
            "order.together[1]",
            "each factor once",
            '"load" again',
        )
        self.check(
            '[order]\nkind = "interleaved"',
            "[order]\nsort = 1",
            "sort",
            "order.sort",
            "a key of [order]: kind",
            "another key",
        )
        self.check(
            "others_cpus = 0.5",
            "others_cpus = -1",
            "others_cpus",
            "disturbed.others_cpus",
            "a number of at least 0",
            "-1",
        )
        self.check(
            "others_cpus = 0.5",
            "other_cpus = 1",
            "other_cpus",
            "disturbed.other_cpus",
            "a key of [disturbed]",
            "another key",
            "others_cpus",
        )
        self.check(
            "retries = 1",
            "retries = 1.5",
            "retries",
            "disturbed.retries",
            "a whole number from 0 to 100",
            "1.5",
        )
        self.check(
            "retries = 1",
            "count = 1",
            "count",
            "disturbed.count",
            "true or false",
            "1",
        )

    def test_quick_is_checked_without_being_asked_for(self):
        self.check(
            "[quick.factors]\n",
            "[quick.factors]\noffered = [1]\n",
            "offered",
            "quick.factors.offered",
            "a factor of the file",
            "another key",
        )
        self.check(
            '["ivshmem", "vhost-user"]\n[quick.fixed]',
            '["ivhsmem"]\n[quick.fixed]',
            'attachment = ["ivhsmem"]',
            "quick.factors.attachment[0]",
            "one of ivshmem",
            '"ivhsmem"',
            "ivshmem",
        )
        self.check(
            "seconds = 0.5",
            "load = 0.5",
            "load = 0.5",
            "quick.fixed.load",
            "a parameter that is no factor",
            "the factor load",
        )
        self.check(
            "times = 2",
            "times = 2\nat_most = 3",
            "at_most = 3\n",
            "quick.repeat.at_most",
            "at_most only together with until",
            "no until",
        )
        self.check(
            "[quick.fixed]",
            "[quick.fix]",
            "[quick.fix]",
            "quick.fix",
            "a table of [quick]: factors, fixed, repeat",
            "another key",
            "fixed",
        )
        text = FRACTION + "[quick.factors]\noffered = [10]\n"
        error = self.error(text)
        self.assertEqual((error.key, error.found), ("factors.offered", "1"))

    def test_designs(self):
        old, new = 'generators = ["D=-ABC"]', 'generators = [\n"D=ABC",\n"A=BCD"]'
        error = self.error(FRACTION.replace(old, new))
        self.assertEqual((error.key, error.line), ("design.generators[1]", 13))
        self.assertEqual(error.found, "A=BCD follows from D=ABC")
        error = self.error(FRACTION.replace(old, 'generators = ["D=A"]'))
        self.assertEqual((error.key, error.line), ("design.generators", 11))
        error = self.error(FRACTION.replace(old, ""))
        self.assertEqual((error.key, error.found), ("design.generators", "none"))
        self.assertEqual(error.line, 9, "the line of [design]")
        error = self.error(FRACTION.replace(old, "generators = [1]"))
        self.assertEqual((error.key, error.found), ("design.generators[0]", "1"))
        error = self.error(FRACTION.replace("[10, 100]", "[10, 100, 1000]"))
        self.assertEqual((error.key, error.line), ("factors.offered", 8))
        self.assertIn("two levels", error.expected)
        error = self.error(FRACTION.replace("fractional", "full"))
        self.assertEqual((error.key, error.found), ("design.generators", "D=-ABC"))
        error = self.error(FRACTION.replace("fractional", "half"))
        self.assertEqual((error.key, error.line), ("design.kind", 10))
        error = self.error(FRACTION + '[[exclude]]\nprotocol = "tcp"\n')
        self.assertEqual((error.key, error.line), ("exclude", 12))

    def test_too_many_cells(self):
        levels = ", ".join(map(str, range(1, 10001)))
        loads = ", ".join(str(n / 100) for n in range(6))
        error = self.error(SMALL + f"offered = [{levels}]\nload = [{loads}]\n")
        self.assertEqual((error.key, error.line, error.found), ("factors", 4, "120000"))
        self.assertIn("100000", error.expected)

    def test_plots(self):
        curve = 'kind = "curve"\nx = "load"'
        self.check(
            'kind = "curve"',
            'kind = "curves"',
            'kind = "curves"',
            "plots[0].kind",
            "one of curve, bars",
            '"curves"',
            "curve",
        )
        self.check('kind = "curve"\n', "", "[[plots]]", "plots[0].kind", "one of curve", "nothing")
        self.check(
            curve,
            'kind = "curve"',
            "[[plots]]",
            "plots[0].x",
            "one of attachment, protocol, load",
            "nothing",
        )
        self.check(
            'x = "load"',
            'x = "laod"',
            'x = "laod"',
            "plots[0].x",
            "one of attachment",
            '"laod"',
            "load",
        )
        self.check(
            'y = "mbit_s"',
            'y = "packets"',
            'y = "packets"',
            "plots[0].y",
            "one of mbit_s, loss",
            '"packets"',
        )
        self.check(
            'y = "mbit_s"',
            'z = "mbit_s"',
            "z =",
            "plots[0].z",
            "no z in a plot of kind curve",
            '"mbit_s"',
        )
        self.check(
            'curves = "attachment"',
            'curve = "attachment"',
            "curve =",
            "plots[0].curve",
            "a key of [[plots]]",
            "another key",
            "curves",
        )
        self.check(
            '["protocol"]',
            '["protokol"]',
            "panels",
            "plots[0].panels[0]",
            "a factor:",
            '"protokol"',
            "protocol",
        )
        self.check(
            '["protocol"]',
            '"protocol"',
            "panels",
            "plots[0].panels",
            "an array of factors",
            '"protocol"',
        )
        self.check(
            '["protocol"]',
            '["load"]',
            'kind = "curve"',
            "plots[0].kind",
            "each factor in one place",
            "load in two",
        )
        self.check(
            'log = "xy"', 'log = "yx"', "log", "plots[0].log", "one of x, y, xy", '"yx"', "y"
        )
        self.check(
            'x = "load"\ny = "attachment"',
            'x = "load"\ny = "mbit_s"',
            'y = "mbit_s"\n\n[[published]]',
            "plots[1].y",
            "one of attachment",
            '"mbit_s"',
        )
        self.check(
            "[[plots]]",
            "[[plot]]",
            "[[plot]]",
            "plot",
            "a key of an experiment",
            "another key",
            "plots",
        )

    def test_published(self):
        self.check(
            "value = 889", 'value = "889"', "value =", "published[0].value", "a number", '"889"'
        )
        self.check(
            "value = 889\n", "", "[[published]]", "published[0].value", "a number", "nothing"
        )
        self.check(
            "low = 800.5",
            "low = 900",
            "low =",
            "published[0].low",
            "a number of at most 889",
            "900",
        )
        self.check(
            "low = 800.5",
            "high = 800",
            "high =",
            "published[0].high",
            "a number of at least 889",
            "800",
        )
        self.check(
            'differs = "Hardware NIC"\n',
            "",
            "[[published]]",
            "published[0].differs",
            "a text",
            "nothing",
        )
        self.check(
            "load = 0 }",
            "load = 0.7 }",
            "match = { protocol",
            "published[0].match.load",
            "a level of load: 0.0, 0.5",
            "0.7",
        )
        self.check(
            "load = 0 }",
            "laod = 0 }",
            "match = { protocol",
            "published[0].match.laod",
            "a factor",
            "another key",
            "load",
        )
        self.check(
            'match = { attachment = "user" }',
            'match = "user"',
            'match = "user"',
            "published[1].match",
            "a table [published[1].match]",
            '"user"',
        )
        self.check(
            'label = "Slirp"',
            'label = ""',
            'label = ""',
            "published[1].label",
            "a text that is not empty",
            '""',
        )

    def test_files_that_are_no_toml(self):
        error = self.error("title = 'a'\nabout = [1,\n")
        self.assertEqual((error.expected, error.line), ("valid TOML", 2))
        error = self.error("a = 1\na = 2\n")
        self.assertEqual((error.line, error.found), (2, "Cannot overwrite a value"))
        error = self.error(b"title = '\xff'\n")
        self.assertEqual(error.expected, "text in UTF-8")
        error = self.error("a = " + "[" * 100_000)
        self.assertEqual(error.expected, "valid TOML")
        error = self.error(f"a = {'9' * 5000}")
        self.assertEqual(error.expected, "valid TOML")

    def test_files_that_cannot_be_read(self):
        for path, found in (
            (str(self.folder / "none.toml"), "No such file or directory"),
            (str(self.folder) + "/", "Is a directory"),
        ):
            with self.assertRaises(ExperimentError) as caught:
                load(path)
            self.assertEqual(caught.exception.found, found)
            self.assertTrue(str(caught.exception).startswith(path.rstrip("/")))

    def test_every_value_of_a_wrong_kind_is_an_experiment_error(self):
        """Each value of FULL in turn is replaced by one of every kind: no other exception comes."""
        data = tomllib.loads(FULL)
        kinds = (1, -1, 0.5, True, "", "x", [], [1], {}, {"a": 1}, [{}], [[[]]], 10**30)

        def places(value, path=()):
            items = (
                value.items()
                if isinstance(value, dict)
                else (enumerate(value) if isinstance(value, list) else ())
            )
            for key, item in items:
                yield (*path, key)
                yield from places(item, (*path, key))

        from tombolo_lab.tomltext import value_text

        refused = 0
        for place in places(data):
            for kind in kinds:
                changed = tomllib.loads(FULL)
                holder = changed
                for key in place[:-1]:
                    holder = holder[key]
                holder[place[-1]] = kind
                text = "\n".join(f"{key} = {value_text(item)}" for key, item in changed.items())
                with self.subTest(place=place, kind=kind):
                    try:
                        load(self.file(text))
                    except ExperimentError as error:
                        refused += 1
                        self.assertIsNotNone(error.line)
        self.assertGreater(refused, 500)


class BuiltIn(unittest.TestCase):
    def test_a_name_that_does_not_exist(self):
        names = mock.patch.object(model, "names", lambda: ["capacity", "stress"])
        with names, self.assertRaises(ExperimentError) as caught:
            load("capcity")
        self.assertEqual(
            str(caught.exception),
            "expected a file that ends in .toml, or an experiment: capacity, stress, "
            'found "capcity"; did you mean capacity?',
        )

    def test_each_built_in_experiment_loads_and_comes_back(self):
        for name in model.names():
            for quick in (False, True):
                with self.subTest(name=name, quick=quick):
                    experiment = load(name, quick=quick)
                    self.assertEqual(experiment.name, name)
                    with tempfile.TemporaryDirectory() as folder:
                        path = Path(folder) / "experiment.toml"
                        path.write_text(experiment.resolved())
                        again = load(str(path))
                    self.assertEqual(dataclasses.replace(again, path=experiment.path), experiment)


if __name__ == "__main__":
    unittest.main()
