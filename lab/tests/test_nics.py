"""Linux guests with NICs: knobs as commands, counters as numbers, and the workload's rows.

What boots a guest is at the end; it is skipped, by name, where the guest is not built.
"""

import contextlib
import os
import re
import sys
import tempfile
import unittest
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab import LabError, harness
from tombolo_lab.workloads import Skip, cards, nics, paced
from tombolo_lab.workloads.nics import Knobs, NicCounters, Shape

# Of a guest with virtio-net, shortened.
COUNTED = """\
           CPU0       CPU1       \r
 25:        100         20   PCI-MSI 16385-edge      virtio0-input.0\r
 31:          7          0   IO-APIC  21-fasteoi   eth0\r
      NET_RX:        300         41\r
softnet 00000017 00000002 0000000a 00000000 00000000 00000000 00000000 00000000\r
softnet 0000001a 00000001 00000001 00000000 00000000 00000000 00000000 00000000\r
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors\r
Udp: 1500 1 40 3 39 0\r
cpu  32 0 466 478 20 1 27 3 0 0\r
cpu0 21 0 282 172 0 0 11 0 0 0\r
rx_packets 1600\r
rx_dropped 5\r
rx_missed_errors 2\r
{ dev_name: eth0                            , work:         64 } hitcount:          3\r
{ dev_name: eth0                            , work:          0 } hitcount:          9\r
{ dev_name: (no_device)                     , work:          1 } hitcount:         12\r
"""


class Counters(unittest.TestCase):
    def test_all_parts_are_read(self):
        seen = NicCounters.parse(COUNTED)
        self.assertEqual((seen.packets, seen.dropped), (1600, 7))
        self.assertEqual((seen.interrupts, seen.softirqs), (127, 341))
        self.assertEqual((seen.backlog_dropped, seen.squeezed), (3, 11))
        self.assertEqual((seen.udp_datagrams, seen.udp_overflows), (1500, 39))
        self.assertEqual((seen.ticks, seen.softirq, seen.busy), (1027, 27, 529))
        self.assertEqual(seen.polls["eth0"], Counter({64: 3, 0: 9}))
        self.assertEqual(seen.polls["(no_device)"], Counter({1: 12}))
        self.assertEqual(nics.packets_of(seen.polls["eth0"]), 192)

    def test_a_missing_part_is_named(self):
        for part, word in (("rx_packets", "rx_packets"), ("NET_RX", "NET_RX"), ("Udp:", "Udp")):
            text = "\n".join(line for line in COUNTED.splitlines() if part not in line)
            with self.assertRaisesRegex(LabError, word):
                NicCounters.parse(text)

    def test_a_difference_counts_what_came_between(self):
        later = COUNTED.replace("rx_packets 1600", "rx_packets 1700").replace(
            "work:         64 } hitcount:          3", "work:         64 } hitcount:          5"
        )
        since = NicCounters.parse(later) - NicCounters.parse(COUNTED)
        self.assertEqual((since.packets, since.interrupts, since.udp_overflows), (100, 0, 0))
        self.assertEqual(since.polls["eth0"], Counter({64: 2}))

    def test_a_counter_that_goes_back_is_an_error(self):
        less = NicCounters.parse(COUNTED.replace("rx_packets 1600", "rx_packets 1500"))
        with self.assertRaisesRegex(LabError, "packets went back by 100"):
            less - NicCounters.parse(COUNTED)
        fewer = NicCounters.parse(COUNTED.replace("hitcount:          9", "hitcount:          8"))
        with self.assertRaisesRegex(LabError, "eth0 went back"):
            fewer - NicCounters.parse(COUNTED)

    def test_shares_of_cpu_are_of_all_vcpus(self):
        seen = NicCounters(busy=30, softirq=10, ticks=40)
        self.assertEqual((seen.busy_cpus(), seen.softirq_cpus()), (1.5, 0.5))
        self.assertEqual(NicCounters().busy_cpus(), 0.0)


