"""Guests on Xen: what is skipped and why, the domain's file, and what dom0's commands print.

Domains themselves are run by `tombolo lab run guest-vs-guest --set host=xen` and `budget-xen`; booting Xen without
KVM takes a minute.
"""

import shlex
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import harness
from tombolo_lab.workloads import Skip, domains, guests, netfront, nics, tools

PING = """\
64 bytes from 10.88.0.20: icmp_seq=1 ttl=64 time=2.50 ms
64 bytes from 10.88.0.20: icmp_seq=2 ttl=64 time=1.50 ms
"""
FLOOD = """\
--- 10.88.0.20 ping statistics ---
300 packets transmitted, 299 received, 0.333333% packet loss, time 1200ms
rtt min/avg/max/mdev = 1.000/2.957/9.500/0.400 ms, ipg/ewma 4.0/3.0 ms
"""


class Dom0:
    """Answers commands by their program, and keeps them."""

    def __init__(self, **answers):
        self.answers, self.commands = answers, []

    def run(self, command, seconds, check):
        self.commands.append(command)
        program = command.split()[0].rpartition("/")[2]
        return SimpleNamespace(text=self.answers[program])


class Answer(NamedTuple):
    code: int
    text: str


class Netfront(unittest.TestCase):
    def test_what_netfront_does_not_have_is_skipped(self):
        self.assertEqual(netfront.knobs_of("netdev_budget=10"), nics.Knobs(netdev_budget=10))
        for text in ("napi_weight=4", "rx_ring=512", "queues=2"):
            with self.subTest(text), self.assertRaisesRegex(Skip, "not knobs of netfront"):
                netfront.knobs_of(text)

    def test_the_domains_answer_ends_with_the_exit_code(self):
        answers = [Answer(0, "a line\nexit 0"), Answer(0, "no such knob\nexit 2"), Answer(1, "")]
        asked = []

        def run(command, seconds, check):
            asked.append(command)
            return answers.pop(0)

        domain = netfront.Domain(SimpleNamespace(run=run))
        self.assertEqual(domain.run("echo 'a line'"), Answer(0, "a line\n"))
        self.assertEqual(shlex.split(asked[0])[5], "echo 'a line'")
        with self.assertRaisesRegex(tools.ToolError, "in the domain: no such knob"):
            domain.run("false")
        with self.assertRaisesRegex(tools.ToolError, "no answer from the domain"):
            domain.run("true")

    def test_the_mean_of_pings_is_read(self):
        self.assertEqual(netfront.mean_us(FLOOD), 2957.0)
        self.assertIsNone(netfront.mean_us("3 packets transmitted, 0 received"))


class Domains(unittest.TestCase):
    def test_the_file_names_the_bridge_only_for_netback(self):
        self.assertIn("bridge=br0", domains.config("cell", "netback"))
        self.assertNotIn("br0", domains.config("cell", "tombolo"))
        for guest, memory in domains.MEMORY_MIB.items():
            text = domains.config(guest, "tombolo")
            self.assertIn(f"memory={memory}\n", text)
            self.assertIn(f"vif=['mac={domains.MAC},", text)
        self.assertIn("cmdline='ip=10.88.0.20/24'", domains.config("cell", "tombolo"))
        self.assertIn("ramdisk=", domains.config("linux", "tombolo"))

    def test_pings_are_read_from_dom0(self):
        xen = Dom0(ping=PING)
        self.assertEqual(domains.Domain(xen, "cell", 1.0).ping(2), [2500.0, 1500.0])
        self.assertEqual(xen.commands, ["/usr/bin/ping -n -i 0.01 -c 2 10.88.0.20"])
        with self.assertRaisesRegex(tools.ToolError, "no reply to 2 pings"):
            domains.Domain(Dom0(ping="unreachable"), "cell", 1.0).ping(2)

    def test_a_flood_counts_what_was_lost(self):
        found = domains.Domain(Dom0(ping=FLOOD), "linux", 1.0).flood(300)
        self.assertEqual(found, (300, 299, [1000.0, 2957.0, 9500.0]))

    def test_http_is_asked_by_the_same_command_as_under_qemu(self):
        xen = Dom0(httperf="httperf: connection refused")
        with self.assertRaises(tools.ToolError):
            domains.Domain(xen, "cell", 1.0).httperf("/bytes/1000", 3, 2, 9)
        words = tools.httperf_words("10.88.0.20", "/bytes/1000", 3, 2, 9)
        self.assertEqual(xen.commands, ["/usr/bin/" + " ".join(map(str, words))])


class Checks(unittest.TestCase):
    def cell(self, **more):
        defaults = {name: one.default for name, one in guests.Guests.parameters.items()}
        return defaults | {"host": "xen"} | more

    def test_a_missing_test_bed_is_named(self):
        with (
            tempfile.TemporaryDirectory() as empty,
            unittest.mock.patch.object(harness.lib(), "BUILD", Path(empty)),
            self.assertRaisesRegex(Skip, r"run \./x xen"),
        ):
            guests.Guests().check(self.cell())

    def test_what_dom0_does_not_have_is_named(self):
        with self.assertRaisesRegex(Skip, "dom0 has no wrk"):
            guests.Guests().check(self.cell(tool="wrk"))

    def test_a_linux_domain_has_some_replies_only(self):
        with tempfile.TemporaryDirectory() as bed:
            (Path(bed) / "xen").mkdir()
            (Path(bed) / "xen/version").write_text("1")
            with (
                unittest.mock.patch.object(harness.lib(), "BUILD", Path(bed)),
                unittest.mock.patch.multiple(
                    domains.harness,
                    program=unittest.mock.DEFAULT,
                    need_program=unittest.mock.DEFAULT,
                ),
                self.assertRaisesRegex(Skip, "replies of 1000, 100000"),
            ):
                guests.Guests().check(self.cell(guest="linux", bytes=777))

    def test_a_namespace_is_no_guest(self):
        with self.assertRaisesRegex(Skip, "no guest"):
            guests.Guests().check(self.cell(guest="namespace"))


if __name__ == "__main__":
    unittest.main()
