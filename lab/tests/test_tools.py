"""What tools print, as they printed it here, and what is read from it."""

import sys
import unittest
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tombolo_lab.workloads import network, tools

# iperf 2.1.8, Debian 12.
TCP = """\
Client connecting to 127.0.0.1, TCP port 5001
[  1] local 127.0.0.1 port 57300 connected with 127.0.0.1 port 5001 (icwnd/mss/irtt=319/32741/31)
[ ID] Interval       Transfer     Bandwidth
[  1] 0.0000-1.0018 sec  1337216 KBytes  10934409 Kbits/sec
"""
UDP = """\
Sending 256 byte datagrams, IPG target: 195.31 us (kalman adjust)
[ ID] Interval       Transfer     Bandwidth
[  1] 0.0000-1.0003 sec  1281 KBytes  10489 Kbits/sec
[  1] Sent 5124 datagrams
[  1] Server Report:
[ ID] Interval       Transfer     Bandwidth        Jitter   Lost/Total Datagrams
[  1] 0.0000-1.0003 sec  1281 KBytes  10489 Kbits/sec   0.012 ms 51/5123 (1%)
"""
# iputils ping 20221126.
PING = """\
64 bytes from 127.0.0.1: icmp_seq=1 ttl=64 time=0.013 ms
64 bytes from 127.0.0.1: icmp_seq=2 ttl=64 time=0.032 ms
"""
# httperf 0.9.0.
HTTPERF = """\
Total: connections 10 requests 10 replies 10 test-duration 0.012 s

Reply time [ms]: response 1.0 transfer 0.1
Reply size [B]: header 204.0 content 100000.0 footer 0.0 (total 100204.0)
Net I/O: 82379.3 KB/s (674.9*10^6 bps)
Errors: total 2 client-timo 2 socket-timo 0 connrefused 0 connreset 0
"""


class Reports(unittest.TestCase):
    def test_iperf_over_tcp(self):
        self.assertAlmostEqual(tools.iperf_tcp(TCP).mbit_s, 10934.409)
        with self.assertRaisesRegex(tools.ToolError, "no rate"):
            tools.iperf_tcp("connect failed: Connection refused")

    def test_iperf_over_udp(self):
        [flow] = tools.iperf_udp(UDP)
        self.assertAlmostEqual(flow.mbit_s, 10.489)
        self.assertEqual((flow.sent, flow.lost, flow.jitter_ms), (5123, 51, 0.012))
        self.assertAlmostEqual(flow.loss, 51 / 5123)
        both = tools.iperf_udp(UDP + UDP.replace("51/5123", "0/100"))
        self.assertEqual([f.sent for f in both], [5123, 100])
        # A report of nothing but the sender's own line has no count.
        with self.assertRaisesRegex(tools.ToolError, "no count"):
            tools.iperf_udp(UDP.partition("[  1] Server")[0])

    def test_more_datagrams_than_were_expected_are_no_negative_loss(self):
        [flow] = tools.iperf_udp(UDP.replace("51/5123", "-3/5123"))
        self.assertEqual(flow.loss, 0)

    def test_the_words_of_iperf(self):
        def words(*arguments):
            return " ".join(tools.iperf_command("10.0.0.1", *arguments))

        self.assertEqual(words("tcp", True, 2, 256, ""), "iperf -c 10.0.0.1 -f k -t 2 -l 256 -R")
        self.assertEqual(
            words("udp", True, 0.5, 0, "400pps"), "iperf -c 10.0.0.1 -f k -t 0.5 -b 400pps -u -r"
        )

    def test_ping(self):
        self.assertEqual(tools.ping_times(PING), [13.0, 32.0])

    def test_httperf(self):
        found = tools.httperf_report(HTTPERF)
        self.assertEqual((found.replies, found.errors), (10, 2))
        self.assertAlmostEqual(found.replies_s, 10 / 0.012)
        self.assertAlmostEqual(found.mbit_s, 10 * 100000 * 8e-6 / 0.012)
        self.assertAlmostEqual(found.reply_ms, 1.1)
        with self.assertRaisesRegex(tools.ToolError, "has no"):
            tools.httperf_report("httperf: connection refused")

    def test_a_tool_that_hangs_is_ended(self):
        with self.assertRaisesRegex(tools.ToolError, "not done after 0.2 s"):
            tools.bounded(["sleep", "30"], 0.2)


class Counters(unittest.TestCase):
    def test_rates_are_of_the_port_that_the_load_comes_from(self):
        def counters(rx, tx, turns, wakeups):
            return {"rx_frames": rx, "tx_frames": tx, "turns": turns, "wakeups": wakeups}

        before = {"host": counters(10, 5, 2, 1), "guest": counters(0, 10, 0, 0)}
        after = {"host": counters(110, 55, 22, 5), "guest": counters(50, 110, 50, 8)}
        up = network.port_rates(before, after, False, 2)
        self.assertEqual(up, {"frames_per_turn": 5.0, "port_frames_s": 75.0, "wakeups_s": 2.0})
        down = network.port_rates(before, after, True, 2)
        self.assertEqual(down, {"frames_per_turn": 1.0, "port_frames_s": 75.0, "wakeups_s": 4.0})
        self.assertEqual(network.port_rates(before, before, False, 1)["frames_per_turn"], 0)

    def test_the_search_finds_the_highest_rate_without_loss(self):
        cell = {"search_top": 100.0, "search_steps": 8}
        offered = []

        def probe(end, trial, rate):
            offered.append(float(rate.removesuffix("M")))
            self.assertEqual(trial["protocol"], "udp")
            return {"loss": 0.0 if offered[-1] <= 37 else 0.2, "unsent": None}

        with unittest.mock.patch.object(network, "loaded", probe):
            found = network.Budget.loss_free(None, cell)
        self.assertAlmostEqual(found, 37, delta=100 / 2**8)
        self.assertLessEqual(found, 37)
        # The upper end first, and each rate that lost twice.
        self.assertEqual(len(set(offered)), 9)


if __name__ == "__main__":
    unittest.main()