class KnobCommands(unittest.TestCase):
    def test_every_knob_is_written(self):
        knobs = Knobs(
            netdev_budget=5, netdev_budget_usecs=77, dev_weight=3, rps=True, threaded=True,
            defer_hard_irqs=2, gro_flush_ns=200000, busy_poll_us=50, gro=False,
        )  # fmt: skip
        text = "; ".join(knobs.commands("e1000", None))
        for part in (
            "echo 5 >/proc/sys/net/core/netdev_budget;",
            "echo 77 >/proc/sys/net/core/netdev_budget_usecs",
            "echo 3 >/proc/sys/net/core/dev_weight",
            "do echo 1 >$q/rps_cpus",
            "echo 1 >/sys/class/net/eth0/threaded",
            "echo 2 >/sys/class/net/eth0/napi_defer_hard_irqs",
            "echo 200000 >/sys/class/net/eth0/gro_flush_timeout",
            "echo 50 >/proc/sys/net/core/busy_poll;",
            "echo 50 >/proc/sys/net/core/busy_read",
            "ethtool -K eth0 gro off",
            "napi/eth0",
        ):
            self.assertIn(part, text)
        self.assertNotIn("insmod", text)
        self.assertNotIn("ethtool -G", text)

    def test_defaults_come_back(self):
        lines = Knobs().commands("virtio-net", Knobs(napi_weight=1, rps=True, rx_ring=512))
        self.assertIn("insmod /lib/modules/virtio_net.ko napi_weight=64", lines)
        self.assertIn("ethtool -G eth0 rx 256", lines)
        self.assertTrue(any("echo 0 >$q/rps_cpus" in line for line in lines))

    def test_the_driver_is_loaded_only_for_another_weight(self):
        for before, loads in ((None, False), (Knobs(napi_weight=8), True)):
            lines = Knobs().commands("virtio-net", before)
            self.assertEqual("rmmod virtio_net" in lines, loads)
        self.assertNotIn(
            "rmmod virtio_net",
            Knobs(napi_weight=8, threaded=True).commands("virtio-net", Knobs(napi_weight=8)),
        )

    def test_other_drivers_have_no_weight(self):
        with self.assertRaisesRegex(ValueError, "e1000"):
            Knobs(napi_weight=1).commands("e1000", None)

    def test_a_command_line_fits_the_console(self):
        knobs = Knobs(napi_weight=1, rps=True, threaded=True, rx_ring=128)
        self.assertLess(len("; ".join(knobs.commands("virtio-net", None))), 3900)

    def test_interrupts_of_several_queues_go_to_all_vcpus(self):
        one, two = (" ".join(Knobs().commands("virtio-net", None, queues)) for queues in (1, 2))
        self.assertIn("echo 1 >/proc/irq/$n/smp_affinity", one)
        self.assertIn("echo $((1 << (i++ % 2))) >/proc/irq/$n/smp_affinity", two)

    def test_shapes(self):
        self.assertEqual(Shape().device("e1000"), "e1000,romfile=")
        text = Shape(queues=2, device_ring=1024, offloads=False).device("virtio-net")
        for part in ("mq=on", "vectors=6", "rx_queue_size=1024", "csum=off", "host_tso4=off"):
            self.assertIn(part, text.split(","))
        with self.assertRaises(ValueError):
            Shape(queues=2).device("vmxnet3")


class Needs(unittest.TestCase):
    def test_an_unknown_model_is_named(self):
        with self.assertRaisesRegex(Skip, "ne2000"):
            nics.need("ne2000")

    def test_a_guest_that_is_not_built_is_named(self):
        if os.geteuid():
            self.skipTest("needs root")
        with tempfile.TemporaryDirectory() as folder:
            before = os.environ.get("TOMBOLO_LAB_NICS")
            os.environ["TOMBOLO_LAB_NICS"] = folder
            try:
                with self.assertRaisesRegex(Skip, re.escape(folder)):
                    nics.need("e1000")
            finally:
                del os.environ["TOMBOLO_LAB_NICS"]
                if before is not None:
                    os.environ["TOMBOLO_LAB_NICS"] = before


class Words(unittest.TestCase):
    def test_knobs_are_read(self):
        self.assertEqual(nics.settings("default", "e1000"), (Shape(), Knobs()))
        self.assertEqual(nics.settings("", "e1000"), (Shape(), Knobs()))
        self.assertEqual(
            nics.settings("netdev_budget=8 threaded=1 gro=0", "e1000"),
            (Shape(), Knobs(netdev_budget=8, threaded=True, gro=False)),
        )
        self.assertEqual(
            nics.settings("queues=2 offloads=0 rps=1", "virtio-net"),
            (Shape(queues=2, offloads=False), Knobs(rps=True)),
        )

    def test_every_knob_has_a_range_that_holds_its_default(self):
        for name, allowed in nics.RANGES.items():
            kind = Shape if name in nics.SHAPE_NAMES else Knobs
            self.assertIn(int(getattr(kind(), name)), allowed, name)
        names = {each.name for kind in (Shape, Knobs) for each in fields(kind)}
        self.assertEqual(set(nics.RANGES), names)

    def test_wrong_words_are_refused_with_a_near_name_and_the_range(self):
        for text, words in (
            ("netdev_bugdet=8", r"found 'netdev_bugdet=8'; did you mean netdev_budget\?"),
            ("netdev_budget", "netdev_budget: expected 1 to 100000, found ''"),
            ("netdev_budget=0", "netdev_budget: expected 1 to 100000, found '0'"),
            ("netdev_budget_usecs=2000", "expected 8000 to"),
            ("device_ring=300", "device_ring: expected 0 or 256 or 512 or 1024, found '300'"),
            ("threaded=yes", "threaded: expected 0 or 1, found 'yes'"),
        ):
            with self.assertRaisesRegex(LabError, words):
                nics.settings(text, "virtio-net")

    def test_a_point_that_needs_another_guest_takes_longer(self):
        cell = {name: one.default for name, one in cards.Nics.parameters.items()}
        # Skipped for e1000, but its time is asked for by `ls` all the same.
        plain, weight, queues = (
            cards.Nics().seconds(cell | {"model": "e1000", "knobs": knobs})
            for knobs in ("default", "napi_weight=8", "queues=2")
        )
        self.assertEqual(plain, weight)
        self.assertEqual(queues, plain + cards.BOOT_S)

    def test_what_a_driver_does_not_have_is_skipped(self):
        with self.assertRaisesRegex(Skip, "weight of e1000's driver is a constant"):
            nics.settings("napi_weight=8", "e1000")
        with self.assertRaisesRegex(Skip, "rtl8139's driver takes none by ethtool"):
            nics.settings("rx_ring=512", "rtl8139")
        with self.assertRaisesRegex(Skip, "offloads are virtio-net's, not vmxnet3's"):
            nics.settings("queues=2", "vmxnet3")


class Rows(unittest.TestCase):
    def seen(self, **more):
        return NicCounters(packets=100, interrupts=20, busy=30, softirq=10, ticks=40,
                           polls={"eth0": Counter({0: 7, 1: 10, 64: 2})}, **more)  # fmt: skip

    def usage(self):
        return SimpleNamespace(
            seconds=2.0,
            processes={"guest": SimpleNamespace(cpus=0.5)},
            interrupts_s=1000.0,
            softirq_cpus=0.1,
        )

    def test_rates_are_of_the_loads_own_seconds(self):
        """The meter's seconds have the start and the report of the load in them too."""
        cell = {name: one.default for name, one in cards.Nics.parameters.items()} | {"seconds": 1}
        first = NicCounters(packets=0, interrupts=0, busy=0, softirq=0, ticks=0, polls={})
        looks = iter([first, self.seen()])
        nic = SimpleNamespace(counters=lambda: next(looks), space=None, pid=1, model="virtio-net")
        meter = mock.MagicMock()
        meter.__enter__.return_value.usage = self.usage()
        with (
            mock.patch.object(cards.machine, "Meter", lambda *_: meter),
            mock.patch.object(cards.tools, "pinging", lambda *_: contextlib.nullcontext([])),
            mock.patch.object(cards.paced, "send", lambda *_: {"sent_seconds": 0.9}),
            mock.patch.object(cards.network, "row_of", lambda *_: {}),
            mock.patch.object(cards, "losses", lambda *_: {}),
        ):
            found = cards.Nics().loaded(nic, cell, Knobs(), 1)
        self.assertEqual((found["port_frames_s"], found["interrupts_s"]), (100.0, 20.0))

    def test_polls_without_packets_are_left_out(self):
        polls, weight = cards.polls_of(self.seen(), Knobs(), "virtio-net")
        self.assertEqual((polls, weight), (Counter({1: 10, 64: 2}), 64))
        row = cards.guest_row(self.seen(), 2.0, 1, polls, weight)
        self.assertEqual(row["packets_per_poll"], 138 / 12)
        self.assertEqual(row["full_polls"], 2 / 12)
        self.assertEqual((row["port_frames_s"], row["interrupts_s"]), (50.0, 10.0))
        self.assertEqual((row["inside_cpus"], row["inside_softirq_cpus"]), (0.75, 0.25))
        self.assertEqual(
            cards.host_row(self.seen(), self.usage())["cpu_us_per_frame"], 0.5 * 2 * 1e6 / 100
        )

    def test_the_weight_is_that_of_what_polls(self):
        seen = self.seen()
        self.assertEqual(cards.polls_of(seen, Knobs(napi_weight=4), "virtio-net")[1], 4)
        self.assertEqual(cards.polls_of(seen, Knobs(), "rtl8139")[1], 16)
        polls, weight = cards.polls_of(seen, Knobs(rps=True, dev_weight=8), "e1000")
        self.assertEqual((polls, weight), (Counter(), 8))

    def test_a_load_without_polls_has_no_mean(self):
        row = cards.guest_row(self.seen(), 2.0, 2, Counter(), 64)
        self.assertEqual((row["packets_per_poll"], row["full_polls"]), (None, 0))

    def test_counts_that_contradict_each_other_are_refused(self):
        done = {"sent": 100, "received": 80}
        self.assertEqual(
            cards.losses(done, self.seen(udp_overflows=5)), {"loss_socket": 0.05, "loss_port": 0.15}
        )
        with self.assertRaisesRegex(LabError, "101 datagrams arrived of 100 packets"):
            cards.losses({"sent": 200, "received": 101}, self.seen())
        with self.assertRaisesRegex(LabError, "more than the 100 that were sent"):
            cards.losses({"sent": 100, "received": 90}, self.seen(udp_overflows=75))

    def test_a_histogram_is_thinned_in_proportion(self):
        self.assertEqual(cards.thinned({1: 2, 5: 1}), [1, 1, 5])
        found = Counter(cards.thinned({1: 90_000, 64: 10_000}, 100))
        self.assertEqual(found, {1: 90, 64: 10})


class RealGuest(unittest.TestCase):
    """One boot: a datagram's way is counted the same at all places."""

    def test_counts_agree_and_knobs_hold(self):
        try:
            nics.need("virtio-net")
            paced.program()
            harness.need_program("ping", "iputils-ping")
        except Skip as reason:
            self.skipTest(str(reason))
        with harness.Namespace() as space, nics.open_nic("virtio-net", Shape(), space, 10) as nic:
            nic.apply(Knobs(napi_weight=4, netdev_budget=8, threaded=True))
            read = "cat /sys/module/virtio_net/parameters/napi_weight /proc/sys/net/core/"
            text = nic.guest.run(read + "netdev_budget; cat /sys/class/net/eth0/threaded").text
            self.assertEqual(text.split(), ["4", "8", "1"])
            nic.apply(Knobs(napi_weight=4))
            port = nic.serve("udp", 8192)
            self.assertEqual(nic.serve("udp", 8192), port)
            before = nic.counters()
            row = paced.send(space, nics.GUEST, "udp", 256, 400, 0.5, port)
            seen = nic.counters() - before
            # A busy machine may have sent fewer than the 200 that were due.
            sent = row["sent"]
            self.assertEqual(sent, row["received"])
            # The datagrams that ask for the report come on top, and ARP.
            self.assertGreater(seen.packets, sent)
            self.assertLess(seen.packets, sent + 30)
            self.assertGreaterEqual(seen.udp_datagrams, sent)
            self.assertEqual(seen.udp_overflows, 0)
            polls = seen.polls["eth0"]
            self.assertLessEqual(max(polls), 4)
            self.assertEqual(nics.packets_of(polls), seen.packets)


if __name__ == "__main__":
    unittest.main()
